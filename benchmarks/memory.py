"""KV bytes held per byte of real tokens, and what static dense caches of the same users would reserve.

    python -m benchmarks.memory

Two hundred users with answers of random length (mean 200 tokens) keep their caches. All figures are ratios to the bytes
of the tokens themselves, which is what caches grown by torch.cat hold when no step runs: "held" are the blocks in use,
"arenas" the memory behind them with the free blocks of geometric growth, and "reserved" a buffer of the longest length
for everyone.
"""

from __future__ import annotations

import random

import torch

import paged_inductor
from paged_inductor.runtime import SiteSpec, manager

from .harness import save


def main() -> None:
    rng = random.Random(0)
    spec = tuple(SiteSpec(3, 64, torch.bfloat16, torch.device("cpu"), key) for key in (True, False)) * 30
    cells = []
    for low, high in ((1, 399), (100, 300), (200, 200)):
        lengths = [rng.randint(low, high) for _ in range(200)]
        group = manager().group(spec, 16)
        views = [manager().create(group, 1, length, "user").view for length in lengths]
        stats = paged_inductor.stats()
        real = sum(lengths) * group.token_bytes
        cell = {
            "lengths": f"{low}..{high}",
            "mean": round(sum(lengths) / len(lengths), 1),
            "held_over_real": round(stats.bytes_used / real, 4),
            "reserved_over_real": round(max(lengths) * len(lengths) * group.token_bytes / real, 3),
            "arenas_over_real": round(stats.bytes_reserved / real, 3),
        }
        print(*(f"{key}={value}" for key, value in cell.items()))
        cells.append(cell)
        del views
        paged_inductor.trim()
    print(save("memory", cells, block_size=16))


if __name__ == "__main__":
    main()
