"""The books for Prometheus: `serve_metrics()`, or a collector for a registry that exists already.

Where the meaning is that of a metric of vLLM, so is the name, behind `paged_inductor_`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

from ._callers import users_stacklevel
from ._config import config, require_port
from ._errors import ConfigurationError, missing_extra
from .monitor import Stats, stats
from .runtime import manager

__all__ = ["DEFAULT_PORT", "MetricsCollector", "MetricsServer", "serve_as_configured", "serve_metrics"]

DEFAULT_PORT = 9464
PREFIX = "paged_inductor_"

# (name, field of `Stats`, what it means)
GAUGES = (
    ("shared_blocks", "shared_blocks", "Blocks that more than one sequence sees."),
    ("used_bytes", "bytes_used", "Bytes of the blocks that hold tokens."),
    ("reserved_bytes", "bytes_reserved", "Bytes of all arenas."),
    ("wasted_bytes", "bytes_wasted", "Bytes of the used blocks in which no live token is."),
    ("common_bytes", "bytes_common", "Bytes of the used blocks that several tenants share and none pays for."),
    ("utilization_ratio", "utilization", "Bytes of live tokens by bytes of used blocks."),
    ("tokens", "tokens", "Live tokens, shared ones counted once."),
    ("sequences", "sequences", "Live sequences."),
    ("running_steps", "running_steps", "Steps under way."),
)
COUNTERS = (
    ("prefix_cache_queries", "prefix_queries", "Tokens looked up among the cached prefixes."),
    ("prefix_cache_hits", "prefix_hits", "Tokens found among the cached prefixes."),
    ("num_preemptions", "preempted_steps", "Steps that waited for others or gave way to them."),
    ("evictions", "evictions", "Cached blocks that were given up."),
    ("swapped_out_blocks", "swaps_out", "Blocks moved to another tier of memory."),
    ("swapped_in_blocks", "swaps_in", "Blocks moved back."),
    ("swapped_in_ahead_blocks", "swaps_ahead", "Blocks moved back before their step began."),
    ("swapped_out_bytes", "swap_bytes_out", "Bytes moved to another tier of memory."),
    ("swapped_in_bytes", "swap_bytes_in", "Bytes moved back."),
    ("swap_out_seconds", "swap_seconds_out", "Time that moving to another tier took."),
    ("swap_in_seconds", "swap_seconds_in", "Time that moving back took."),
    ("copies_on_write", "copies_on_write", "Blocks copied because somebody else sees them."),
    ("arena_growths", "arena_growths", "How often arenas grew."),
    ("steps", "steps", "Uses of the arenas: compiled steps and eager operations."),
    ("dense_fallbacks", "dense_fallbacks", "Steps that ran on dense copies."),
    ("graph_recordings", "graph_recordings", "How often a step was recorded as a CUDA graph."),
)


class MetricsCollector:
    """A collector for Prometheus' client: `REGISTRY.register(MetricsCollector())`. Every scrape calls `stats()` once.

    Raises `MissingExtraError` without prometheus-client.
    """

    def __init__(self) -> None:
        self._core = _client().core

    def collect(self) -> Iterator[Any]:
        """All metrics of this moment."""
        now = stats()
        yield from self._states(now)
        for name, field, meaning in GAUGES:
            yield self._core.GaugeMetricFamily(PREFIX + name, meaning, getattr(now, field))
        for name, field, meaning in COUNTERS:
            yield self._core.CounterMetricFamily(PREFIX + name, meaning, getattr(now, field))
        copies = self._counter("materializations", "Dense copies made, by operation.", "operation")
        for operation, count in now.materializations.items():
            copies.add_metric([operation], count)
        yield copies
        yield from self._tenants(now)
        yield from self._latencies(now)

    def describe(self) -> list[Any]:
        """Nothing: registering does not call `stats()`."""
        return []

    def _gauge(self, name: str, meaning: str, *labels: str) -> Any:
        return self._core.GaugeMetricFamily(PREFIX + name, meaning, labels=labels)

    def _counter(self, name: str, meaning: str, *labels: str) -> Any:
        return self._core.CounterMetricFamily(PREFIX + name, meaning, labels=labels)

    def _states(self, now: Stats) -> Iterator[Any]:
        blocks = self._gauge("blocks", "Blocks by state; swapped ones take no memory in the arenas.", "state")
        counts = {
            "used": now.blocks_used,
            "free": now.blocks_free,
            "cached": now.cached_blocks,
            "swapped": now.swapped_blocks,
        }
        for state, count in counts.items():
            blocks.add_metric([state], count)
        yield blocks
        usage = self._gauge("kv_cache_usage_perc", "Bytes of the used blocks by the budget; 1 is full.")
        budget = self._gauge("budget_bytes", "Bytes that all arenas together may take, once that is decided.")
        if now.bytes_budget is not None:
            usage.add_metric([], now.bytes_used / now.bytes_budget)
            budget.add_metric([], now.bytes_budget)
        yield usage
        yield budget

    def _tenants(self, now: Stats) -> Iterator[Any]:
        blocks = self._gauge("tenant_blocks", "Blocks that a tenant pays for.", "tenant")
        size = self._gauge("tenant_used_bytes", "Bytes that a tenant pays for.", "tenant")
        common = self._gauge("tenant_common_bytes", "A tenant's part of what several tenants share.", "tenant")
        quota = self._gauge("tenant_quota_bytes", "Bytes that a tenant may hold, if that is limited.", "tenant")
        swapped = self._gauge("tenant_swapped_bytes", "Bytes of a tenant in another tier of memory.", "tenant")
        steps = self._counter("tenant_steps", "Compiled steps that a tenant ran.", "tenant")
        for name, tenant in now.tenants.items():
            blocks.add_metric([name], tenant.blocks_used)
            size.add_metric([name], tenant.bytes_used)
            common.add_metric([name], tenant.bytes_common)
            swapped.add_metric([name], tenant.swapped_bytes)
            steps.add_metric([name], tenant.steps)
            if tenant.quota is not None:
                quota.add_metric([name], tenant.quota)
        yield from (blocks, size, common, quota, swapped, steps)

    def _latencies(self, now: Stats) -> Iterator[Any]:
        labels = ("program", "tenant", "phase")
        times = self._core.HistogramMetricFamily(PREFIX + "step_seconds", "Time of a compiled step.", labels=labels)
        for key, histogram in manager().counters.latencies.all().items():
            buckets = [(str(bound), count) for bound, count in histogram.buckets()]
            times.add_metric(key, [*buckets, ("+Inf", histogram.count)], histogram.total)
        yield times
        quantiles = self._gauge("step_quantile_seconds", "Quantiles of a compiled step's time.", *labels, "quantile")
        for found in now.latencies:
            for share, value in (("0.5", found.p50), ("0.95", found.p95), ("0.99", found.p99)):
                quantiles.add_metric([found.program, found.tenant, found.phase, share], value)
        yield quantiles


class MetricsServer:
    """A thread that answers scrapes at `url`. `close()` ends it, as does the end of a `with` block."""

    def __init__(self, port: int, addr: str) -> None:
        client = _client()
        registry = client.CollectorRegistry()
        registry.register(MetricsCollector())
        try:
            self._server, self._thread = client.start_http_server(port, addr, registry)
        except OSError as error:
            raise ConfigurationError(
                f"metrics cannot be served at {addr}:{port} ({error.strerror or error}): choose another port, or "
                "port=0 for any that is free"
            ) from error
        self.port: int = self._server.server_port
        self.url = f"http://{addr}:{self.port}/metrics"
        self._once = threading.Lock()

    def __repr__(self) -> str:
        return f"<MetricsServer at {self.url}{', closed' if self._once.locked() else ''}>"

    def close(self) -> None:
        """Stop answering; a second call does nothing."""
        if self._once.acquire(blocking=False):
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(port: int = DEFAULT_PORT, addr: str = "127.0.0.1") -> MetricsServer:
    """Answer Prometheus' scrapes, and `python -m paged_inductor top`, at http://addr:port/metrics from now on.

    port=0 takes any free port: see the result's `.port`. With an addr that other machines reach, such as "0.0.0.0",
    whoever reaches it reads the names of tenants. Raises `ConfigurationError` if the port cannot be used,
    `MissingExtraError` without prometheus-client.
    """
    return MetricsServer(0 if port == 0 else require_port(port), addr)


def serve_as_configured() -> MetricsServer | None:
    """The server that `configure(metrics_port=…)` or PAGED_INDUCTOR_METRICS_PORT asks for; started at the first call.

    A port that cannot be used is warned about: the model runs all the same.
    """
    port = config().metrics_port
    return None if port is None else _serve_once(port)


@cache
def _serve_once(port: int) -> MetricsServer | None:
    try:
        return serve_metrics(port)
    except ConfigurationError as error:
        warnings.warn(f"paged_inductor: {error}", stacklevel=users_stacklevel())
        return None


def _client() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise missing_extra("the export of metrics", "prometheus-client", "metrics") from error
    return prometheus_client
