"""What all layers of a step share, computed once: tables, lengths, and on the CPU the work list of decode.

Decode on the CPU works through *chunks* of `chunk_blocks` blocks of one row, in one flat list over all rows, so that
its cost follows the live tokens, not the longest row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import SymInt, Tensor

from .._layout import chunk_blocks

__all__ = ["Chunks", "MaskPlan", "StepPlan", "plan_mask", "plan_static", "plan_step", "plan_window"]

Size = int | SymInt


class Chunks(NamedTuple):
    """The flat work list. NC chunks in all, of C blocks each; MC chunks in the longest row.

    table: int64 [NC, C], their physical blocks; the zero page beyond a row's blocks. row: int64 [NC]. position: int64
    [NC], logical position of a chunk's first slot. bias: float32 [NC, C * block_size], 0 where a slot holds a visible
    token of its row, else -inf. of_row: int64 [B, MC], each row's chunks; count: int64 [B], how many of them are real.
    """

    table: Tensor
    row: Tensor
    position: Tensor
    bias: Tensor
    of_row: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count


class StepPlan(NamedTuple):
    """One cache group's tables in one step.

    block_table: int32 [B, W] and seq_lens: int32 [B], tokens per row, those of this step included.
    kv_len: the logical length; shorter rows are virtually left padded, of longer ones only the last tokens are seen.
    new_tokens: how many tokens per row this step writes (0 when it only reads).
    block_size: tokens per block. chunks: for decode on the CPU, else None. bounded: the chunks hold only what a causal
    bound and a window let one query see (`plan_window`). static: the rows are the first `extent` of `kv_len` positions
    of a buffer, and the others are zeros (`plan_static`); formulas go by `extent`, kernels by the position of their
    first token, `row_start` (below 0: the buffer does not show it any more). shared_prefix: so many first tokens are in
    the same blocks in all rows (`runtime.shared_prefix`), and kernels read them once. hidden: int32 [B], how many first
    tokens of each row are not seen, where kv_len does not say it; for kernels only.
    """

    block_table: Tensor
    seq_lens: Tensor
    kv_len: Size
    new_tokens: Size
    block_size: int
    chunks: Chunks | None
    bounded: bool = False
    static: bool = False
    extent: Size = 0
    row_start: Size = 0
    shared_prefix: Size = 0
    hidden: Tensor | None = None


class MaskPlan(NamedTuple):
    """An attention mask, and for decode on the CPU what it means for every chunk and for virtual padding.

    mask: [1 or B, 1 or H_q, 1 or Q, S], bool or float. bias: float32 [NC, 1 or H_q, C * block_size], to be added to
    the scores. padding: float32 [B, 1 or H_q, 2], maximum and sum of exponentials of the keys that have no memory.
    """

    mask: Tensor
    bias: Tensor | None
    padding: Tensor | None


def plan_step(
    block_table: Tensor,
    seq_lens: Tensor,
    kv_len: Size,
    new_tokens: Size,
    block_size: int,
    num_chunks: Size = 0,
    row_chunks: Size = 0,
    shared_prefix: Size = 0,
    hidden: Tensor | None = None,
) -> StepPlan:
    """The plan of a step; see `StepPlan`.

    num_chunks, row_chunks: at least the number of chunks of all rows, and of the longest row; 0 for no work list. The
    table is then a whole number of chunks wide. shared_prefix, hidden: see `StepPlan`.
    """
    chunks = None
    if not (isinstance(num_chunks, int) and num_chunks == 0) and block_table.device.type == "cpu":
        chunks = _chunks(block_table, seq_lens, kv_len, block_size, num_chunks, row_chunks)
    return StepPlan(
        block_table, seq_lens, kv_len, new_tokens, block_size, chunks, shared_prefix=shared_prefix, hidden=hidden
    )


def plan_window(plan: StepPlan, causal_offset: Size, window: Size | None) -> StepPlan:
    """The plan of attention with one query, which sees the logical keys `k <= causal_offset` and, if a window is given,
    `k > causal_offset - window`: its work follows the window, not the context."""
    chunks = plan.chunks
    if chunks is None:
        return plan
    num_chunks, row_chunks = chunks.table.shape[0], chunks.of_row.shape[1]
    if window is not None:
        per_row = (window - 1) // chunks.bias.shape[1] + 2
        row_chunks = torch.sym_min(row_chunks, per_row)
        num_chunks = torch.sym_min(num_chunks, plan.block_table.shape[0] * per_row)
    limits = (0 if window is None else causal_offset - window + 1, causal_offset)
    kv_len = plan.extent if plan.static else plan.kv_len
    tables = (plan.block_table, plan.seq_lens, kv_len, plan.block_size)
    return plan._replace(chunks=_chunks(*tables, num_chunks, row_chunks, limits), bounded=True)


def plan_static(plan: StepPlan, kv_len: Size, row_start: Size = 0) -> StepPlan:
    """The plan of reading the first `kv_len` positions of static buffers, of which `plan` has those that were written.

    Attention with it needs a mask, which decides about the zeros in the unwritten ones. row_start: see `StepPlan`.
    """
    chunks = plan.chunks
    if chunks is not None:
        key = chunks.position[:, None] + torch.arange(chunks.bias.shape[1])
        chunks = chunks._replace(bias=torch.where(key < kv_len, chunks.bias, float("-inf")))
    return plan._replace(kv_len=kv_len, chunks=chunks, static=True, extent=plan.kv_len, row_start=row_start)


def _chunks(
    block_table: Tensor,
    seq_lens: Tensor,
    kv_len: Size,
    block_size: int,
    num_chunks: Size,
    row_chunks: Size,
    limits: tuple[Size, Size] | None = None,
) -> Chunks:
    """limits: the first and the last logical key that is seen; None for all."""
    blocks = chunk_blocks(block_size)
    tokens = blocks * block_size
    lens = seq_lens.to(torch.int64)
    count = (lens + tokens - 1) // tokens  # [B]
    begin = torch.zeros_like(count)
    if limits is not None:
        begin = (torch.clamp(lens + limits[0] - kv_len, min=0) // tokens).minimum(count)
        count = count - begin
    stop = count.cumsum(0)
    number = torch.arange(num_chunks)
    row = (number[:, None] >= stop).sum(1).clamp(max=block_table.shape[0] - 1)  # surplus chunks: of the last row
    nth = number - (stop - count - begin)[row]  # [NC], which chunk of its row
    first = nth * tokens
    slot = first[:, None] + torch.arange(tokens)  # [NC, tokens] of the row
    position = first + (kv_len - lens)[row]
    key = position[:, None] + torch.arange(tokens)
    seen = (slot < lens[row][:, None]) & (key >= 0)  # the table holds more tokens than are seen
    if limits is not None:
        seen = seen & (key >= limits[0]) & (key <= limits[1])
    bias = torch.where(seen, 0.0, float("-inf"))
    column = (nth[:, None] * blocks + torch.arange(blocks)).clamp(max=block_table.shape[1] - 1)
    of_row = (stop - count)[:, None] + torch.arange(row_chunks)
    return Chunks(
        table=block_table[row[:, None], column].to(torch.int64),
        row=row,
        position=position,
        bias=bias,
        of_row=of_row.clamp(max=num_chunks - 1),
        count=count,
    )


def plan_mask(mask: Tensor, plan: StepPlan) -> MaskPlan:
    """A mask as attention takes it. `mask` is broadcastable to [B, H_q, Q, kv_len]: bool (True is visible) or float."""
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    chunks = plan.chunks
    if chunks is None or not (isinstance(mask.shape[2], int) and mask.shape[2] == 1):
        return MaskPlan(mask, None, None)
    dense = mask[:, :, 0]  # [1|B, 1|Hq, S]
    dense = torch.where(dense, 0.0, float("-inf")) if mask.dtype == torch.bool else dense.float()
    position = chunks.position[:, None] + torch.arange(chunks.bias.shape[1])
    if isinstance(mask.shape[3], int) and mask.shape[3] == 1:
        dense = dense.expand(-1, -1, plan.kv_len)
    position = position.clamp(0, plan.kv_len - 1)
    row = torch.zeros_like(chunks.row) if isinstance(mask.shape[0], int) and mask.shape[0] == 1 else chunks.row
    bias = dense.transpose(1, 2)[row[:, None], position].transpose(1, 2)  # [NC, 1|Hq, tokens]
    key = torch.arange(plan.kv_len)
    lens = plan.seq_lens.to(torch.int64)[:, None, None]  # [B, 1, 1]
    before = key < plan.kv_len - lens  # [B, 1, S]
    behind = torch.ge(key, plan.extent).expand_as(before)  # type: ignore[arg-type]
    outside = behind if plan.static else before
    scores = torch.where(outside, dense, float("-inf"))  # [B, 1|Hq, S]
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    padding = torch.cat([top, (scores - top).exp().sum(-1, keepdim=True)], -1)
    return MaskPlan(mask, bias.contiguous(), padding)
