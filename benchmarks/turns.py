"""More conversations than memory holds: what fetching ahead saves, and what steps wait for when threads compete.

    OMP_NUM_THREADS=1 python -m benchmarks.turns [--quick]

A random Llama of SmolLM2-135M's layers (12 of them), eager. *In turn*: a loop goes on with each of six conversations
for a few tokens, under a budget for four; with and without fetching ahead, a round of each in turn. *At once*: twelve
threads generate under a budget for four of them, against the same work one after the other; the percentiles are of
the steps behind the prompts, the slowest of which are those that begin while others' prompts are computed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import DynamicCache

import paged_inductor
from paged_inductor import configure
from paged_inductor.runtime import manager
from paged_inductor.runtime.ahead import Ahead

from .decode_step import make_model
from .harness import save

LAYERS, CONVERSATIONS, ROOM, STEPS, THREADS = 12, 6, 4, 4, 12


def prefill(model: Any, context: int) -> tuple[DynamicCache, torch.Tensor]:
    cache = DynamicCache(config=model.config)
    ids = torch.randint(0, 8192, (1, context))
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache, ids[:, -1:]


def turn(model: Any, cache: DynamicCache, last: torch.Tensor) -> list[float]:
    """A few tokens more; seconds of each step. The cache is cropped again, so that all turns are alike."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=1)
        times.append(time.perf_counter() - start)
    cache.crop(-STEPS)
    return times


def budget(blocks: int) -> None:
    paged_inductor.trim()
    group = manager().groups[-1]
    idle = sum((other.pool.capacity - 1) * other.block_bytes for other in manager().groups if other is not group)
    configure(kv_budget=idle + blocks * group.block_bytes)


def in_turn(model: Any, tier: str, context: int, rounds: int) -> dict[str, Any]:
    configure(**{f"swap_{tier}": "8GiB"})
    conversations = [prefill(model, context) for _ in range(ROOM)]
    budget(ROOM * -(-(context + STEPS + 1) // 16))
    conversations += [prefill(model, context) for _ in range(CONVERSATIONS - ROOM)]
    totals: dict[str, list[float]] = {"ahead": [], "on demand": []}
    firsts: dict[str, list[float]] = {"ahead": [], "on demand": []}
    for _ in range(rounds + 1):
        for name in totals:
            submit = _nothing if name == "on demand" else Ahead._submit
            with mock.patch.object(Ahead, "_submit", submit):
                times = [turn(model, *conversation) for conversation in conversations]
            totals[name].append(sum(map(sum, times)))
            firsts[name].append(statistics.median(each[0] for each in times))
    counters = manager().counters
    result = {
        "tier": tier,
        "context": context,
        "round_ahead_over_on_demand": _ratio(totals, "ahead", "on demand"),
        "first_step_ahead_over_on_demand": _ratio(firsts, "ahead", "on demand"),
        "first_step_ms": round(statistics.median(firsts["on demand"][1:]) * 1e3, 1),
        "fetched_ahead_share": round(counters.swaps_ahead / counters.swaps_in, 2),
    }
    configure(swap_host=None, swap_disk=0, kv_budget=None)
    return result


def _nothing(*args: Any) -> None:
    """In the place of `Ahead._submit`."""


def _ratio(times: dict[str, list[float]], name: str, other: str) -> float:
    return round(statistics.median(a / b for a, b in zip(times[name][1:], times[other][1:])), 3)


def at_once(model: Any, context: int, steps: int) -> dict[str, Any]:
    configure(swap_host="8GiB")

    decode: list[float] = []  # seconds of each step but the prompts'

    def work() -> None:
        with torch.no_grad():
            cache, last = prefill(model, context)
            for _ in range(steps):
                start = time.perf_counter()
                model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=1)
                decode.append(time.perf_counter() - start)

    work()
    budget(ROOM * -(-(context + steps + 1) // 16))
    start = time.perf_counter()
    for _ in range(THREADS):
        work()
    alone = time.perf_counter() - start
    manager().counters.clear()
    decode.clear()
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = time.perf_counter() - start
    cuts = statistics.quantiles(decode, n=100)
    swapped = manager().counters.swaps_in
    configure(swap_host=None, kv_budget=None)
    return {
        "threads": THREADS,
        "budget_for": ROOM,
        "time_over_one_after_the_other": round(together / alone, 2),
        **{f"step_p{percent}_ms": round(cuts[percent - 1] * 1e3, 1) for percent in (50, 95, 99)},
        "one_after_the_other_step_ms": round(alone / THREADS / (steps + 1) * 1e3, 1),
        "blocks_swapped_in": swapped,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="little data, nothing saved")
    options = parser.parse_args()
    context, rounds, steps = (256, 2, 8) if options.quick else (2048, 9, 64)
    model = make_model(torch.float32, LAYERS)
    paged_inductor.page(model, inner="eager")
    cells = []
    with torch.no_grad():
        for tier in ("host", "disk"):
            paged_inductor.reset()
            cells.append(in_turn(model, tier, context, rounds))
            print(*(f"{key}={value}" for key, value in cells[-1].items()), flush=True)
    paged_inductor.reset()
    cells.append(at_once(model, context // 4, steps))
    print(*(f"{key}={value}" for key, value in cells[-1].items()), flush=True)
    if not options.quick:
        print(save("turns", cells))


if __name__ == "__main__":
    main()
