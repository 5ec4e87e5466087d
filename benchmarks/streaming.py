"""The first step of a turn behind a swapped cache: layers that come back while it runs, against all of them first.

    OMP_NUM_THREADS=1 python -m benchmarks.streaming [--quick]

A random Llama of SmolLM2-135M's shape, compiled, with a cache of random tokens in float32 and a prompt of several
tokens behind it. In turn, it is swapped out, and comes back before the clock starts; before the step begins; and while
the step runs. From memory, from a file that is not in memory, and from the page cache.
The logits of all three must be equal, bit by bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import paged_inductor
from paged_inductor import configure
from paged_inductor.runtime import Manager, View, manager

from .decode_step import LAYERS, make_model, paged, random_caches
from .harness import save
from .swapping import TIERS

WAYS = ("in place", "all first", "streamed")


def _all_first(self: Manager, lacking: Sequence[View], views: Sequence[View], later: Any) -> bool:
    """In the place of `Manager._brought_back`."""
    self._bring_back(lacking)
    return False


class Turn:
    """A cache, and the first step of a turn behind it."""

    def __init__(self, model: Any, tier: str, context: int, prompt: int, layers: int) -> None:
        option = "swap_host" if tier == "host" else "swap_disk"
        configure(**{"swap_host": 0, "swap_disk": 0, option: "8GiB"})
        self.model, self.tier, self.prompt = model, tier, prompt
        self.cache = paged(random_caches(1, context, torch.float32, layers), model.config)
        self.ids = torch.randint(0, 8192, (1, prompt))

    def swap_out(self) -> int:
        """Bytes that left, and will come from where `tier` says."""
        runtime = manager()
        group = self.cache.layers[0].keys._view.group
        with runtime.locked():
            blocks = runtime.swap.out(group, 10**6, ())
        if self.tier == "disk":
            (extent,) = runtime.swap.storage._blocks
            file = extent._file.fileno()  # type: ignore[attr-defined]
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return blocks * group.block_bytes

    def step(self, way: str) -> tuple[float, torch.Tensor]:
        """Seconds of the step, and its logits. The cache is cropped again, so that all are alike."""
        self.swap_out()  # also where it comes back before the clock starts: processors' caches are as cold then
        if way == "in place":
            view = self.cache.layers[0].keys._view
            with manager().using(view):
                pass
        brought_back = _all_first if way == "all first" else Manager._brought_back
        with mock.patch.object(Manager, "_brought_back", brought_back):
            start = time.perf_counter()
            out = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            seconds = time.perf_counter() - start
        self.cache.crop(-self.prompt)
        manager().swap.storage._disk._closer.submit(lambda: None).result()  # the file that was read is closed
        return seconds, out.logits


def first_steps(model: Any, tier: str, context: int, prompt: int, layers: int, rounds: int) -> dict[str, Any]:
    turn = Turn(model, tier, context, prompt, layers)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    expected = turn.step("in place")[1]
    for _ in range(rounds + 1):
        for way in WAYS:
            seconds, logits = turn.step(way)
            assert torch.equal(logits, expected), f"other logits: {way}"
            times[way].append(seconds)
    size = turn.swap_out()
    added = {way: [a - b for a, b in zip(times[way][1:], times["in place"][1:])] for way in WAYS[1:]}
    return {
        "tier": tier,
        "MiB": size >> 20,
        "context": context,
        "prompt": prompt,
        "streamed_over_all_first": _ratio(times["streamed"], times["all first"]),
        "all_first_over_in_place": _ratio(times["all first"], times["in place"]),
        "streamed_over_in_place": _ratio(times["streamed"], times["in place"]),
        "added_ms_all_first": round(statistics.median(added["all first"]) * 1e3, 1),
        "added_ms_streamed": round(statistics.median(added["streamed"]) * 1e3, 1),
        "in_place_ms": round(statistics.median(times["in place"][1:]) * 1e3, 1),
    }


def _ratio(times: list[float], others: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(times[1:], others[1:])), 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="little data, nothing saved")
    options = parser.parse_args()
    layers, context, prompts, rounds = (2, 512, (16,), 2) if options.quick else (LAYERS, 8192, (16, 128), 9)
    model = make_model(torch.float32, layers)
    paged_inductor.page(model)
    cells = []
    with torch.no_grad():
        for prompt in prompts:
            for tier in TIERS:
                cells.append(first_steps(model, tier, context, prompt, layers, rounds))
                print(*(f"{key}={value}" for key, value in cells[-1].items()), flush=True)
                paged_inductor.trim()
    configure(swap_host=None, swap_disk=0)
    if not options.quick:
        print(save("streaming", cells, load=os.getloadavg()))


if __name__ == "__main__":
    main()
