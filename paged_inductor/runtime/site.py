"""What one cached tensor stores per token, and how its arena is laid out."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from .._layout import ArenaLayout, arena_layout

__all__ = ["SiteSpec"]


@dataclass(frozen=True)
class SiteSpec:
    """What one cached tensor (K or V of one layer) stores per token: `heads * head_dim` elements of `dtype`.

    `transposed` stores a block as [heads, head_dim, block_size] (its logical shape stays
    [heads, block_size, head_dim]): the order that the CPU attention formula wants for K. `stored_as`: an 8-bit dtype
    that tokens are rounded to, each head with a scale of its own; None: they are stored as they are.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False
    stored_as: torch.dtype | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        layout = self.layout(1)
        return prod(layout.sizes) * layout.dtype.itemsize

    def layout(self, block_size: int) -> ArenaLayout:
        """How the arena is stored."""
        packed = self.stored_as is not None
        dtype = self.stored_as or self.dtype
        return arena_layout(self.heads, block_size, self.head_dim, dtype, self.transposed, packed)

    def stored(self, arena: torch.Tensor) -> torch.Tensor:
        """A contiguous view of an arena (or of some of its blocks): its dimensions in the order of memory."""
        return arena.mT if self.transposed else arena

    def put(self, arena: torch.Tensor, blocks: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite blocks (int64 [n], on the arena's device) by `values` [n, ...], in the order of memory."""
        target, values = self.stored(arena), values.to(arena.device, non_blocking=True)
        if arena.device.type == "cpu" and target[0].nbytes % 16 == 0:  # wide elements are copied three times as fast
            target, values = (x.flatten(1).view(torch.complex128) for x in (target, values))
        with torch.no_grad():
            target.index_copy_(0, blocks, values)

    def new_arena(self, num_blocks: int, block_size: int) -> torch.Tensor:
        """An uninitialised arena, apart from its zero page (block 0)."""
        sizes, strides, dtype = self.layout(block_size)
        with torch.inference_mode(False), torch.no_grad():  # usable in every mode, whoever made it
            arena = torch.empty_strided((num_blocks, *sizes), strides, dtype=dtype, device=self.device)
            arena[0] = 0
        return arena
