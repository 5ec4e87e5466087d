"""Decode attention alone on the CPU: pages against dense SDPA with the GQA group packed into the query length.

    OMP_NUM_THREADS=1 python -m benchmarks.attention_cpu [--quick]

Both read K and V of several layers in turn, so that data comes from memory. A case whose outputs differ is not timed.
The last cell times pages against pages: rows of unequal length, and equal ones of as many tokens (no outputs to check).
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_inductor import ops
from paged_inductor.runtime import Schedule, SiteSpec, manager
from paged_inductor.tensor.append import store
from paged_inductor.tensor.derive import merge
from paged_inductor.tensor.materialize import step_plan

from .harness import alternate, median_ms, ratio, save


@dataclass(frozen=True)
class Case:
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    batch: int
    context: int


CASES = [
    Case(hq, hkv, d, dtype, batch, context)
    for (hq, hkv, d), dtype, (batch, context) in itertools.product(
        ((9, 3, 64), (32, 8, 128)),
        (torch.float32, torch.bfloat16),
        ((1, 512), (4, 512), (16, 512), (1, 2048), (4, 2048), (16, 2048), (1, 8192), (4, 8192)),
    )
]
RAGGED = [8192, *[512] * 15]  # one long row among short ones: an eighth of the tokens of 16 rows as long as the longest


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The best dense form on the CPU: the query heads of a KV head are the rows of one matrix product."""
    batch, heads_kv, _, head_dim = k.shape
    return F.scaled_dot_product_attention(q.view(batch, heads_kv, -1, head_dim), k, v).view(q.shape)


def ragged(rounds: int, layers: int = 4) -> dict[str, object]:
    """Rows of unequal length against equal ones with as many tokens in all: cost must follow live tokens."""
    torch.manual_seed(0)
    spec = tuple(SiteSpec(3, 64, torch.float32, torch.device("cpu"), key) for key in (True, False)) * layers
    runtime = manager()
    group = runtime.group(spec, 16)
    queries = [torch.randn(16, 9, 1, 64) for _ in range(layers)]
    calls, views = {}, []
    for name, lengths in (("ragged", RAGGED), ("even", [sum(RAGGED) // 16] * 16)):
        rows = []
        for length in lengths:
            step = runtime.create(group, 1, length, "benchmark")
            for site in range(2 * layers):
                store(step, site, torch.randn(1, 3, length, 64), length)
            rows.append(step.view)
        view = merge(rows, [0] * 16)
        views.append(view)
        plan = step_plan(view, decodes=True)

        def call(plan: ops.StepPlan = plan) -> None:
            with torch.no_grad():
                for i, q in enumerate(queries):
                    ops.attention(q, group.arenas[2 * i], group.arenas[2 * i + 1], plan, scale=0.125)

        calls[name] = call
    times = alternate(calls, rounds)
    cell = {"case": "ragged", "lengths": "1x8192 + 15x512", "even": sum(RAGGED) // 16}
    return {**cell, "ratio": round(ratio(times, "ragged", "even"), 3)}


def paged_layers(case: Case, tensors: list[tuple[Tensor, Tensor]]) -> tuple[Schedule, list[Tensor], object]:
    """Pages holding the layers' K and V, in blocks that are scattered over a third more than they need."""
    spec = [SiteSpec(case.heads_kv, case.head_dim, case.dtype, torch.device("cpu"), key) for key in (True, False)]
    runtime = manager()
    group = runtime.group(tuple(spec * len(tensors)), 16)
    context = tensors[0][0].shape[2]
    spare = [runtime.create(group, 1, 16, "spare").view for _ in range(case.batch * context // 16 * 4 // 3)]
    order = torch.randperm(len(spare)).tolist()
    for i in order:
        spare[i] = None  # type: ignore[call-overload]  # freed in random order: the next blocks are scattered
    step = runtime.create(group, case.batch, context, "benchmark")
    for i, pair in enumerate(tensors):
        for j, tensor in enumerate(pair):
            store(step, 2 * i + j, tensor, context)
    return runtime.schedule(step.view), group.arenas, step.view


def run(case: Case, rounds: int, layers: int) -> dict[str, object]:
    torch.manual_seed(0)
    shape = (case.batch, case.heads_kv, case.context, case.head_dim)
    tensors = [(torch.randn(shape).to(case.dtype), torch.randn(shape).to(case.dtype)) for _ in range(layers)]
    queries = [torch.randn(case.batch, case.heads_q, 1, case.head_dim).to(case.dtype) for _ in range(layers)]
    schedule, arenas, view = paged_layers(case, tensors)
    scale = case.head_dim**-0.5

    plan = ops.plan_step(
        schedule.block_table, schedule.seq_lens, case.context, 1, 16, schedule.num_chunks, schedule.row_chunks
    )  # once per step, for all layers

    def paged() -> list[Tensor]:
        with torch.no_grad():
            return [
                ops.attention(q, arenas[2 * i], arenas[2 * i + 1], plan, scale=scale) for i, q in enumerate(queries)
            ]

    def packed() -> list[Tensor]:
        with torch.no_grad():
            return [dense(q, k, v) for q, (k, v) in zip(queries, tensors)]

    tolerance = 2e-2 if case.dtype == torch.bfloat16 else 1e-4
    equal = all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(paged(), packed()))
    cell: dict[str, object] = {**asdict(case), "dtype": str(case.dtype).removeprefix("torch."), "equal": equal}
    if equal:
        times = alternate({"paged": paged, "dense": packed}, rounds)
        cell["ratio"] = round(ratio(times, "paged", "dense"), 3)
        cell["paged_ms"] = round(median_ms(times["paged"]) / layers, 4)
        cell["dense_ms"] = round(median_ms(times["dense"]) / layers, 4)
    del view
    return cell


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few rounds, small cases, nothing saved")
    parser.add_argument("--only", type=int, nargs="*", help="case numbers")
    options = parser.parse_args()
    cells = []
    cases = CASES
    if options.quick:
        cases = [case for case in cases if case.batch * case.context <= 4096]
    if options.only is not None:
        cases = [CASES[i] for i in options.only]
    for case in cases:
        torch._dynamo.reset()
        manager().forget_unused()
        live = case.batch * case.context * case.heads_kv * case.head_dim * case.dtype.itemsize * 2
        cell = run(case, 7 if options.quick else 21, max(2, min(12, 512 * 2**20 // live)))
        print(*(f"{key}={value}" for key, value in cell.items()), flush=True)
        cells.append(cell)
    if options.only is None:
        manager().forget_unused()
        cells.append(ragged(7 if options.quick else 21))
        print(*(f"{key}={value}" for key, value in cells[-1].items()), flush=True)
    if not options.quick and options.only is None:
        print(save("attention_cpu", cells))


if __name__ == "__main__":
    main()
