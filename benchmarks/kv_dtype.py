"""One decode step with keys and values rounded to 8 bits, against pages that hold them as they are, on the CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.kv_dtype [--quick]

The model is that of `decode_step`, compiled. A cell says by how much the logits differ, too (relative, root mean
square).
"""

from __future__ import annotations

import argparse
import copy
import gc
from typing import Any

import torch

import paged_inductor
from paged_inductor._layout import KV_DTYPES

from .decode_step import LAYERS, error, make_model, paged, random_caches, stepper
from .harness import alternate, median_ms, ratio, save

CELLS = [(1, 2048), (1, 8192), (4, 2048)]


def run(models: dict[str, Any], batch: int, context: int, layers: int, rounds: int) -> list[dict[str, Any]]:
    tensors = random_caches(batch, context, torch.float32, layers)
    token = torch.randint(0, 8192, (batch, 1))
    steps, held = {}, {}
    for name, model in models.items():
        before = paged_inductor.stats().bytes_used
        steps[name] = stepper(model, paged(tensors, model.config, KV_DTYPES.get(name)), token)
        held[name] = paged_inductor.stats().bytes_used - before
    truth = steps["none"]()
    errors = {name: error(step(), truth) for name, step in steps.items()}
    times = alternate(steps, rounds, warmup=3)
    return [
        {
            "kv_dtype": name,
            "batch": batch,
            "context": context,
            "ratio": round(ratio(times, name, "none"), 3),
            "bytes": round(held[name] / held["none"], 3),
            "error": float(f"{errors[name]:.3g}"),
            "ms": round(median_ms(times[name]), 2),
            "none_ms": round(median_ms(times["none"]), 2),
        }
        for name in KV_DTYPES
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="2 layers, the smallest cell, nothing saved")
    options = parser.parse_args()
    layers, rounds = (2, 3) if options.quick else (LAYERS, 15)
    model = make_model(torch.float32, layers)
    models = {"none": paged_inductor.page(copy.deepcopy(model), label="none")}
    models |= {name: paged_inductor.page(copy.deepcopy(model), label=name, kv_dtype=name) for name in KV_DTYPES}
    cells = []
    for batch, context in CELLS[:1] if options.quick else CELLS:
        cells += run(models, batch, context, layers, rounds)
        for cell in cells[-len(KV_DTYPES) :]:
            print(*(f"{key}={value}" for key, value in cell.items()), flush=True)
        gc.collect()
        paged_inductor.trim()
    if not options.quick:
        print(save("kv_dtype", cells, layers=LAYERS, rounds=rounds))


if __name__ == "__main__":
    main()
