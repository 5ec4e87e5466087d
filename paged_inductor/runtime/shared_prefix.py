"""How many first tokens of a batch decode reads once for all rows: a strategy, chosen by what sharing saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["NoSharing", "PrefixSharing", "SharedPrefix", "common_blocks", "few_lengths"]


class SharedPrefix(Protocol):
    """Decides about one decode step."""

    def tokens(self, tables: Sequence[list[int]], lengths: Sequence[int], block_size: int, token_bytes: int) -> int:
        """A multiple of `block_size`: so many first tokens are in the same blocks in all rows, and worth sharing.

        tables: each row's physical blocks. lengths: each row's tokens. token_bytes: of a token in one layer's K and V.
        """


class NoSharing:
    """Every row reads its own blocks."""

    def tokens(self, tables: Sequence[list[int]], lengths: Sequence[int], block_size: int, token_bytes: int) -> int:
        """Always 0."""
        return 0


@dataclass(frozen=True)
class PrefixSharing:
    """Shares where the bytes that are not read again outweigh a second pass and the merge of its results.

    pass_bytes: what memory could deliver in the time that a second launch takes, its partial results included.
    """

    pass_bytes: int = 16 * 2**20

    def tokens(self, tables: Sequence[list[int]], lengths: Sequence[int], block_size: int, token_bytes: int) -> int:
        """All tokens in common blocks that every row has full, if they are worth a pass."""
        if len(tables) < 2:
            return 0
        most = min(lengths) // block_size * block_size
        if (len(tables) - 1) * most * token_bytes < self.pass_bytes:
            return 0
        shared = min(most, common_blocks(tables) * block_size)
        return shared if (len(tables) - 1) * shared * token_bytes >= self.pass_bytes else 0


def few_lengths(tokens: int, block_size: int) -> int:
    """A number of shared tokens, rounded down to one of few: to blocks of a power of two, or of one and a half.

    A step that is recorded for each number that it is called with has few recordings then, and still shares two thirds.
    """
    blocks = tokens // block_size
    power = 1 << max(0, blocks.bit_length() - 1)
    return (power + power // 2 if blocks >= power + power // 2 else min(power, blocks)) * block_size


def common_blocks(tables: Sequence[list[int]]) -> int:
    """How many first blocks are the same in all of `tables`."""
    low, high = min(tables), max(tables)  # lists compare by their first difference: all others lie between these two
    for j, (one, other) in enumerate(zip(low, high)):
        if one != other:
            return j
    return min(len(low), len(high))
