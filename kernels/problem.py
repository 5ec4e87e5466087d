"""One attention call, checked: what both attention kernels and the twin are built from."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from . import autotune, checks
from .errors import KernelInputError, KernelTypeError
from .launch import device_limits
from .rounding import next_power_of_2

PAIRED_DIMS = 16  # of 8 bits: a load of 16 bytes


@dataclass(frozen=True)
class AttentionProblem:
    """A checked attention call. `mask` is expanded to [B, H_q, Q, kv_len] (broadcast dims have stride 0).

    A causal offset or a window that hides nothing is dropped here, so that it costs nothing later. `query_offset` is
    the logical key at which query 0 stands, `row_start` that of every row's first token (None: rows end with the last
    key); `hidden` [B] counts first tokens that are not seen, `shared_prefix` those that all rows share.
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
    softcap: float | None
    sinks: Tensor | None
    chunk: int | None
    slopes: Tensor | None
    k_scales: Tensor | None
    v_scales: Tensor | None
    row_start: int | None
    hidden: Tensor | None
    query_offset: int
    shared_prefix: int

    @cached_property
    def batch(self) -> int:
        return self.q.shape[0]

    @cached_property
    def num_kv_heads(self) -> int:
        return self.k_arena.shape[1]

    @cached_property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.num_kv_heads

    @cached_property
    def q_len(self) -> int:
        return self.q.shape[2]

    @cached_property
    def packed_rows(self) -> int:
        """Rows of the M tile: every query of every head of one KV head."""
        return self.q_len * self.group

    @cached_property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @cached_property
    def v_head_dim(self) -> int:
        return self.v_arena.shape[3]

    @cached_property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.q.shape[1], self.q_len, self.v_head_dim)

    @cached_property
    def has_bias(self) -> bool:
        return self.mask is not None and self.mask.dtype != torch.bool

    @cached_property
    def span(self) -> int:
        """Upper bound of the keys that one tile of queries reads."""
        limits = [limit + self.q_len for limit in (self.window, self.chunk) if limit is not None]
        return min(self.kv_len, *limits) if limits else self.kv_len

    @cached_property
    def head_tiles(self) -> tuple[int, int]:
        """K's dims in two pieces, powers of two: the first, and what lies behind it (0 if nothing)."""
        return head_tiles(self.head_dim)

    @cached_property
    def value_tile(self) -> int:
        """V's dims, padded to a power of two."""
        return max(16, next_power_of_2(self.v_head_dim))

    @cached_property
    def v_is_k(self) -> bool:
        """Whether V is the first piece of K, in the same memory: then each page is read once."""
        k, v = self.k_arena, self.v_arena
        same = v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.dtype == k.dtype
        return same and self.v_head_dim == self.head_tiles[0]

    @cached_property
    def v_in_pairs(self) -> bool:
        """Whether V, of 8-bit values, is read as 16-bit words, which the compiler loads 16 bytes at a time.

        For a product whose operands come from registers it loads only 8 elements at a time, whatever they are.
        """
        *strides, dim_stride = self.v_arena.stride()
        even = self.v_arena.storage_offset() % 2 == 0 and dim_stride == 1
        whole = all(size % PAIRED_DIMS == 0 for size in (self.v_head_dim, *strides))
        return self.v_scales is not None and not self.v_is_k and even and whole

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
            self.chunk is not None,
            self.slopes is not None,
            self.k_arena.dtype,
            autotune.bucket(self.shared_prefix, 1, 32768) if self.shared_prefix else 0,
        )


@cache
def head_tiles(head_dim: int) -> tuple[int, int]:
    """Two powers of two, 16 or more, that cover a head dim: (128, 64) of 192; (128, 0) of 128; (128, 0) of 112."""
    whole = max(16, next_power_of_2(head_dim))
    first = whole // 2
    rest = max(16, next_power_of_2(max(1, head_dim - first)))
    return (first, rest) if first >= 16 and first < head_dim and rest < first else (whole, 0)


def attention_problem(
    q: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_len: int,
    scale: float,
    causal_offset: int | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    slopes: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    row_start: int | None = None,
    hidden: Tensor | None = None,
    shared_prefix: int = 0,
) -> AttentionProblem:
    """Check every argument of an attention call; raises KernelInputError or KernelTypeError."""
    checks.arena("k_arena", k_arena)
    checks.arena("v_arena", v_arena)
    checks.pair(k_arena, v_arena)
    checks.tensor("q", q, 4, checks.compute_dtypes(k_arena))
    checks.same("device", "q", q.device, "k_arena", k_arena.device)
    checks.same("head dim", "q", q.shape[3], "k_arena", k_arena.shape[3])
    checks.scales("k_scales", k_scales, k_arena)
    checks.scales("v_scales", v_scales, v_arena)
    batch, width = checks.table(block_table, seq_lens, k_arena)
    checks.same("batch size", "q", q.shape[0], "block_table", batch)
    num_heads, num_kv_heads = q.shape[1], k_arena.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise KernelInputError(
            f"q has {num_heads} heads, the arenas have {num_kv_heads}; allowed: a multiple of the arenas' "
            "heads; pass q as [B, H_q, Q, D]"
        )
    if row_start is None:
        checks.context_length(kv_len, width, k_arena.shape[2])
    else:
        checks.integer("kv_len", kv_len, 1, checks.MAX_POSITION)
        checks.integer("row_start", row_start, -checks.MAX_POSITION, checks.MAX_POSITION)
    if not isinstance(scale, (int, float)):
        raise KernelTypeError(f"scale is a {type(scale).__name__}; pass a float such as head_dim ** -0.5")
    checks.shared_prefix(shared_prefix, k_arena.shape[2], width)
    query_offset = kv_len - q.shape[2] if causal_offset is None else causal_offset
    causal_offset, window = _visible_limits(causal_offset, window, chunk, q.shape[2], kv_len)
    if mask is not None:
        mask = _expand_mask(mask, q, kv_len)
    if softcap is not None:
        softcap = checks.positive("softcap", softcap)
    if sinks is not None:
        checks.per_head("sinks", sinks, q)
    if slopes is not None:
        checks.per_head("slopes", slopes, q)
    if hidden is not None:
        checks.row_counts("hidden", hidden, "seq_lens", seq_lens)
        checks.same("device", "hidden", hidden.device, "seq_lens", seq_lens.device)
    return AttentionProblem(
        q,
        k_arena,
        v_arena,
        block_table,
        seq_lens,
        kv_len,
        float(scale),
        causal_offset,
        window,
        mask,
        softcap,
        sinks,
        chunk,
        slopes,
        k_scales,
        v_scales,
        row_start,
        hidden,
        query_offset,
        shared_prefix if row_start is None else 0,  # perhaps not all of its keys are seen
    )


def _visible_limits(
    causal_offset: int | None, window: int | None, chunk: int | None, q_len: int, kv_len: int
) -> tuple[int | None, int | None]:
    if causal_offset is None:
        for name, limit in (("window", window), ("chunk", chunk)):
            if limit is not None:
                raise KernelInputError(
                    f"{name} is {limit} but causal_offset is None; a {name} is counted back from the causal "
                    "diagonal: pass causal_offset (kv_len - q_len for the usual one)"
                )
        return None, None
    checks.integer("causal_offset", causal_offset, -checks.MAX_POSITION, checks.MAX_POSITION)
    if chunk is not None:
        checks.integer("chunk", chunk, 1, checks.MAX_POSITION)
    if window is not None:
        checks.integer("window", window, 1, 2**63 - 1)
        if window >= q_len + causal_offset:
            window = None
    if window is None and chunk is None and causal_offset >= kv_len - 1:
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
