"""Numbers that the runtime (which lays tables out) and the operations (which read them) must agree on."""

from __future__ import annotations

__all__ = ["chunk_blocks", "chunks_needed"]

_CHUNK_TOKENS = 128  # fewer slots computed in vain at a row's end, against more partial results to combine


def chunk_blocks(block_size: int) -> int:
    """Blocks in a chunk, the unit of work of decode on the CPU: 128 tokens' worth, but at least one block."""
    return max(1, _CHUNK_TOKENS // block_size)


def chunks_needed(length: int, block_size: int) -> int:
    """Chunks of a row of `length` tokens."""
    return -(-length // (chunk_blocks(block_size) * block_size))
