"""Numbers that the runtime (which lays tables out) and the operations (which read them) must agree on."""

from __future__ import annotations

__all__ = ["CHUNK_TOKENS", "chunks_needed"]

CHUNK_TOKENS = 128
"""Tokens in a chunk, the unit of work of decode on the CPU: at most that many slots of a row are computed in vain."""


def chunks_needed(length: int) -> int:
    """Chunks of a row of `length` tokens."""
    return -(-length // CHUNK_TOKENS)
