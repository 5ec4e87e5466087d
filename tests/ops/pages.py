"""Random pages for tests of the operations: scattered tables, ragged lengths, NaN where nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paged_inductor import ops
from paged_inductor._layout import chunk_blocks, chunks_needed


@dataclass(frozen=True)
class Pages:
    k_arena: Tensor
    v_arena: Tensor
    block_table: Tensor
    seq_lens: Tensor
    kv_len: int
    block_size: int

    def plan(self, new_tokens: int = 0, decodes: bool = True) -> ops.StepPlan:
        counts = [chunks_needed(length, self.block_size) for length in self.seq_lens.tolist()]
        sizes = (sum(counts), max(counts)) if decodes else ()
        return ops.plan_step(self.block_table, self.seq_lens, self.kv_len, new_tokens, self.block_size, *sizes)


def random_pages(
    lengths: list[int],
    heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    transposed: bool = True,
    seed: int = 0,
    hidden: int = 0,
) -> Pages:
    """Pages of `lengths` tokens per row. Unused blocks, the unused slots of tail blocks and the `hidden` keys that a
    window leaves out are NaN."""
    generator = torch.Generator().manual_seed(seed)
    width = chunks_needed(max(lengths), block_size) * chunk_blocks(block_size)
    used = [-(-length // block_size) for length in lengths]
    num_blocks = 1 + sum(used) + 5
    shape = (num_blocks, heads, head_dim, block_size)
    k = torch.full(shape, float("nan"), dtype=dtype).transpose(2, 3)
    if not transposed:
        k = k.contiguous()
    v = torch.full((num_blocks, heads, block_size, value_dim), float("nan"), dtype=dtype)
    k[0], v[0] = 0, 0
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    for i, length in enumerate(lengths):
        for j in range(used[i]):
            block = table[i, j] = order.pop()
            filled = min(block_size, length - j * block_size)
            k[block, :, :filled] = torch.randn(heads, filled, head_dim, generator=generator).to(dtype)
            v[block, :, :filled] = torch.randn(heads, filled, value_dim, generator=generator).to(dtype)
        for token in range(max(0, hidden - max(lengths) + length)):
            k[table[i, token // block_size], :, token % block_size] = float("nan")
            v[table[i, token // block_size], :, token % block_size] = float("nan")
    return Pages(k, v, table, torch.tensor(lengths, dtype=torch.int32), max(lengths) - hidden, block_size)


def reference(
    pages: Pages,
    q: Tensor,
    mask: Tensor | None,
    scale: float,
    causal_offset: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention in float64, row by row and key by key, written independently of the package."""
    batch, heads_q, queries, _ = q.shape
    group = heads_q // pages.k_arena.shape[1]
    out = torch.zeros(batch, heads_q, queries, pages.v_arena.shape[3], dtype=torch.float64)
    for b in range(batch):
        length = int(pages.seq_lens[b])
        start = pages.kv_len - length
        blocks = pages.block_table[b, : -(-length // pages.block_size)].long()
        key, value = (
            arena[blocks].transpose(0, 1).flatten(1, 2)[:, :length].double() for arena in (pages.k_arena, pages.v_arena)
        )
        key, value = (x[:, max(0, -start) :] for x in (key, value))  # hidden
        pad = max(0, start)
        key, value = (torch.cat([torch.zeros(x.shape[0], pad, x.shape[2]).double(), x], 1) for x in (key, value))
        for h in range(heads_q):
            scores = q[b, h].double() @ key[h // group].T * scale  # [Q, S]
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            position = torch.arange(pages.kv_len)
            visible = (position >= start).expand_as(scores)
            if mask is not None:
                given = mask.expand(batch, heads_q, queries, pages.kv_len)[b, h]
                visible = given if given.dtype == torch.bool else torch.ones_like(scores, dtype=torch.bool)
                scores = scores if given.dtype == torch.bool else scores + given.double()
            if causal_offset is not None:
                last = torch.arange(queries)[:, None] + causal_offset
                visible = visible & (position <= last)
                if window is not None:
                    visible = visible & (position > last - window)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[h].double().expand(queries, 1)], -1)
            weights = torch.nan_to_num(torch.softmax(scores, -1))
            out[b, h] = weights[:, : pages.kv_len] @ value[h // group]
    return out
