"""Names of blocks, and the index that finds a block by its name, in plain Python.

A full block's *digest* is SHA-256 over its parent's digest and its key: the token ids in it, and whatever else enters
the model at their positions. The first parent, the *root*, stands for everything that does not belong to a position:
the model, its weights, a salt. So equal digests mean equal K and V, up to rounding. A *tail*, the last block of a cache
that was dropped, may have fewer tokens than a block, and is named alike.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

__all__ = ["BlockName", "PrefixIndex", "RowNames", "child_digest", "decode_key", "encode_key", "matter_within"]

_ID_BYTES = 8
_CHILDREN_TRIED = 64  # blocks that begin like a wanted one are looked for among that many
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


class PrefixIndex:
    """Blocks by digest, apart for each scope; and the *cached* ones: named, without owners, kept until memory is short.

    Not thread-safe by itself: the caller holds the manager's lock. The pool tells it of every block that loses its last
    owner (`park`) or gets one again (`unpark`).
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, dict[bytes, int]] = {}
        self._names: dict[int, BlockName] = {}
        self._children: dict[tuple[Hashable, bytes], dict[int, None]] = {}
        self._cached: dict[float, dict[int, None]] = {}  # by worth, the least recently used first
        self._left: set[int] = set()  # windows have moved on from these
        self._behind: dict[int, None] = {}  # those of them that are cached, in the order in which they became so

    def __contains__(self, block: int) -> bool:
        """Whether the block has a name: its tokens must stay as they are."""
        return block in self._names

    def __len__(self) -> int:
        return len(self._names)

    @property
    def num_cached(self) -> int:
        """Named blocks without owners."""
        return sum(map(len, self._cached.values()))

    @property
    def num_behind(self) -> int:
        """Cached blocks that a window left behind, and nobody has used since."""
        return len(self._behind)

    def leave_behind(self, block: int) -> None:
        """A window has moved on from a block with owners."""
        if block in self._names:
            self._left.add(block)

    def name(self, block: int) -> BlockName:
        """The name of a block that has one."""
        return self._names[block]

    def find(self, scopes: Sequence[Hashable], digest: bytes) -> int | None:
        """The block of that digest in the first of `scopes` that has one."""
        for scope in scopes:
            block = self._found.get(scope, {}).get(digest)
            if block is not None:
                return block
        return None

    def find_partly(
        self, scopes: Sequence[Hashable], parent: bytes, ids: Sequence[int], deviations: Mapping[int, bytes], size: int
    ) -> tuple[int, int] | None:
        """A block of `size` tokens behind `parent` that begins with as many of `ids` as possible, and how many these
        are; None if there is none. deviations: of these tokens, by position among them."""
        best: tuple[int, int] | None = None
        for scope in scopes:
            for block in islice(reversed(self._children.get((scope, parent), {})), _CHILDREN_TRIED):
                name = self._names[block]
                same = _common(name.key, name.tail or size, ids, deviations)
                if same and (best is None or same > best[1]):
                    best = (block, same)
        return best

    def add(self, block: int, name: BlockName) -> None:
        """Name a block that has owners. Obligation: `find((name.scope,), name.digest)` is None."""
        if block in self._names:
            self.forget(block)
        self._names[block] = name
        self._found.setdefault(name.scope, {})[name.digest] = block
        self._children.setdefault((name.scope, name.parent), {})[block] = None

    def widen(self, block: int, scope: Hashable, priority: float) -> None:
        """Let a named block with owners be found in `scope` in place of its own, if `scope` has no such block."""
        name = self._names[block]
        if self.find((scope,), name.digest) is None:
            self.forget(block)
            self.add(block, name._replace(scope=scope, priority=max(priority, name.priority)))

    def raise_priority(self, block: int, priority: float) -> None:
        """A named block with owners is used by somebody of that priority."""
        name = self._names[block]
        if name.priority < priority:
            self._names[block] = name._replace(priority=priority)

    def forget(self, block: int) -> None:
        """Take a block's name away; of one without a name, nothing. It must not be cached."""
        name = self._names.pop(block, None)
        if name is None:
            return
        self._left.discard(block)
        del self._found[name.scope][name.digest]
        if not self._found[name.scope]:
            del self._found[name.scope]
        siblings = self._children[name.scope, name.parent]
        del siblings[block]
        if not siblings:
            del self._children[name.scope, name.parent]

    def move(self, block: int, to: int) -> None:
        """What block `block` held is in block `to` now; both have owners, or had."""
        name = self._names.get(block)
        if name is not None:
            self.forget(block)
            self.add(to, name)

    def park(self, block: int) -> bool:
        """A block lost its last owner: whether it stays as cached."""
        name = self._names.get(block)
        if name is None:
            return False
        self._cached.setdefault(name.worth, {})[block] = None
        if block in self._left:
            self._behind[block] = None
        return True

    def unpark(self, block: int) -> None:
        """A cached block gets an owner, or is about to be forgotten."""
        if block in self._left:
            self._left.discard(block)
            self._behind.pop(block, None)
        worth = self._names[block].worth
        cached = self._cached[worth]
        del cached[block]
        if not cached:
            del self._cached[worth]

    def cached(self) -> Iterator[int]:
        """The cached blocks, in the order in which they should go: tails, then by priority, then the least recently
        used."""
        for worth in sorted(self._cached):
            yield from self._cached[worth]

    def evict(self) -> int | None:
        """Forget the cached block that is worth least, and no other block's parent if there is such a one; None if
        nothing is cached."""
        first = chosen = None
        for block in self.cached():
            first = block if first is None else first
            name = self._names[block]
            if (name.scope, name.digest) not in self._children:
                chosen = block
                break
        chosen = first if chosen is None else chosen
        return None if chosen is None else self._evicted(chosen)

    def evict_behind(self) -> int:
        """Forget the first block that a window left behind. Obligation: `num_behind`."""
        return self._evicted(next(iter(self._behind)))

    def _evicted(self, block: int) -> int:
        self.unpark(block)
        self.forget(block)
        return block

    def check(self) -> list[str]:
        """Inconsistencies among the index's own tables, as sentences (empty when sound)."""
        faults = []
        found = {block: (scope, d) for scope, blocks in self._found.items() for d, block in blocks.items()}
        if found != {block: (name.scope, name.digest) for block, name in self._names.items()}:
            faults.append("the index finds other blocks than those that have names")
        children = {block: parent for parent, blocks in self._children.items() for block in blocks}
        if children != {block: (name.scope, name.parent) for block, name in self._names.items()}:
            faults.append("the index lists other children than the names say")
        cached = set(self.cached())
        faults += [f"block {block} is cached and has no name" for block in cached if block not in self._names]
        if set(self._behind) != cached & self._left or not self._left <= self._names.keys():
            faults.append("the blocks that windows left behind are others than those that are cached")
        return faults


def _common(key: bytes, count: int, ids: Sequence[int], deviations: Mapping[int, bytes]) -> int:
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
