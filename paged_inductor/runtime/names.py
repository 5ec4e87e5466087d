"""Names of blocks, made of the tokens in them, in plain Python.

A full block's *digest* is SHA-256 over its parent's digest and its key: the token ids in it, and whatever else enters
the model at their positions. The first parent, the *root*, stands for everything that does not belong to a position:
the model, its weights, a salt. So equal digests mean equal K and V, up to rounding. A *tail*, the last block of a cache
that was dropped, may have fewer tokens than a block, and is named alike.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Hashable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

__all__ = ["BlockName", "RowNames", "child_digest", "common_tokens", "decode_key", "encode_key", "matter_within"]

_ID_BYTES = 8
_DEVIATION = struct.Struct("<HH")


def encode_key(ids: Sequence[int], deviations: Mapping[int, bytes]) -> bytes:
    """The bytes that stand for consecutive tokens. deviations: what else is given at a position, unless it is usual."""
    key = array("q", ids).tobytes()
    for at in sorted(deviations) if deviations else ():  # hardly ever any, and this is done for every block
        key += _DEVIATION.pack(at, len(deviations[at])) + deviations[at]
    return key


def decode_key(key: bytes, count: int) -> tuple[list[int], dict[int, bytes]]:
    """The `count` ids and the deviations that `encode_key` was given."""
    at = count * _ID_BYTES
    deviations = {}
    while at < len(key):
        position, size = _DEVIATION.unpack_from(key, at)
        at += _DEVIATION.size
        deviations[position] = key[at : at + size]
        at += size
    return list(array("q", key[: count * _ID_BYTES])), deviations


def child_digest(parent: bytes, key: bytes) -> bytes:
    """The digest of the block with tokens `key` behind the block (or root) `parent`; 32 bytes."""
    return sha256(parent + key).digest()


def matter_within(windows: Sequence[int | None], length: int) -> tuple[int | None, ...]:
    """`windows`, without those that hide nothing from any of the first `length` tokens; empty if these are all."""
    found = tuple(window if window is not None and window < length else None for window in windows)
    return found if any(window is not None for window in found) else ()


class BlockName(NamedTuple):
    """What the index knows of a block. scope: who may find it. priority: who is evicted last: higher is more. tail:
    if only its first tokens are known, how many; then it goes before all others."""

    scope: Hashable
    digest: bytes
    parent: bytes
    key: bytes
    priority: float
    tail: int = 0

    @property
    def worth(self) -> float:
        """Cached blocks of the least worth are evicted first."""
        return float("-inf") if self.tail else self.priority


class RowNames(NamedTuple):
    """The known tokens of a row, from its first one on: the digests and keys of the full blocks, and what comes behind.

    tail: ids behind the last full block. deviations: of the tail, by position in it. hidden: positions in the row that
    a mask hides from all tokens behind them. windows: of each attention of the model, how many tokens each sees, itself
    included; None if all up to itself, or if fewer tokens are known; empty if that holds for all.
    """

    root: bytes
    digests: tuple[bytes, ...] = ()
    keys: tuple[bytes, ...] = ()
    tail: tuple[int, ...] = ()
    deviations: Mapping[int, bytes] = {}
    hidden: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()

    def length(self, block_size: int) -> int:
        """How many tokens are known."""
        return len(self.digests) * block_size + len(self.tail)

    def first(self, length: int, block_size: int) -> RowNames:
        """The names of the first `length` tokens (or of all, if fewer are known)."""
        known = self.length(block_size)
        if length >= known:
            return self
        full, rest = divmod(length, block_size)
        hidden = tuple(at for at in self.hidden if at < length)
        tail, deviations = self.tail, self.deviations
        if full < len(self.keys):
            ids, deviations = decode_key(self.keys[full], block_size)
            tail = tuple(ids)
        deviations = {at: value for at, value in deviations.items() if at < rest}
        windows = matter_within(self.windows, length)
        return RowNames(self.root, self.digests[:full], self.keys[:full], tail[:rest], deviations, hidden, windows)

    def extended(
        self,
        ids: Sequence[int],
        deviations: Mapping[int, bytes],
        hidden: Sequence[int],
        block_size: int,
        windows: tuple[int | None, ...] = (),
    ) -> RowNames:
        """With more tokens behind. deviations: by position among `ids`; hidden: by position in the row; windows: of all
        tokens from now on."""
        left = len(self.tail)
        tokens = [*self.tail, *ids]
        extra = dict(self.deviations)
        extra.update((left + at, value) for at, value in deviations.items())
        digests, keys = list(self.digests), list(self.keys)
        parent = digests[-1] if digests else self.root
        full = len(tokens) - len(tokens) % block_size
        for start in range(0, full, block_size):
            own = {i: extra[start + i] for i in range(block_size) if start + i in extra} if extra else {}
            key = encode_key(tokens[start : start + block_size], own)
            parent = child_digest(parent, key)
            digests.append(parent)
            keys.append(key)
        rest = {at - full: value for at, value in extra.items() if at >= full}
        hidden = (*self.hidden, *hidden)
        return RowNames(self.root, tuple(digests), tuple(keys), tuple(tokens[full:]), rest, hidden, windows)


def common_tokens(key: bytes, count: int, ids: Sequence[int], deviations: Mapping[int, bytes]) -> int:
    """With how many of `ids` the `count` tokens of a key begin."""
    own: Mapping[int, bytes] = {}
    if len(key) == count * _ID_BYTES:
        known: Sequence[int] = array("q", key)
    else:
        known, own = decode_key(key, count)
    same = 0
    for a, b in zip(known, ids):
        if a != b or ((own or deviations) and own.get(same) != deviations.get(same)):
            break
        same += 1
    return same
