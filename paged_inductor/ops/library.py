"""The custom operators `torch.ops.paged_inductor.*`: schemas, fake versions, and the kernels behind them.

On CUDA, and on CPU tensors under TRITON_INTERPRET=1, they launch the Triton kernels; on the CPU otherwise they run
the kernels' plain-torch twins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from .._config import config
from .._layout import head_dim, is_packed, unpack
from ..kernels import reference
from .operator import operator

__all__ = ["attention", "cache_write", "cache_write_kv", "gather", "uses_kernels"]


def uses_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels serve tensors on `device`."""
    return device.type != "cpu" or config().triton_on_cpu


def _no_result(*args: object, **kwargs: object) -> None:
    return None


@operator(_no_result, mutates=("arena",))
def cache_write(arena: Tensor, new: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    """Write new [B, H, n, D] to the last n positions of every row; see `kernels.cache_write`."""
    implementation = kernels if uses_kernels(arena.device) else reference
    if is_packed(arena):
        codes, scales = unpack(arena)
        implementation.cache_write(codes, new, block_table, seq_lens, scales=scales)
    else:
        implementation.cache_write(arena, new.to(arena.dtype), block_table, seq_lens)


@operator(_no_result, mutates=("k_arena", "v_arena"))
def cache_write_kv(
    k_arena: Tensor, v_arena: Tensor, k: Tensor, v: Tensor, block_table: Tensor, seq_lens: Tensor
) -> None:
    """`cache_write` of a layer's K and V; see `kernels.cache_write_kv`."""
    implementation = kernels if uses_kernels(k_arena.device) else reference
    scales: dict[str, Tensor] = {}
    if is_packed(k_arena):
        (k_arena, scales["k_scales"]), (v_arena, scales["v_scales"]) = unpack(k_arena), unpack(v_arena)
    else:
        k, v = k.to(k_arena.dtype), v.to(v_arena.dtype)
    implementation.cache_write_kv(k_arena, v_arena, k, v, block_table, seq_lens, **scales)


def _attention_result(q: Tensor, k_arena: Tensor, v_arena: Tensor, *rest: object, **kwargs: object) -> Tensor:
    return q.new_empty((*q.shape[:3], head_dim(v_arena)))


@operator(_attention_result)
def attention(
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
) -> Tensor:
    """Attention of q [B, H_q, Q, D] over paged keys and values; see `kernels.attention`. Packed arenas have scales of
    their own."""
    if is_packed(k_arena):
        k_arena, k_scales = unpack(k_arena)
        v_arena, v_scales = unpack(v_arena)
    variant = {"causal_offset": causal_offset, "window": window, "mask": mask, "softcap": softcap, "sinks": sinks}
    variant |= {"chunk": chunk, "slopes": slopes, "k_scales": k_scales, "v_scales": v_scales}
    variant |= {"row_start": row_start, "hidden": hidden, "shared_prefix": shared_prefix}
    pages = (k_arena, v_arena, block_table, seq_lens, kv_len)
    if uses_kernels(q.device):
        return kernels.attention(q, *pages, scale=scale, **variant, deterministic=config().deterministic)
    return reference.attention(q, *pages, scale=scale, **variant)


def _gathered(
    arena: Tensor, block_table: Tensor, seq_lens: Tensor, kv_len: int, dtype: torch.dtype | None = None
) -> Tensor:
    shape = (block_table.shape[0], arena.shape[1], kv_len, head_dim(arena))
    return arena.new_empty(shape, dtype=(dtype or torch.float32) if is_packed(arena) else arena.dtype)


@operator(_gathered)
def gather(
    arena: Tensor, block_table: Tensor, seq_lens: Tensor, kv_len: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Dense [B, H, kv_len, D] copy of the rows' pages, zeros at virtual padding; see `kernels.gather`.

    dtype: of the copy of packed arenas, by default float32.
    """
    implementation = kernels if uses_kernels(arena.device) else reference
    if is_packed(arena):
        codes, scales = unpack(arena)
        return implementation.gather(codes, block_table, seq_lens, kv_len, scales=scales, dtype=dtype)
    return implementation.gather(arena, block_table, seq_lens, kv_len)
