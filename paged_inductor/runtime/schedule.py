"""A view's block table and lengths as tensors, kept up to date step by step in O(rows), not O(tokens)."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .._layout import chunk_blocks, chunks_needed
from .pool import ZERO_BLOCK
from .shared_prefix import PrefixSharing, SharedPrefix

if TYPE_CHECKING:
    from .view import View

__all__ = ["Schedule", "sharing"]

sharing: SharedPrefix = PrefixSharing()
"""Decides about the schedules that are made from now on."""


class Schedule:
    """What the kernels read: `block_table` int32 [B, W] and `seq_lens` int32 [B], on the group's device, and the sizes
    of the work list that decode makes of them (`num_chunks` for all rows, `row_chunks` for the longest). The first
    `shared_prefix` tokens are in the same blocks in all rows, and worth reading once (rows that grow keep them).

    `W` is a whole number of chunks, a power of two above the longest row's number of blocks, so that it changes rarely;
    entries beyond a row's blocks are the zero page. The host copies are plain arrays that the CPU tensors share memory
    with, so that changing an entry takes no tensor operation. Tensors elsewhere are updated in place, in the order of
    the device's stream and without waiting for it. So all tensors stay where they are until the table grows. `epoch` is
    the group's of when the table was made: a later one means that blocks have moved since.
    A schedule belongs to one view at a time; `Manager.append` moves it to the longer view.
    """

    __slots__ = (
        "_block_size",
        "_device",
        "_hidden",
        "_hides",
        "_lens",
        "_table",
        "_width",
        "block_table",
        "epoch",
        "num_chunks",
        "row_chunks",
        "seq_lens",
        "shared_prefix",
    )

    def __init__(self, view: View, coming: Mapping[int, int] | None = None) -> None:
        """coming: swapped block -> the block that will be in its place."""
        group = view.group
        self.epoch = group.epoch
        self._block_size = group.block_size
        self._device = group.sites[0].device
        self._lens = array("i", view.lengths)
        tables = [row.blocks[: -(-seen // group.block_size)] for row, seen in zip(view.rows, view.lengths)]
        if coming:
            tables = [[coming.get(block, block) for block in blocks] for blocks in tables]
        self._layout(tables, max(map(len, tables), default=0))
        self.seq_lens = self._tensor(self._lens)
        self._hides = array("i", [0]) * len(self._lens)
        self._hidden: torch.Tensor | None = None
        self._count_chunks()
        layer_bytes = 2 * group.token_bytes // len(group.sites)  # K and V
        self.shared_prefix = sharing.tokens(tables, view.lengths, group.block_size, layer_bytes)

    def _count_chunks(self) -> None:
        counts = [chunks_needed(length, self._block_size) for length in self._lens]
        self.num_chunks = max(1, sum(counts))
        self.row_chunks = max(1, max(counts, default=0))

    def _layout(self, tables: Sequence[Sequence[int]], width: int) -> None:
        chunk = chunk_blocks(self._block_size)
        self._width = width = max(chunk, 1 << width.bit_length())
        host = array("i", [ZERO_BLOCK]) * (len(tables) * width)
        for i, blocks in enumerate(tables):
            host[i * width : i * width + len(blocks)] = array("i", blocks)
        self._table = host
        self.block_table = self._tensor(host).view(len(self._lens), self._width)

    @property
    def _on_host(self) -> bool:
        """Whether the tensors are the arrays themselves."""
        return self._device.type == "cpu"

    def _tensor(self, host: array[int]) -> torch.Tensor:
        """A tensor of an array's entries: on the host, the array itself."""
        if host and self._on_host:
            return torch.frombuffer(host, dtype=torch.int32)
        with torch.inference_mode(False):  # updated in every mode, whoever made it
            tensor = torch.empty(len(host), dtype=torch.int32, device=self._device)
        return self._send(tensor, host)

    @staticmethod
    def _send(tensor: torch.Tensor, host: array[int]) -> torch.Tensor:
        """Copy an array to a tensor. From pinned memory, which PyTorch keeps until the copy is done: no waiting."""
        if host:
            staged = torch.frombuffer(host, dtype=torch.int32 if host.typecode == "i" else torch.int64)
            tensor.copy_(staged.pin_memory() if tensor.is_cuda else staged, non_blocking=True)
        return tensor

    def _send_changes(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """Update the entries of the table that changed, whatever its size."""
        places = array("q", [i * self._width + j for i, j, _ in changes])
        places.extend(block for _, _, block in changes)
        sent = self._send(torch.empty(len(places), dtype=torch.int64, device=self._device), places)
        where, what = sent.view(2, -1)
        self.block_table.view(-1).index_copy_(0, where, what.to(torch.int32))

    def hidden(self, shown: int) -> torch.Tensor:
        """How many of each row's first tokens are not seen, if `shown` are: int32 [B], on the group's device."""
        hides = array("i", [max(0, length - shown) for length in self._lens])
        if self._hidden is None or hides != self._hides:
            self._hides[:] = hides
            self._hidden = self._tensor(hides) if self._hidden is None else self._send(self._hidden, hides)
        return self._hidden

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What kernels read."""
        found = [self.block_table, self.seq_lens]
        return found if self._hidden is None else [*found, self._hidden]

    def blocks(self, row: int) -> Sequence[int]:
        """A row's table entries, the spare ones included."""
        return self._table[row * self._width : (row + 1) * self._width]

    def advance(self, count: int, changes: Sequence[tuple[int, int, int]]) -> None:
        """Every row got `count` tokens longer; for (i, j, block) in `changes`, entry `j` of row `i` became `block`."""
        lens = self._lens
        for i in range(len(lens)):
            lens[i] += count
        if not self._on_host:
            self._send(self.seq_lens, lens)
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
        if not self._on_host:
            self._send_changes(changes)
