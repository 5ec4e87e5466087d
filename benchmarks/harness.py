"""What all benchmarks share: paired timing, machine facts, JSON. Ratios first; absolute times are this machine's."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def alternate(calls: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of every call, taken in turn: A B C A B C ... Returns `rounds` times for each name."""
    for _ in range(warmup):
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(times: Mapping[str, list[float]], name: str, other: str) -> float:
    """Median over rounds of one call's time over another's in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[other]))


def median_ms(times: list[float]) -> float:
    return statistics.median(times) * 1e3


def machine() -> dict[str, Any]:
    """Facts that a reader needs to judge the figures."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            model = next(line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux: the platform's own name will do
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": time.strftime("%Y-%m-%d"),
    }


def save(name: str, cells: list[dict[str, Any]], **facts: Any) -> Path:
    """Write results/NAME.json with the machine's facts beside the cells."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **facts, "cells": cells}, indent=1) + "\n")
    return path
