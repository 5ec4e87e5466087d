"""Host work of a decode step: everything that this package does around the compiled graph, Dynamo's guards aside.

    OMP_NUM_THREADS=1 python -m benchmarks.host_step [--quick]

The graph itself is replaced by nothing: what is left is preparing the transaction, allocating, updating tables, and
wrapping the results. "bound_us" is a target, not a measurement: 150 us a step, 4 a layer, 2 a row, for any context.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F

import paged_inductor
from paged_inductor.program import PagedProgram
from paged_inductor.runtime import SiteSpec, manager
from paged_inductor.tensor import PagedTensor
from paged_inductor.tensor.append import store
from paged_inductor.tensor.handle import plain

from .harness import save


def decode(past: list[Any], new: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    """A step of `len(past)` layers of which only the caches matter."""
    present = []
    out = new
    for key, value in past:
        key, value = torch.cat([key, new], 2), torch.cat([value, new], 2)
        out = out + F.scaled_dot_product_attention(new, key, value)
        present.append((key, value))
    return present, out


def program_of(layers: int, rows: int, context: int) -> tuple[PagedProgram, list[Any]]:
    """The program that a compiled step runs, and the arguments it was last called with."""
    torch._dynamo.reset()
    spec = tuple(SiteSpec(2, 8, torch.float32, torch.device("cpu"), key) for key in (True, False))
    runtime = manager()
    group = runtime.group(spec * layers, 16)
    step = runtime.create(group, rows, context, "benchmark")
    for site in range(2 * layers):
        store(step, site, torch.randn(rows, 2, context, 8), context)
    past = [(PagedTensor(step.view, plain(2 * i)), PagedTensor(step.view, plain(2 * i + 1))) for i in range(layers)]
    calls: list[tuple[PagedProgram, list[Any]]] = []
    call = PagedProgram.__call__

    def record(self: PagedProgram, *args: Any) -> Any:
        calls.append((self, list(args)))
        return call(self, *args)

    PagedProgram.__call__ = record  # type: ignore[method-assign]
    try:
        compiled = torch.compile(decode, backend="paged_inductor", options={"inner": "eager"})
        with torch.no_grad():
            for _ in range(3):
                past, _ = compiled(past, torch.randn(rows, 2, 1, 8))
    finally:
        PagedProgram.__call__ = call  # type: ignore[method-assign]
    return calls[-1]


def measure(layers: int, rows: int, context: int, steps: int) -> dict[str, Any]:
    program, args = program_of(layers, rows, context)
    positions = [position for plan in program._plans for position, _ in plan.inputs]
    outputs = [output.position for plan in program._plans for output in plan.outputs]
    dense = tuple(torch.zeros(1) for _ in program._dense_outputs)
    program._run = lambda *inputs: dense
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        results = program(*args)
        times.append(time.perf_counter() - start)
        for position, output in zip(positions, outputs):
            args[position] = results[output]
    bound = 150 + 4 * layers + 2 * rows
    median = statistics.median(times) * 1e6
    return {"layers": layers, "rows": rows, "context": context, "us": round(median, 1), "bound_us": bound}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few steps, nothing saved")
    options = parser.parse_args()
    cells = []
    for layers in (30,) if options.quick else (8, 30):
        for rows in (1, 16, 64):
            for context in (512, 8192):
                cells.append(measure(layers, rows, context, 100 if options.quick else 500))
                print(*(f"{key}={value}" for key, value in cells[-1].items()), flush=True)
                paged_inductor.trim()
    if not options.quick:
        print(save("host_step", cells))


if __name__ == "__main__":
    main()
