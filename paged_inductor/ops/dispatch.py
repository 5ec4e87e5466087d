"""Which implementation serves a call: formulas on the CPU, the custom operators elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor

from .. import kernels
from .._layout import is_packed
from ..kernels import reference
from . import formulas, library
from .decode import decode_attention
from .plan import MaskPlan, StepPlan

__all__ = ["attention", "cache_write", "cache_write_kv", "copy_blocks", "execute_copies", "gather"]


def cache_write(arena: Tensor, new: Tensor, plan: StepPlan) -> None:
    """Write new [B, H, n, D] into the last n positions of every row of `plan`. Mutates `arena` only.

    The blocks at those positions must belong to this step alone. Packed arenas take rounded tokens, with their scales.
    """
    if library.uses_kernels(arena.device) or is_packed(arena):
        torch.ops.paged_inductor.cache_write(arena, new, plan.block_table, plan.seq_lens)
    else:
        formulas.cache_write(arena, new, plan)


def cache_write_kv(k_arena: Tensor, v_arena: Tensor, k: Tensor, v: Tensor, plan: StepPlan) -> None:
    """`cache_write` of a layer's K and V at once, by one kernel. Obligation: kernels serve the arenas' device."""
    torch.ops.paged_inductor.cache_write_kv(k_arena, v_arena, k, v, plan.block_table, plan.seq_lens)


def attention(
    q: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    plan: StepPlan,
    mask: MaskPlan | None = None,
    *,
    scale: float,
    causal_offset: int | SymInt | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [B, H_q, Q, D] over the pages of each row; returns [B, H_q, Q, Dv] in q's dtype.

    Logical key k (0..kv_len-1) is visible to query i if it is a token of the row (virtual padding is not) and
    `k <= i + causal_offset` and `k > i + causal_offset - window`, where given. With a mask (from `plan_mask`), the
    mask alone decides about virtual padding, whose keys and values are zeros. A query that sees nothing gives zeros.
    A plan from `plan_window` must be of the same causal_offset and window.

    `softcap` bounds the scaled scores, before any mask: softcap * tanh(score / softcap). `sinks`, float [H_q], are
    logits of one more key per head that has no value: they only add exp(sink) to the softmax's denominator.
    """
    dense = None if mask is None else mask.mask
    if library.uses_kernels(q.device):
        return torch.ops.paged_inductor.attention(
            q,
            k_arena,
            v_arena,
            plan.block_table,
            plan.seq_lens,
            plan.kv_len,
            scale,
            causal_offset,
            window,
            dense,
            softcap,
            sinks,
            row_start=plan.row_start if plan.static else None,
            hidden=plan.hidden,
            shared_prefix=plan.shared_prefix,
        )
    if plan.static and dense is not None and not (q.shape[2] == 1 and plan.chunks is not None):
        return formulas.static_attention(q, k_arena, v_arena, plan, dense, scale=scale, softcap=softcap, sinks=sinks)
    one_query = isinstance(q.shape[2], int) and q.shape[2] == 1
    if one_query and plan.chunks is not None and (plan.bounded or causal_offset is None):
        return decode_attention(q, k_arena, v_arena, plan, mask, scale, softcap, sinks)
    return formulas.gathered_attention(
        q,
        k_arena,
        v_arena,
        plan,
        dense,
        scale=scale,
        causal_offset=causal_offset,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def gather(arena: Tensor, plan: StepPlan, dtype: torch.dtype | None = None) -> Tensor:
    """Dense [B, H, kv_len, D] copy of the rows' pages; virtual padding reads as zeros. dtype: of the copy of packed
    arenas."""
    if plan.static:
        written = gather(arena, plan._replace(kv_len=plan.extent, static=False), dtype)
        return F.pad(written, (0, 0, 0, plan.kv_len - plan.extent))
    if library.uses_kernels(arena.device):
        return torch.ops.paged_inductor.gather(arena, plan.block_table, plan.seq_lens, plan.kv_len, dtype)
    return formulas.gather(arena, plan, dtype)


def copy_blocks(arenas: Tensor | Sequence[Tensor], sources: Tensor, destinations: Tensor) -> None:
    """arena[destinations] = arena[sources] in each arena; int64 [n], each destination once and no source among them."""
    device = arenas.device if isinstance(arenas, Tensor) else arenas[0].device
    implementation = kernels if library.uses_kernels(device) else reference
    implementation.copy_blocks(arenas, sources, destinations)


def execute_copies(arenas: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (source, destination) in every one of `arenas`, in one launch: the copy in copy-on-write."""
    if not copies:
        return
    sources, destinations = torch.tensor(copies, dtype=torch.int64, device=arenas[0].device).T.contiguous()
    with torch.no_grad():
        copy_blocks(arenas, sources, destinations)
