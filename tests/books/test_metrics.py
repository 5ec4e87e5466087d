"""The exported metrics are what `stats()` says, read from the text that Prometheus would read."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import paged_inductor
from paged_inductor import ConfigurationError, MetricsCollector, MissingExtraError, Stats, serve_metrics, tenant
from paged_inductor.metrics import COUNTERS, GAUGES, PREFIX, serve_as_configured

from ..models.zoo import Decoder, Form, generate

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Samples:
    return {
        (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def held() -> Iterator[object]:
    """Caches of two tenants, one with a quota, and a dense copy of one of them."""
    paged_inductor.reset()
    paged_inductor.configure(kv_budget="64MiB", on_materialize="silent")
    torch.manual_seed(0)
    model = paged_inductor.page(Decoder(Form()), inner="eager", label="exported")
    with tenant("books-b", quota="1MiB"):
        _, first = generate(model, torch.randint(0, 61, (2, 5)), 6)
    _, second = generate(model, torch.randint(0, 61, (1, 20)), 4)
    first[0][0].mean()
    yield first, second
    paged_inductor.reset()


def check(found: Samples, now: Stats) -> None:
    """Every value of the exposition, one by one."""

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    for name, field, _ in GAUGES:
        assert value(name) == getattr(now, field), name
    for name, field, _ in COUNTERS:
        assert value(name + "_total") == getattr(now, field), name
    states = {"used": now.blocks_used, "free": now.blocks_free, "cached": now.cached_blocks}
    for state, count in (states | {"swapped": now.swapped_blocks}).items():
        assert value("blocks", state=state) == count
    assert value("budget_bytes") == now.bytes_budget == 2**26
    assert value("kv_cache_usage_perc") == now.bytes_used / 2**26
    for operation, count in now.materializations.items():
        assert value("materializations_total", operation=operation) == count
    for name, who in now.tenants.items():
        assert value("tenant_blocks", tenant=name) == who.blocks_used
        assert value("tenant_used_bytes", tenant=name) == who.bytes_used
        assert value("tenant_common_bytes", tenant=name) == who.bytes_common
        assert value("tenant_swapped_bytes", tenant=name) == who.swapped_bytes
        assert value("tenant_steps_total", tenant=name) == who.steps
    for latency in now.latencies:
        key = {"program": latency.program, "tenant": latency.tenant, "phase": latency.phase}
        assert value("step_seconds_count", **key) == latency.count
        assert value("step_seconds_sum", **key) == pytest.approx(latency.mean * latency.count)
        assert value("step_seconds_bucket", **key, le="+Inf") == latency.count
        quantiles = [value("step_quantile_seconds", **key, quantile=share) for share in ("0.5", "0.95", "0.99")]
        assert quantiles == [latency.p50, latency.p95, latency.p99]


def test_the_exposition_says_what_stats_say(held: object) -> None:
    registry = CollectorRegistry()
    registry.register(MetricsCollector())
    found = read(generate_latest(registry).decode())
    now = paged_inductor.stats()
    check(found, now)
    assert now.materializations == {"aten.mean.default": 1}
    assert now.tenants["books-b"].quota == found["tenant_quota_bytes", frozenset({("tenant", "books-b")})] == 2**20
    assert ("tenant_quota_bytes", frozenset({("tenant", "default")})) not in found
    assert found["blocks", frozenset({("state", "used")})] == 4  # 2 rows of 11 tokens, 1 of 24
    for phase in ("prefill", "decode"):
        wanted = {("tenant", "books-b"), ("phase", phase)}
        buckets = [v for (name, labels), v in found.items() if name == "step_seconds_bucket" and wanted <= labels]
        assert buckets == sorted(buckets) and len(buckets) == 22


def test_every_figure_is_exported() -> None:
    shown = {field for _, field, _ in (*GAUGES, *COUNTERS)}
    states = {"blocks_used", "blocks_free", "cached_blocks", "swapped_blocks", "bytes_budget"}
    labelled = {"materializations", "tenants", "latencies"}
    sums = {"blocks_total"}  # of the states
    assert shown | states | labelled | sums == {field.name for field in fields(Stats)}


def test_served_and_closed(held: object) -> None:
    with serve_metrics(port=0) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        assert repr(server) == f"<MetricsServer at {server.url}>"
        check(read(scrape(server.url)), paged_inductor.stats())
        with pytest.raises(ConfigurationError, match=f"cannot be served at 127.0.0.1:{server.port} .*port=0"):
            serve_metrics(port=server.port)
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(server.url)
    server.close()
    assert repr(server).endswith("/metrics, closed>")


def test_the_first_graph_serves_them_if_asked(held: object) -> None:
    assert serve_as_configured() is None
    with serve_metrics(port=0) as server:
        port = server.port
    paged_inductor.configure(metrics_port=port)
    try:
        model = paged_inductor.page(Decoder(Form()), inner="eager", label="asked")
        model(torch.randint(0, 61, (1, 5)))
        assert ("steps_total", frozenset()) in read(scrape(f"http://127.0.0.1:{port}/metrics"))
        assert serve_as_configured() is serve_as_configured()
    finally:
        serve_as_configured().close()  # type: ignore[union-attr]
        paged_inductor.configure(metrics_port=None)


def test_a_port_in_use_is_warned_about() -> None:
    with serve_metrics(port=0) as server:
        paged_inductor.configure(metrics_port=server.port)
        try:
            with pytest.warns(UserWarning, match="cannot be served") as caught:
                assert serve_as_configured() is None
            assert [warning.filename for warning in caught] == [__file__]
        finally:
            paged_inductor.configure(metrics_port=None)


@pytest.mark.parametrize("port", [-1, 70000, "x", 1.5])
def test_ports_that_are_none(port: object) -> None:
    with pytest.raises(ConfigurationError, match="choose a number from 1 to 65535"):
        serve_metrics(port=port)  # type: ignore[arg-type]


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'paged-inductor\[metrics\]'"):
        MetricsCollector()
