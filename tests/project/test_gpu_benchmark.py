"""`benchmarks/gpu` runs, tiny and in the interpreter, so that it works on a GPU; nothing is measured here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import decode as decode_section
from benchmarks.gpu import prefill as prefill_section
from benchmarks.gpu.__main__ import SECTIONS, main
from benchmarks.gpu.bench import Bench, NotMeasured
from benchmarks.gpu.goals import verdicts
from paged_inductor import kernels
from paged_inductor.kernels import roofline
from paged_inductor.kernels.roofline import GPUS


def test_every_line_runs_and_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert (tmp_path / "gpu.png").stat().st_size > 1000
    assert {cell["section"] for cell in result["cells"]} == {name for name, *_ in SECTIONS}
    assert {cell["status"] for cell in result["cells"]} == {"not measured"}
    assert {goal["verdict"] for goal in result["goals"]} == {"not measured"}
    figures = [value for cell in result["cells"] for name, value in cell.items() if name in ("us", "gb_s", "tflop_s")]
    assert figures and set(figures) == {None}
    assert result["machine"]["triton"] and result["machine"]["copy_gb_s"] is None
    assert "not measured  prefill" in capsys.readouterr().out


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "on a machine with a GPU, or give --tiny" in capsys.readouterr().out


def decode(kv: str, batch: int, us: float, of_copy: float, **more: Any) -> dict[str, Any]:
    facts = {"section": "decode", "heads": 32, "kv_heads": 8, "batch": batch, "context": 8192, "status": "measured"}
    return {**facts, "kv": kv, "us": us, "of_copy": of_copy, "sdpa_over_paged": None, **more}


def test_goals_are_judged_by_the_worst_case_that_counts() -> None:
    cells = [
        decode("bfloat16", 8, 100.0, 0.93, sdpa_over_paged=1.4),
        decode("bfloat16", 64, 800.0, 0.95, sdpa_over_paged=0.97),
        decode("bfloat16", 1, 20.0, 0.5),  # 8k tokens in flight: memory is not the limit
        decode("float8_e4m3fn", 8, 55.0, 0.9),
        decode("float8_e4m3fn", 64, 10.0, 0.9, status="failed"),
    ]
    found = {goal["goal"].split(",")[-1].strip(): (goal["verdict"], goal["least"]) for goal in verdicts(cells)}
    assert found == {
        "of a copy's rate": ("pass", 0.93),
        "dense SDPA's time over paged": ("short", 0.97),
        "16 rows sharing 8k: speedup": ("not measured", None),
        "SDPA flash's time over paged": ("not measured", None),
        "fp8 over bf16": ("pass", 100.0 / 55.0),
    }


def test_cases_stop_when_time_is_up_or_memory_short() -> None:
    def run(case: str, bench: Bench) -> dict[str, Any]:
        if case == "large":
            raise NotMeasured("needs 99.0 GiB")
        return {}

    bench = Bench(torch.device("cpu"), seconds=100)
    assert [cell["why"] for cell in bench.section("x", run, ["large", "small"], reserve=0)] == [
        "needs 99.0 GiB",
        "no GPU",
    ]
    assert [cell["why"] for cell in bench.section("x", run, ["small"], reserve=200)] == ["out of time"]


class PretendGpu(Bench):
    """Every call takes a millisecond: what is made of times can be checked without a device."""

    tiny = False
    gpu = GPUS["H200"]

    def seconds(self, call: Callable[[], Any]) -> float:
        call()
        return 1e-3

    launched_seconds = seconds

    def need(self, num_bytes: int) -> None:
        pass


def test_rates_are_made_of_the_models_bytes_and_operations() -> None:
    bench = PretendGpu(torch.device("cpu"), seconds=1000)
    bench.copy_bandwidth = 1e6
    (cell,) = bench.section("decode", decode_section.run, decode_section.TINY[:1], reserve=0)
    layer = roofline.Layer.plain(4, 2, 16, 4)
    work = roofline.attention(layer, [70, 70], 1)
    assert (cell["status"], cell["us"], cell["sdpa_over_paged"]) == ("measured", 1000.0, 1.0)
    assert cell["launched_us"] == 1000.0
    assert cell["gb_s"] == pytest.approx(work.bytes / 1e6, abs=1e-3)
    assert cell["of_copy"] == pytest.approx(work.bytes * 1e3 / 1e6, rel=1e-3)
    assert cell["of_floor"] == pytest.approx(work.bytes / 4.8e12 / 1e-3, abs=1e-4)
    (cell,) = bench.section("prefill", prefill_section.run, prefill_section.TINY[:1], reserve=0)
    flops = roofline.attention(layer, [20, 20], 20).flops
    assert cell["tflop_s"] == pytest.approx(flops * 1e3 / 1e12, abs=1e-3)
    assert cell["flash_over_paged"] == 1.0 or cell["flash_why"]


def test_what_is_wrong_has_no_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    attention = kernels.attention
    monkeypatch.setattr(kernels, "attention", lambda *args, **options: attention(*args, **options) * 1.01)
    bench = PretendGpu(torch.device("cpu"), seconds=1000)
    (cell,) = bench.section("decode", decode_section.run, decode_section.TINY[:1], reserve=0)
    assert cell["status"] == "failed" and "us" not in cell
    assert "wrong by 0.01 of its norm" in cell["why"]
