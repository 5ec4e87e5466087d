"""The index that finds a block by its name, in plain Python."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import islice

from .names import BlockName, common_tokens

__all__ = ["PrefixIndex"]

_CHILDREN_TRIED = 64  # blocks that begin like a wanted one are looked for among that many


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
                same = common_tokens(name.key, name.tail or size, ids, deviations)
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
