"""`python -m paged_inductor top`: the books of a process that serves its metrics, as a live view in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from ._amounts import duration, size
from ._config import config
from ._errors import PagedInductorError, missing_extra
from .metrics import DEFAULT_PORT, PREFIX

__all__ = ["Samples", "default_url", "frame", "read", "top"]

_STATES = ("used", "shared", "cached", "free", "swapped")
_BAR = 40


class Samples:
    """What one scrape said. `at`: when, in seconds."""

    def __init__(self, text: str, at: float) -> None:
        """`text` is Prometheus' exposition format. Raises `MissingExtraError` without prometheus-client."""
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError as error:
            raise missing_extra("top", "prometheus-client", "top") from error
        self.at = at
        self._values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                if name != sample.name:
                    self._values.setdefault(name, []).append((sample.labels, sample.value))

    def __bool__(self) -> bool:
        return bool(self._values)

    def get(self, name: str, **labels: str) -> float | None:
        """The value of the sample that has these labels, whatever others it has; None if there is none."""
        for having, value in self._values.get(name, ()):
            if labels.items() <= having.items():
                return value
        return None

    def count(self, name: str, **labels: str) -> float:
        """As `get`, but 0 if there is none."""
        return self.get(name, **labels) or 0.0

    def labels(self, name: str) -> list[Mapping[str, str]]:
        """The labels of every sample of this name."""
        return [labels for labels, _ in self._values.get(name, ())]


def default_url() -> str:
    """Where a process of the same environment serves its metrics."""
    return f"http://127.0.0.1:{config().metrics_port or DEFAULT_PORT}/metrics"


def read(url: str) -> Samples:
    """Scrape a process now. Raises `PagedInductorError` if nothing, or something else, answers there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, ValueError) as error:
        raise PagedInductorError(
            f"nothing answers at {url} ({getattr(error, 'reason', error)}): in the process to watch, call "
            f"paged_inductor.serve_metrics(), or start it with PAGED_INDUCTOR_METRICS_PORT={DEFAULT_PORT}; then give "
            "its address with --url if it is another"
        ) from error
    samples = Samples(text, time.monotonic())
    if not samples:
        raise PagedInductorError(
            f"{url} answers, but with no metrics of paged_inductor: is it another program's address? serve_metrics() "
            "returns the right one as its .url"
        )
    return samples


def top(options: argparse.Namespace) -> int:
    """Show frames until interrupted, or one of them; returns the exit status."""
    url = options.url or default_url()
    if "://" not in url:  # as people write addresses, "127.0.0.1:9464"
        url = f"http://{url}"
    try:
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError as error:
            raise missing_extra("top", "rich", "top") from error
        now = read(url)
        console = Console()
        if options.once:
            console.print(frame(now, None, url))
            return 0
        with Live(frame(now, None, url), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(options.interval)
                before, now = now, read(url)
                live.update(frame(now, before, url), refresh=True)
    except KeyboardInterrupt:
        return 0
    except PagedInductorError as error:
        print(error, file=sys.stderr)
        return 1


def frame(now: Samples, before: Samples | None, url: str) -> Any:
    """What `rich` prints for one scrape; rates are those since the one before, if there was one."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(f"paged_inductor top · {url}", style="bold"), _memory(now), _activity(now, before)]
    if now.labels("step_seconds_count"):
        parts.append(_programs(now))
    parts.append(_tenants(now, before))
    return Group(*parts)


def _memory(now: Samples) -> Any:
    from rich.text import Text

    usage = now.get("kv_cache_usage_perc")
    text = Text("memory   ")
    if usage is not None:
        filled = round(min(1.0, usage) * _BAR)
        colour = "green" if usage < 0.7 else "yellow" if usage < 0.9 else "red"
        text.append("█" * filled, colour).append("░" * (_BAR - filled), "dim")
        text.append(f" {usage:.1%} of {size(now.count('budget_bytes'))}")
    text.append(f"\nbytes    used {size(now.count('used_bytes'))}, reserved {size(now.count('reserved_bytes'))}, ")
    text.append(
        f"wasted {size(now.count('wasted_bytes'))} (utilization {now.count('utilization_ratio'):.1%})\nblocks   "
    )
    counts = {state: now.count("blocks", state=state) for state in _STATES} | {"shared": now.count("shared_blocks")}
    return text.append(", ".join(f"{count:,.0f} {state}" for state, count in counts.items()))


def _activity(now: Samples, before: Samples | None) -> Any:
    from rich.text import Text

    tokens, sequences = now.count("tokens"), now.count("sequences")
    lines = [
        f"now      {tokens:,.0f} tokens of {sequences:,.0f} sequences, {now.count('running_steps'):,.0f} running steps",
        f"steps    {_total(now, before, 'steps_total')}, {_total(now, before, 'num_preemptions_total')} preempted, "
        f"{_total(now, before, 'dense_fallbacks_total')} on dense copies",
        f"swaps    out {_total(now, before, 'swapped_out_blocks_total')} blocks "
        f"({size(now.count('swapped_out_bytes_total'))}), in {_total(now, before, 'swapped_in_blocks_total')} blocks "
        f"({size(now.count('swapped_in_bytes_total'))})",
    ]
    queries = now.count("prefix_cache_queries_total")
    rate = f" ({now.count('prefix_cache_hits_total') / queries:.1%} hit)" if queries else ""
    lines.append(
        f"prefixes {_total(now, before, 'prefix_cache_queries_total')} tokens looked up{rate}, "
        f"{_total(now, before, 'evictions_total')} evictions, "
        f"{_total(now, before, 'copies_on_write_total')} copies on write"
    )
    copies = {
        labels["operation"]: now.count("materializations_total", **labels)
        for labels in now.labels("materializations_total")
    }
    if copies:
        lines.append("copies   " + ", ".join(f"{name} × {count:,.0f}" for name, count in copies.items()))
    return Text("\n".join(lines))


def _programs(now: Samples) -> Any:
    table = _table("program", "tenant", "phase", "steps", "mean", "P50", "P95", "P99")
    for labels in now.labels("step_seconds_count"):
        count = now.count("step_seconds_count", **labels)
        times = [now.count("step_seconds_sum", **labels) / count] if count else [0.0]
        times += [now.count("step_quantile_seconds", **labels, quantile=share) for share in ("0.5", "0.95", "0.99")]
        who = (labels["program"], labels["tenant"], labels["phase"])
        table.add_row(*who, f"{count:,.0f}", *map(duration, times))
    return table


def _tenants(now: Samples, before: Samples | None) -> Any:
    table = _table("tenant", "blocks", "used", "quota", "swapped", "steps")
    for labels in now.labels("tenant_blocks"):
        quota = now.get("tenant_quota_bytes", **labels)
        table.add_row(
            labels["tenant"],
            f"{now.count('tenant_blocks', **labels):,.0f}",
            size(now.count("tenant_used_bytes", **labels)),
            "none" if quota is None else size(quota),
            size(now.count("tenant_swapped_bytes", **labels)),
            _total(now, before, "tenant_steps_total", **labels),
        )
    return table


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i and column != "tenant" else "left")
    return table


def _total(now: Samples, before: Samples | None, name: str, **labels: str) -> str:
    """A running total, and how fast it grew since the frame before."""
    total = now.count(name, **labels)
    if before is None:
        return f"{total:,.0f}"
    rate = (total - before.count(name, **labels)) / max(1e-9, now.at - before.at)
    return f"{total:,.0f} ({max(0.0, rate):,.1f}/s)"
