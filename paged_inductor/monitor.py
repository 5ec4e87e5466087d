"""`stats()`: how much is held, by whom, and what it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from . import reports
from ._amounts import size
from ._config import reset_config
from .runtime import Manager, manager
from .runtime.census import Holdings, census, held_by, parts_of, sequences

__all__ = ["Stats", "StepLatency", "TenantStats", "check_integrity", "reset", "stats", "trim"]


@dataclass(frozen=True)
class TenantStats:
    """What one tenant holds.

    blocks_used, bytes_used: what it pays for (a shared block has one payer). bytes_common: its part of the blocks that
    several tenants share and none of them pays for: each block is divided evenly among those that have it. quota:
    bytes that it may pay for; None for no limit. swapped_blocks, swapped_bytes: in another tier. steps: compiled steps
    that it ran.
    """

    blocks_used: int
    bytes_used: int
    bytes_common: int
    quota: int | None
    swapped_blocks: int
    swapped_bytes: int
    steps: int


@dataclass(frozen=True)
class StepLatency:
    """How long the compiled steps of one program took for one tenant, in seconds, from the call until the handles are
    made. On a device it is the time of the host, which does not wait. phase: "decode" of steps of one token a row,
    "prefill" of all others. p50, p95, p99: quantiles, at most an eighth too high."""

    program: str
    tenant: str
    phase: str
    count: int
    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Stats:
    """The books at one moment, over all caches of the process.

    blocks_total, blocks_used, blocks_free: physical blocks reserved, those that hold tokens, and those that are free;
    of the rest, cached_blocks are kept for a prefix that may come again. shared_blocks: blocks that more than one
    sequence sees. swapped_blocks: blocks in another tier of memory, which take none here.
    tokens: live tokens, shared ones counted once. sequences: live rows. running_steps: steps under way.
    bytes_used, bytes_reserved, bytes_budget: bytes of the used blocks, of all arenas, and what the arenas may take
    (None if that is not decided yet). bytes_wasted: bytes of the used blocks in which no live token is. utilization:
    bytes of live tokens / bytes_used (1.0 when nothing is used). bytes_common: of bytes_used, those that several
    tenants share and none of them pays for.

    Since the start or `reset()`: copies_on_write: blocks copied. materializations: dense copies made, by operation.
    prefix_queries, prefix_hits: tokens looked up among the cached prefixes, and found. evictions: cached blocks given
    up. swaps_out, swaps_in: blocks moved, with swap_bytes_* and swap_seconds_*; swaps_ahead of them came back before
    their step began. preempted_steps: steps that waited for
    others or gave way to them. arena_growths, dense_fallbacks: how often arenas grew, and steps had to run on dense
    copies. graph_recordings: with mode="reduce-overhead", how often a step's fixed inputs were in a new place, so that
    it had to be recorded. steps: uses of the arenas: compiled steps and eager operations.

    tenants: by name. latencies: by program, tenant and phase.
    """

    blocks_total: int
    blocks_used: int
    blocks_free: int
    cached_blocks: int
    shared_blocks: int
    swapped_blocks: int
    tokens: int
    sequences: int
    running_steps: int
    bytes_used: int
    bytes_reserved: int
    bytes_budget: int | None
    bytes_wasted: int
    utilization: float
    bytes_common: int
    copies_on_write: int
    materializations: dict[str, int]
    prefix_queries: int
    prefix_hits: int
    evictions: int
    swaps_out: int
    swaps_in: int
    swaps_ahead: int
    swap_bytes_out: int
    swap_bytes_in: int
    swap_seconds_out: float
    swap_seconds_in: float
    preempted_steps: int
    arena_growths: int
    steps: int
    dense_fallbacks: int
    tenants: dict[str, TenantStats]
    latencies: list[StepLatency]
    graph_recordings: int

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, for logs."""
        return asdict(self)

    def __str__(self) -> str:
        """The figures that matter most, in a few lines; `repr` has all."""
        budget = "" if self.bytes_budget is None else f" of a budget of {size(self.bytes_budget)}"
        return (
            f"blocks  {self.blocks_used:,} used ({self.shared_blocks:,} shared), {self.cached_blocks:,} cached, "
            f"{self.blocks_free:,} free, {self.swapped_blocks:,} swapped\n"
            f"memory  {size(self.bytes_used)} used{budget}, {size(self.bytes_reserved)} reserved, "
            f"{size(self.bytes_wasted)} wasted\n"
            f"now     {self.tokens:,} tokens of {self.sequences:,} sequences, {self.running_steps:,} running steps\n"
            f"so far  {self.steps:,} steps ({self.dense_fallbacks:,} on dense copies), {self.copies_on_write:,} copies "
            f"on write, {sum(self.materializations.values()):,} dense copies, {self.swaps_out:,} blocks swapped out"
        )


_TOTALS = (
    "copies_on_write",
    "prefix_queries",
    "prefix_hits",
    "evictions",
    "swaps_out",
    "swaps_in",
    "swaps_ahead",
    "swap_bytes_out",
    "swap_bytes_in",
    "swap_seconds_out",
    "swap_seconds_in",
    "preempted_steps",
    "arena_growths",
    "steps",
    "dense_fallbacks",
    "graph_recordings",
)


def stats() -> Stats:
    """The books now. Costs time in proportion to the live blocks: not for every step of a loop."""
    runtime = manager()
    used = bytes_used = bytes_live = 0
    counted: dict[str, int] = dict.fromkeys(("blocks_total", "blocks_free", "cached_blocks", "shared_blocks"), 0)
    counted |= dict.fromkeys(("swapped_blocks", "tokens", "bytes_reserved"), 0)
    with runtime.locked():
        for group in runtime.groups:
            pool = group.pool
            counts = census(group)
            used += pool.num_used
            bytes_used += pool.num_used * group.block_bytes
            bytes_live += counts.resident * group.token_bytes
            counted["blocks_total"] += pool.capacity - 1
            counted["blocks_free"] += pool.num_free
            counted["cached_blocks"] += pool.num_cached
            counted["shared_blocks"] += counts.shared
            counted["swapped_blocks"] += pool.num_swapped
            counted["tokens"] += counts.tokens
            counted["bytes_reserved"] += pool.capacity * group.block_bytes
        latencies = _latencies(runtime)
        return Stats(
            **counted,
            blocks_used=used,
            sequences=sequences(runtime.groups),
            running_steps=runtime.running_steps,
            bytes_used=bytes_used,
            bytes_budget=runtime.budget_bytes,
            bytes_wasted=bytes_used - bytes_live,
            bytes_common=runtime.tenants.common.used,
            utilization=bytes_live / bytes_used if bytes_used else 1.0,
            materializations=dict(runtime.counters.materializations),
            **{name: getattr(runtime.counters, name) for name in _TOTALS},
            tenants=_tenants(runtime, latencies),
            latencies=latencies,
        )


def _latencies(runtime: Manager) -> list[StepLatency]:
    found = []
    for steps, times in runtime.counters.latencies.all().items():
        count = times.count
        if count:  # else its first step is being recorded
            quantiles = (times.quantile(share) for share in (0.5, 0.95, 0.99))
            found.append(StepLatency(*steps, count, times.total / count, *quantiles))
    return found


def _tenants(runtime: Manager, latencies: list[StepLatency]) -> dict[str, TenantStats]:
    held = held_by(runtime.groups)
    common = parts_of(runtime.tenants.common, runtime.groups)
    found = {}
    for tenant in runtime.tenants.all():
        holdings = held.get(tenant, Holdings())
        found[tenant.name] = TenantStats(
            blocks_used=holdings.blocks,
            bytes_used=tenant.used,
            bytes_common=round(common.get(tenant, 0)),
            quota=None if tenant.limit == float("inf") else int(tenant.limit),
            swapped_blocks=holdings.swapped_blocks,
            swapped_bytes=holdings.swapped_bytes,
            steps=sum(latency.count for latency in latencies if latency.tenant == tenant.name),
        )
    return found


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
