"""`python -m paged_inductor top`: frames of this process, of another one, and of none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

import paged_inductor
from paged_inductor import MetricsCollector, PagedInductorError, _top, serve_metrics
from paged_inductor.__main__ import main
from paged_inductor._top import Samples, frame

BEFORE = """
paged_inductor_blocks{state="used"} 30
paged_inductor_blocks{state="free"} 10
paged_inductor_blocks{state="cached"} 2
paged_inductor_blocks{state="swapped"} 7
paged_inductor_shared_blocks 4
paged_inductor_kv_cache_usage_perc 0.75
paged_inductor_budget_bytes 4194304
paged_inductor_used_bytes 3145728
paged_inductor_reserved_bytes 4194304
paged_inductor_wasted_bytes 2048
paged_inductor_utilization_ratio 0.95
paged_inductor_tokens 1234
paged_inductor_sequences 5
paged_inductor_running_steps 2
paged_inductor_steps_total 100
paged_inductor_prefix_cache_queries_total 200
paged_inductor_prefix_cache_hits_total 50
paged_inductor_materializations_total{operation="aten.mean.default"} 3
paged_inductor_tenant_blocks{tenant="a"} 20
paged_inductor_tenant_used_bytes{tenant="a"} 1024
paged_inductor_tenant_quota_bytes{tenant="a"} 1073741824
paged_inductor_tenant_steps_total{tenant="a"} 60
paged_inductor_tenant_blocks{tenant="b"} 10
paged_inductor_step_seconds_count{program="M",tenant="a",phase="decode"} 60
paged_inductor_step_seconds_sum{program="M",tenant="a",phase="decode"} 0.6
paged_inductor_step_quantile_seconds{program="M",tenant="a",phase="decode",quantile="0.5"} 0.009
paged_inductor_step_quantile_seconds{program="M",tenant="a",phase="decode",quantile="0.99"} 1.5
somebody_else_total 3
"""


def shown(now: Samples, before: Samples | None = None) -> str:
    console = Console(record=True, width=140, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(frame(now, before, "http://there"))
    return console.export_text()


def line(text: str, start: str) -> str:
    return " ".join(next(line for line in text.splitlines() if line.strip().startswith(start)).split())


def test_a_frame_shows_every_figure() -> None:
    text = shown(Samples(BEFORE, 0.0))
    assert line(text, "memory").endswith("75.0% of 4.0 MiB")
    assert line(text, "bytes") == "bytes used 3.0 MiB, reserved 4.0 MiB, wasted 2.0 KiB (utilization 95.0%)"
    assert text.count("█") == 30
    assert line(text, "blocks") == "blocks 30 used, 4 shared, 2 cached, 10 free, 7 swapped"
    assert line(text, "now") == "now 1,234 tokens of 5 sequences, 2 running steps"
    assert line(text, "steps") == "steps 100, 0 preempted, 0 on dense copies"
    assert line(text, "prefixes").startswith("prefixes 200 tokens looked up (25.0% hit), 0 evictions")
    assert line(text, "copies") == "copies aten.mean.default × 3"
    assert line(text, "M") == "M a decode 60 10.00 ms 9.00 ms 0.00 ms 1.50 s"
    assert line(text, "a ") == "a 20 1.0 KiB 1.00 GiB 0 B 60"
    assert line(text, "b ") == "b 10 0 B none 0 B 0"


def test_rates_are_those_since_the_frame_before() -> None:
    later = Samples(
        BEFORE.replace("steps_total 100", "steps_total 130").replace('{tenant="a"} 60', '{tenant="a"} 20'), 2.0
    )
    text = shown(later, Samples(BEFORE, 0.0))
    assert line(text, "steps").startswith("steps 130 (15.0/s)")
    assert line(text, "a ") == "a 20 1.0 KiB 1.00 GiB 0 B 20 (0.0/s)"  # a reset is not a negative rate


def test_a_process_without_caches_has_a_frame() -> None:
    registry = CollectorRegistry()
    registry.register(MetricsCollector())
    assert "tokens of" in shown(Samples(generate_latest(registry).decode(), 0.0))


OTHER = """
import sys, torch, paged_inductor
from paged_inductor.runtime import SiteSpec, Steps, manager

paged_inductor.configure(kv_budget="1MiB")
site = SiteSpec(2, 8, torch.float32, torch.device("cpu"))
held = manager().create(manager().group((site,), 16), 1, 3, "elsewhere")
for _ in range(3):
    manager().counters.latencies.record(Steps("elsewhere", "default", "decode"), 10**6)
with paged_inductor.serve_metrics(port=0) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """The address of another process, which holds one cache of three tokens."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("")
    assert process.returncode == 0


def test_another_process_is_shown_once(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", other.removeprefix("http://")]) == 0
    text = capsys.readouterr().out
    assert "3 tokens of 1 sequences" in text
    assert line(text, "elsewhere").startswith("elsewhere default decode 3 ")
    assert "1 used" in line(text, "blocks")


def test_frames_follow_until_interrupted(
    other: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(_top.time, "sleep", wait)
    assert main(["top", "--interval", "0.5", "--url", other]) == 0
    assert waits == [0.5] * 3


def test_nobody_listens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_metrics(port=0) as server:
        pass
    paged_inductor.configure(metrics_port=server.port)
    try:
        assert main(["top"]) == 1
    finally:
        paged_inductor.configure(metrics_port=None)
    printed = capsys.readouterr().err
    assert f"nothing answers at {server.url}" in printed
    assert "serve_metrics()" in printed and "PAGED_INDUCTOR_METRICS_PORT" in printed
    assert main(["top", "--url", "nonsense"]) == 1


def test_somebody_else_answers() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"process_cpu_seconds_total 3\n")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(PagedInductorError, match="no metrics of paged_inductor"):
            _top.read(f"http://127.0.0.1:{server.server_port}/")
        thread.join()


@pytest.mark.parametrize("library", ["rich.live", "prometheus_client.parser"])
def test_the_extra_is_named(library: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with serve_metrics(port=0) as server:
        assert main(["top", "--once", "--url", server.url]) == 1
    assert "pip install 'paged-inductor[top]'" in capsys.readouterr().err
