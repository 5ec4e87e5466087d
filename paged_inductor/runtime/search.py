"""Where a prompt's tokens are cached, in one group of layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from .names import RowNames, child_digest, encode_key, matter_within
from .prefix_index import PrefixIndex

__all__ = ["Search", "Tokens"]


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens of one row. deviations: what else is given at a token, by position among `ids`, where it is
    not the usual. hidden: those that a mask hides, by position in the row. windows: see `RowNames`."""

    ids: Sequence[int]
    deviations: Mapping[int, bytes] = field(default_factory=dict)
    hidden: Sequence[int] = ()
    windows: Sequence[int | None] = ()


class Search:
    """The blocks of a prompt that the index has. Names are made as far as they are looked for.

    Not thread-safe by itself: the caller holds the manager's lock for as long as it uses the blocks.
    """

    def __init__(
        self, index: PrefixIndex, scopes: Sequence[Hashable], root: bytes, prompt: Tokens, size: int, kept: int | None
    ) -> None:
        """size: of blocks. kept: how many of the last tokens must be found; None for all."""
        self._index = index
        self._scopes = scopes
        self._root = root
        self._prompt = prompt
        self._size = size
        self._kept = kept
        self._digests: list[bytes] = []
        self._keys: list[bytes] = []
        self._reached: int | None = None  # how many first tokens are found, if all are looked for
        self._found: dict[int, tuple[int, int]] = {}  # block, and how many of its first tokens are the prompt's

    def longest(self, limit: int) -> int:
        """The most of the prompt's first tokens, at most `limit`, of which the last ones that are kept are found.

        Obligation: no limit is greater than that of the call before.
        """
        size = self._size
        if self._kept is None:
            if self._reached is None:
                self._reached = self._reach(limit)
            return min(self._reached, limit)
        length = limit
        while length > 0:
            last = (length - 1) // size
            count = self._tokens(last, limit)
            if last * size + count < length:
                length = last * size + count
                continue
            first = max(0, length - self._kept) // size
            missing = next((j for j in range(last - 1, first - 1, -1) if self._tokens(j, limit) < size), None)
            if missing is None:
                return length
            length = missing * size + self._tokens(missing, limit)
        return 0

    def blocks(self, length: int) -> tuple[int, list[int]]:
        """How many blocks are left out at the front of the first `length` tokens, and the others. `length`: up to what
        `longest` returned, of which the kept tokens are found, too."""
        first = 0 if self._kept is None else max(0, length - self._kept) // self._size
        return first, [self._found[j][0] for j in range(first, -(-length // self._size))]

    def names(self, length: int) -> RowNames:
        """The names of the first `length` tokens."""
        prompt, size = self._prompt, self._size
        full = length // size
        self._name(full - 1)
        hidden = tuple(at for at in prompt.hidden if at < length)
        windows = matter_within(prompt.windows, length)
        tail = tuple(prompt.ids[full * size : length])
        deviations = self._deviations(full * size, length)
        return RowNames(
            self._root, tuple(self._digests[:full]), tuple(self._keys[:full]), tail, deviations, hidden, windows
        )

    def _reach(self, limit: int) -> int:
        """How many first tokens are found, of those before token `limit`, and maybe of its block."""
        size, j = self._size, 0
        while j * size < limit:
            block = self._whole(j)
            if block is None:
                self._found[j] = self._partly(j, limit)
                return j * size + self._found[j][1]
            self._found[j] = block, size
            j += 1
        return j * size

    def _deviations(self, first: int, stop: int) -> dict[int, bytes]:
        """Those of tokens `first .. stop-1`, counted from the first of these."""
        return {at - first: value for at, value in self._prompt.deviations.items() if first <= at < stop}

    def _name(self, j: int) -> None:
        """Name the prompt's blocks up to block `j`, which is full."""
        size, digests, prompt = self._size, self._digests, self._prompt
        for at in range(len(digests), j + 1):
            first = at * size
            own = self._deviations(first, first + size) if prompt.deviations else {}
            key = encode_key(prompt.ids[first : first + size], own)
            digests.append(child_digest(digests[-1] if digests else self._root, key))
            self._keys.append(key)

    def _tokens(self, j: int, limit: int) -> int:
        """How many first tokens of the prompt's block `j` are found, of those before token `limit`."""
        known = self._found.get(j)
        if known is None:
            block = self._whole(j)
            known = self._found[j] = self._partly(j, limit) if block is None else (block, self._size)
        return known[1]

    def _whole(self, j: int) -> int | None:
        """The block that holds the prompt's block `j`; None if there is none, or the prompt does not fill it."""
        if (j + 1) * self._size > len(self._prompt.ids):
            return None
        self._name(j)
        return self._index.find(self._scopes, self._digests[j])

    def _partly(self, j: int, limit: int) -> tuple[int, int]:
        """A block that begins like the prompt's block `j`, and how many tokens before token `limit` are the same."""
        self._name(j - 1)
        parent = self._digests[j - 1] if j else self._root
        first, stop = j * self._size, min((j + 1) * self._size, limit)
        ids, deviations = self._prompt.ids[first:stop], self._deviations(first, stop)
        return self._index.find_partly(self._scopes, parent, ids, deviations, self._size) or (0, 0)
