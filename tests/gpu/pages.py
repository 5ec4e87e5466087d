"""Ragged rows in poisoned pages on any device, made without a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pages:
    """Arenas with NaN wherever no row has a token, but for the zero page."""

    k_arena: Tensor
    v_arena: Tensor
    block_table: Tensor
    seq_lens: Tensor
    kv_len: int

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """What an attention call takes after q."""
        return self.k_arena, self.v_arena, self.block_table, self.seq_lens, self.kv_len


def new_pages(
    lengths: list[int],
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 16,
) -> Pages:
    """Rows of `lengths` tokens in blocks that lie in random order; dims: of K and V."""
    generator = torch.Generator().manual_seed(0)
    lens = torch.tensor(lengths, dtype=torch.int32)
    width = -(-max(lengths) // block_size)
    real = torch.arange(width) * block_size < lens[:, None]  # [B, W]
    ids = torch.randperm(int(real.sum()) + 3, generator=generator)[: int(real.sum())] + 1
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    table[real] = ids.to(torch.int32)
    filled = torch.full((int(real.sum()) + 4,), 0)  # tokens of every block
    tokens = (lens[:, None] - torch.arange(width) * block_size).clamp(0, block_size)
    filled[table[real].long()] = tokens[real].long()
    empty = torch.arange(block_size) >= filled[:, None]  # [num_blocks, block_size]
    arenas = []
    for dim in dims:
        arena = torch.randn(len(filled), heads, block_size, dim, generator=generator).to(dtype)
        arena.masked_fill_(empty[:, None, :, None], float("nan"))
        arena[0] = 0
        arenas.append(arena.to(device))
    return Pages(*arenas, table.to(device), lens.to(device), max(lengths))


def poisoned(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fresh memory for outputs and scratch."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
