"""`stats()`: how much is held, by whom, and what it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from . import reports
from ._config import reset_config
from .runtime import manager

__all__ = ["Stats", "check_integrity", "reset", "stats", "trim"]


@dataclass(frozen=True)
class Stats:
    """The books at one moment, over all caches of the process.

    blocks_total, blocks_used: physical blocks reserved, and those that hold tokens. tokens: live tokens, shared ones
    counted once. bytes_used, bytes_reserved: bytes of the used blocks, and of all arenas. utilization: bytes of live
    tokens / bytes_used (1.0 when nothing is used). shared_blocks: blocks that more than one sequence sees.
    copies_on_write: blocks copied since the start or `reset()`. materializations: dense copies made, by operation.
    swapped_blocks: blocks moved to another tier (always 0 in this version). arena_growths, dense_fallbacks: how often
    arenas grew, and steps had to run on dense copies. graph_recordings: with mode="reduce-overhead", how often a step's
    fixed inputs were in a new place, so that it had to be recorded. steps: uses of the arenas: compiled steps and eager
    operations.
    """

    blocks_total: int
    blocks_used: int
    tokens: int
    bytes_used: int
    bytes_reserved: int
    utilization: float
    shared_blocks: int
    copies_on_write: int
    materializations: dict[str, int]
    swapped_blocks: int
    arena_growths: int
    steps: int
    dense_fallbacks: int
    graph_recordings: int

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, for logs."""
        return asdict(self)


def stats() -> Stats:
    """The books now. Costs time in proportion to the live blocks: not for every step of a loop."""
    runtime = manager()
    total = used = tokens = bytes_used = bytes_live = reserved = shared = 0
    with runtime.locked():
        for group in runtime.groups:
            pool = group.pool
            total += pool.capacity - 1
            used += pool.num_used
            reserved += pool.capacity * group.block_bytes
            bytes_used += pool.num_used * group.block_bytes
            live, seen_twice = group.count_tokens()
            tokens += live
            bytes_live += live * group.token_bytes
            shared += seen_twice
        counters = runtime.counters
        return Stats(
            blocks_total=total,
            blocks_used=used,
            tokens=tokens,
            bytes_used=bytes_used,
            bytes_reserved=reserved,
            utilization=bytes_live / bytes_used if bytes_used else 1.0,
            shared_blocks=shared,
            copies_on_write=counters.copies_on_write,
            materializations=dict(counters.materializations),
            swapped_blocks=0,
            arena_growths=counters.arena_growths,
            steps=counters.steps,
            dense_fallbacks=counters.dense_fallbacks,
            graph_recordings=counters.graph_recordings,
        )


def check_integrity() -> str:
    """Prove that free + used + swapped = total and that every owner is counted. Returns the terms, one group a line.

    Raises `IntegrityError` naming every fault: that would be a bug of this package.
    """
    return manager().check_integrity()


def trim() -> int:
    """Give back the memory of the free blocks at the arenas' ends; returns the bytes. Waits for running steps."""
    return manager().trim()


def reset() -> None:
    """Forget counters, options set by `configure` and reports, and give back the free blocks of groups that are idle.

    Live caches keep their pages and stay valid.
    """
    manager().forget_unused()
    reports.forget()
    reset_config()
