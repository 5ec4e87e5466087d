"""A view's block table and lengths as tensors, kept up to date step by step in O(rows), not O(tokens)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .._layout import chunk_blocks, chunks_needed
from .pool import ZERO_BLOCK

if TYPE_CHECKING:
    from .group import View

__all__ = ["Schedule"]

_SPARE = 1.25  # a table is laid out for a quarter more blocks than it holds, so that growing it is rare


class Schedule:
    """What the kernels read: `block_table` int32 [B, W] and `seq_lens` int32 [B], on the group's device, and the sizes
    of the work list that decode makes of them (`num_chunks` for all rows, `row_chunks` for the longest).

    `W` is a whole number of chunks, and at least the longest row's; entries beyond a row's blocks are the zero page.
    The host copies are plain arrays that the CPU tensors share memory with, so that changing an entry takes no tensor
    operation. `epoch` is the group's of when the table was made: a later one means that blocks have moved since. A
    schedule belongs to one view at a time; `Manager.append` moves it to the longer view.
    """

    __slots__ = (
        "_block_size",
        "_device",
        "_lens",
        "_table",
        "_width",
        "block_table",
        "epoch",
        "num_chunks",
        "row_chunks",
        "seq_lens",
    )

    def __init__(self, view: View) -> None:
        group = view.group
        self.epoch = group.epoch
        self._block_size = group.block_size
        self._device = group.sites[0].device
        self._lens = array("i", view.lengths)
        tables = [row.blocks[: -(-seen // group.block_size)] for row, seen in zip(view.rows, view.lengths)]
        self._layout(tables, max(map(len, tables), default=0))
        self._publish_lens()
        self._count_chunks()

    def _count_chunks(self) -> None:
        counts = [chunks_needed(length, self._block_size) for length in self._lens]
        self.num_chunks = max(1, sum(counts))
        self.row_chunks = max(1, max(counts, default=0))

    def _layout(self, tables: Sequence[Sequence[int]], width: int) -> None:
        chunk = chunk_blocks(self._block_size)
        self._width = width = (int(width * _SPARE) // chunk + 1) * chunk
        host = array("i", [ZERO_BLOCK]) * (len(tables) * width)
        for i, blocks in enumerate(tables):
            host[i * width : i * width + len(blocks)] = array("i", blocks)
        self._table = host
        self._publish_table()

    def _publish_table(self) -> None:
        self.block_table = self._tensor(self._table).view(len(self._lens), self._width)

    def _publish_lens(self) -> None:
        self.seq_lens = self._tensor(self._lens)

    def _tensor(self, host: array[int]) -> torch.Tensor:
        if not host:
            return torch.empty(0, dtype=torch.int32, device=self._device)
        return torch.frombuffer(host, dtype=torch.int32).to(self._device)

    def blocks(self, row: int) -> Sequence[int]:
        """A row's table entries, the spare ones included."""
        return self._table[row * self._width : (row + 1) * self._width]

    def advance(self, count: int, changes: Sequence[tuple[int, int, int]]) -> None:
        """Every row got `count` tokens longer; for (i, j, block) in `changes`, entry `j` of row `i` became `block`."""
        lens = self._lens
        for i in range(len(lens)):
            lens[i] += count
        on_host = self._device.type == "cpu"
        if not on_host:
            self._publish_lens()
        if not changes:  # no row began a block, so none began a chunk
            return
        width = self._width
        if max(j for _, j, _ in changes) >= width:
            old = self._table
            tables = [old[i * width : (i + 1) * width] for i in range(len(lens))]
            self._layout(tables, max(j for _, j, _ in changes) + 1)
            width = self._width
        table = self._table
        for i, j, block in changes:
            table[i * width + j] = block
        self._count_chunks()
        if not on_host:
            self._publish_table()
