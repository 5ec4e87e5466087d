"""What a dropped cache holds behind its last full block: kept as cached, to be found and copied when it is wanted."""

from __future__ import annotations

from .names import BlockName, child_digest, encode_key
from .policy import Policy
from .pool import BlockPool
from .table import Row

__all__ = ["keep_tail"]


def keep_tail(row: Row, length: int, pool: BlockPool, policy: Policy, block_size: int) -> None:
    """A view of `length` tokens of `row` is about to be unregistered: name the partly filled block that is given back
    then, so that the pool keeps it, if its tokens are known and nothing that is cached begins with all of them."""
    if row.names is None or row.superseded or policy.own is None or row.live[length] > 1 or length != row.length:
        return
    known = row.names.first(row.skipped * block_size + length, block_size)
    full, tail = len(known.digests), known.tail
    j = full - row.skipped
    longest = max((seen for seen in row.live if seen != length), default=0)
    if not tail or j < 0 or longest > j * block_size:
        return
    block, index = row.blocks[j], pool.index
    if block < 0 or pool.refcount(block) != 1 or block in index:
        return
    parent = known.digests[-1] if full else known.root
    if j and index.find(policy.scopes, parent) is None:  # nobody would come by
        return
    key = encode_key(tail, known.deviations)
    digest = child_digest(parent, key)
    found = index.find_partly(policy.scopes, parent, tail, known.deviations, block_size)
    if index.find(policy.scopes, digest) is None and (found is None or found[1] < len(tail)):
        index.add(block, BlockName(policy.own, digest, parent, key, policy.priority, len(tail)))
