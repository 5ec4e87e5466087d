"""One attention call, checked: what both attention kernels and the twin are built from."""

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import autotune, checks
from .errors import KernelInputError, KernelTypeError
from .launch import device_limits

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionProblem:
    """A checked attention call. `mask` is expanded to [B, H_q, Q, kv_len] (broadcast dims have stride 0).

    A causal offset or a window that hides nothing is dropped here, so that it costs nothing later.
    """

    q: Tensor
    k_arena: Tensor
    v_arena: Tensor
    block_table: Tensor
    seq_lens: Tensor
    kv_len: int
    scale: float
    causal_offset: int | None
    window: int | None
    mask: Tensor | None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k_arena.shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.num_kv_heads

    @property
    def q_len(self) -> int:
        return self.q.shape[2]

    @property
    def packed_rows(self) -> int:
        """Rows of the M tile: every query of every head of one KV head."""
        return self.q_len * self.group

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def v_head_dim(self) -> int:
        return self.v_arena.shape[3]

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.q.shape[1], self.q_len, self.v_head_dim)

    @property
    def has_bias(self) -> bool:
        return self.mask is not None and self.mask.dtype != torch.bool

    @property
    def span(self) -> int:
        """Upper bound of the keys that one tile of queries reads."""
        return self.kv_len if self.window is None else min(self.kv_len, self.window + self.q_len)

    def tuning_key(self) -> tuple[Hashable, ...]:
        """Exactly what changes the fastest configuration; the lengths enter as powers of two."""
        return (
            device_limits(self.q.device).name,
            self.q.dtype,
            self.head_dim,
            self.v_head_dim,
            self.group,
            self.k_arena.shape[2],
            autotune.bucket(self.packed_rows, 16, 1024),
            autotune.bucket(self.span, 256, 32768),
            autotune.bucket(self.batch * self.num_kv_heads, 1, 1024),
            self.causal_offset is not None,
            self.window is not None,
            self.mask is not None,
            self.has_bias,
            self.softcap is not None,
        )

    def kernel_arguments(self) -> dict[str, object]:
        """Arguments that the decode and the prefill kernel share, by parameter name."""
        base = 1.0 if self.has_bias else LOG2E
        arguments: dict[str, object] = {
            "block_table_ptr": self.block_table,
            "table_batch_stride": self.block_table.stride(0),
            "table_block_stride": self.block_table.stride(1),
            "seq_lens_ptr": self.seq_lens,
            "kv_len": self.kv_len,
            "score_scale": self.scale / self.softcap if self.softcap else self.scale * base,
            "softcap": (self.softcap or 0.0) * base,
            "sinks_ptr": self.sinks,
            "causal_offset": self.causal_offset or 0,
            "window": self.window or 0,
            "num_kv_heads": self.num_kv_heads,
            "packed_rows": self.packed_rows,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "V_HEAD_DIM": self.v_head_dim,
            "BLOCK_SIZE": self.k_arena.shape[2],
            "TILE_D": max(16, triton.next_power_of_2(self.head_dim)),
            "TILE_DV": max(16, triton.next_power_of_2(self.v_head_dim)),
            "IS_CAUSAL": self.causal_offset is not None,
            "HAS_WINDOW": self.window is not None,
            "HAS_MASK": self.mask is not None,
            "HAS_BIAS": self.has_bias,
            "HAS_SOFTCAP": self.softcap is not None,
            "HAS_SINKS": self.sinks is not None,
        }
        arguments |= pointer("q", self.q, ("batch", "head", "query", "dim"))
        arguments |= pointer("k_arena", self.k_arena, ("block", "head", "slot", "dim"))
        arguments |= pointer("v_arena", self.v_arena, ("block", "head", "slot", "dim"))
        mask = self.mask.view(torch.uint8) if self.mask is not None and not self.has_bias else self.mask
        arguments |= pointer("mask", mask, ("batch", "head", "query", "key"))
        return arguments


def pointer(name: str, value: Tensor | None, dims: tuple[str, ...]) -> dict[str, object]:
    """`{name}_ptr` and a `{name}_{dim}_stride` per dim; an absent tensor has no pointer and zero strides."""
    strides = value.stride() if value is not None else (0,) * len(dims)
    return {f"{name}_ptr": value, **{f"{name}_{dim}_stride": s for dim, s in zip(dims, strides, strict=True)}}


def attention_problem(
    q: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_len: int,
    scale: float,
    causal_offset: int | None,
    window: int | None,
    mask: Tensor | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> AttentionProblem:
    """Check every argument of an attention call; raises KernelInputError or KernelTypeError."""
    checks.arena("k_arena", k_arena)
    checks.arena("v_arena", v_arena)
    checks.pair(k_arena, v_arena)
    checks.tensor("q", q, 4, (k_arena.dtype,))
    checks.same("device", "q", q.device, "k_arena", k_arena.device)
    checks.same("head dim", "q", q.shape[3], "k_arena", k_arena.shape[3])
    batch, width = checks.table(block_table, seq_lens, k_arena)
    checks.same("batch size", "q", q.shape[0], "block_table", batch)
    num_heads, num_kv_heads = q.shape[1], k_arena.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise KernelInputError(
            f"q has {num_heads} heads, the arenas have {num_kv_heads}; allowed: a multiple of the arenas' "
            "heads; pass q as [B, H_q, Q, D]"
        )
    checks.context_length(kv_len, width, k_arena.shape[2])
    if not isinstance(scale, (int, float)):
        raise KernelTypeError(f"scale is a {type(scale).__name__}; pass a float such as head_dim ** -0.5")
    causal_offset, window = _visible_limits(causal_offset, window, q.shape[2], kv_len)
    if mask is not None:
        mask = _expand_mask(mask, q, kv_len)
    if softcap is not None:
        softcap = checks.positive("softcap", softcap)
    if sinks is not None:
        checks.sinks(sinks, q)
    return AttentionProblem(
        q, k_arena, v_arena, block_table, seq_lens, kv_len, float(scale), causal_offset, window, mask, softcap, sinks
    )


def _visible_limits(
    causal_offset: int | None, window: int | None, q_len: int, kv_len: int
) -> tuple[int | None, int | None]:
    if causal_offset is None:
        if window is not None:
            raise KernelInputError(
                f"window is {window} but causal_offset is None; a window is counted back from the causal "
                "diagonal: pass causal_offset (kv_len - q_len for the usual one)"
            )
        return None, None
    checks.integer("causal_offset", causal_offset, -checks.MAX_POSITION, checks.MAX_POSITION)
    if window is not None:
        checks.integer("window", window, 1, 2**63 - 1)
        if window >= q_len + causal_offset:
            window = None
    if window is None and causal_offset >= kv_len - 1:
        causal_offset = None
    return causal_offset, window


def _expand_mask(mask: Tensor, q: Tensor, kv_len: int) -> Tensor:
    checks.tensor("mask", mask, 4, (torch.bool, *checks.FLOAT_DTYPES))
    checks.same("device", "mask", mask.device, "q", q.device)
    full = (*q.shape[:3], kv_len)
    if any(got not in (1, want) for got, want in zip(mask.shape, full, strict=True)):
        raise KernelInputError(
            f"mask has shape {tuple(mask.shape)}; allowed: {full} where any dim may be 1; slice or unsqueeze it"
        )
    return mask.expand(full)
