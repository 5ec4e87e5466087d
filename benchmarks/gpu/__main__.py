"""Test and measure the kernels on a GPU; under 8 minutes on an H200.

    python -m benchmarks.gpu [--minutes 7.5] [--skip-tests] [--out FOLDER]
    TRITON_INTERPRET=1 python -m benchmarks.gpu --tiny       every line of it on a CPU, nothing measured

Writes gpu.json and gpu.png to FOLDER, by default benchmarks/results. The exit status is 1 if a test or a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from paged_inductor.kernels.launch import INTERPRETED

from ..harness import RESULTS, machine
from . import decode, loops, peers, prefill
from .bench import Bench, Cell
from .goals import verdicts
from .plot import draw

ROOT = Path(__file__).parents[2]

# name, how a case is run, the cases and their tiny stand-ins, seconds to leave for what comes after
SECTIONS: list[tuple[str, Callable[[Any, Bench], Cell], Sequence[Any], Sequence[Any], float]] = [
    ("decode", decode.run, decode.CASES, decode.TINY, 230),
    ("prefill", prefill.run, prefill.CASES, prefill.TINY, 190),
    ("shared", decode.run_shared, decode.SHARED, decode.TINY_SHARED, 180),
    ("loops", loops.run, loops.CASES, loops.TINY, 60),
    ("peers", peers.run, peers.CASES, peers.TINY, 10),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="The kernels on a GPU.")
    parser.add_argument("--tiny", action="store_true", help="tiny cases in Triton's interpreter, nothing measured")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for everything (default: %(default)s)")
    parser.add_argument("--skip-tests", action="store_true", help="do not run the GPU tests first")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    options = parser.parse_args(arguments)
    if options.tiny and not INTERPRETED:
        print("--tiny runs kernels on the CPU: set TRITON_INTERPRET=1")
        return 2
    if not options.tiny and (INTERPRETED or not torch.cuda.is_available()):
        print("there is no GPU here, or TRITON_INTERPRET is set: unset it on a machine with a GPU, or give --tiny")
        return 2
    bench = Bench(torch.device("cpu" if options.tiny else "cuda"), options.minutes * 60)
    tests = "not run" if options.tiny or options.skip_tests else run_tests(bench)
    print(f"tests: {tests}", flush=True)
    bench.copy_bandwidth = decode.copy_bandwidth(bench)
    cells: list[Cell] = []
    for name, run, cases, tiny, reserve in SECTIONS:
        cells += bench.section(name, run, tiny if options.tiny else cases, 0 if options.tiny else reserve)
    goals = verdicts(cells)
    for goal in goals:
        least = "" if goal["least"] is None else f"{goal['least']:.2f}"
        print(f"{goal['verdict']:13} {goal['goal']:42} {least:>6} (goal: at least {goal['wanted']})")
    folder = options.out or (Path.cwd() if options.tiny else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"machine": {**machine(), **device_facts(bench)}, "tests": tests, "goals": goals, "cells": cells}
    (folder / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(cells, result["machine"]["gpu"] or "no GPU", folder / "gpu.png")
    print(folder / "gpu.json")
    return int("failed" in tests or any(cell["status"] == "failed" for cell in cells))


def run_tests(bench: Bench) -> str:
    """The last line of the GPU tests' output; they may take a third of the time."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=bench.left / 3, check=False
        )
    except subprocess.TimeoutExpired:
        return "failed: out of time"
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    return ("" if done.returncode == 0 else "failed: ") + (lines[-1] if lines else "no output")


def device_facts(bench: Bench) -> dict[str, Any]:
    """What a reader needs to judge figures of a GPU."""
    facts: dict[str, Any] = {"triton": triton.__version__, "copy_gb_s": None}
    if bench.tiny:
        return facts
    properties = torch.cuda.get_device_properties(bench.device)
    facts |= {
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "processors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda or torch.version.hip,
        "copy_gb_s": round((bench.copy_bandwidth or 0) / 1e9, 1),
    }
    return facts


if __name__ == "__main__":
    sys.exit(main())
