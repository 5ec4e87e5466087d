"""One decode step of a whole model on the CPU: paged against what people use today.

    OMP_NUM_THREADS=1 python -m benchmarks.decode_step [--quick] [--cells 1x512 ...] [--dtypes float32 bfloat16]

A random Llama of SmolLM2-135M's shape (30 layers, 9/3 heads of 64, vocabulary of 8192). The others are transformers'
DynamicCache in eager mode and compiled, and its StaticCache with 64 spare tokens, compiled. All steps take turns; a
cell where a form's logits are further from the exact ones than eager's (by more than a quarter) is not timed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import paged_inductor
from paged_inductor.runtime import SiteSpec, manager
from paged_inductor.tensor import PagedTensor
from paged_inductor.tensor.append import store
from paged_inductor.tensor.handle import plain

from .harness import alternate, median_ms, ratio, save

CELLS = [(1, 512), (1, 2048), (1, 8192), (4, 512), (4, 2048), (4, 8192), (16, 512), (16, 2048)]
SPARE = 64
LAYERS = 30


def make_model(dtype: torch.dtype, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=8192,
        max_position_embeddings=16384,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def random_caches(batch: int, context: int, dtype: torch.dtype, layers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    shape = (batch, 3, context, 64)
    return [(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) for _ in range(layers)]


def dynamic(tensors: list[tuple[Any, Any]], config: LlamaConfig) -> DynamicCache:
    cache = DynamicCache(config=config)
    for layer, (key, value) in enumerate(tensors):
        cache.update(key.clone(), value.clone(), layer)
    return cache


def static(tensors: list[tuple[Any, Any]], config: LlamaConfig) -> StaticCache:
    cache = StaticCache(config=config, max_cache_len=tensors[0][0].shape[2] + SPARE)
    for layer, (key, value) in enumerate(tensors):
        cache.update(key, value, layer)
    return cache


def paged(tensors: list[tuple[Any, Any]], config: LlamaConfig, stored_as: torch.dtype | None = None) -> DynamicCache:
    """A DynamicCache of handles, as a paged prefill would have left it. stored_as: see `SiteSpec`."""
    batch, _, context, _ = tensors[0][0].shape
    dtype = tensors[0][0].dtype
    spec = tuple(SiteSpec(3, 64, dtype, torch.device("cpu"), key, stored_as) for key in (True, False))
    step = manager().create(manager().group(spec * len(tensors), 16), batch, context, "benchmark")
    cache = DynamicCache(config=config)
    for i, pair in enumerate(tensors):
        for j, tensor in enumerate(pair):
            store(step, 2 * i + j, tensor, context)
        cache.update(pair[0][:, :, :1], pair[1][:, :, :1], i)
        cache.layers[i].keys = PagedTensor(step.view, plain(2 * i))
        cache.layers[i].values = PagedTensor(step.view, plain(2 * i + 1))
    return cache


def stepper(model: Callable[..., Any], cache: Any, token: torch.Tensor) -> Callable[[], torch.Tensor]:
    name = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=token, use_cache=True, **{name: cache}).logits

    return step


class Contestants:
    """The model in its four forms. Compiled ones are kept from cell to cell, as a service would."""

    def __init__(self, dtype: torch.dtype, layers: int) -> None:
        self.eager = make_model(dtype, layers)
        self.layers, self.dtype = layers, dtype
        self.compiled = torch.compile(copy.deepcopy(self.eager))
        self.static = torch.compile(copy.deepcopy(self.eager))
        self.paged = paged_inductor.page(copy.deepcopy(self.eager), label="paged")

    def steps(self, batch: int, context: int) -> tuple[dict[str, Callable[[], torch.Tensor]], torch.Tensor]:
        """A step of each contestant, and the logits of the first one in float32."""
        tensors = random_caches(batch, context, self.dtype, self.layers)
        token = torch.randint(0, 8192, (batch, 1))
        config = self.eager.config
        exact = copy.deepcopy(self.eager).float()
        truth = stepper(exact, dynamic([(k.float(), v.float()) for k, v in tensors], config), token)()
        del exact
        return {
            "eager": stepper(self.eager, dynamic(tensors, config), token),
            "compiled": stepper(self.compiled, dynamic(tensors, config), token),
            "static": stepper(self.static, static(tensors, config), token),
            "paged": stepper(self.paged, paged(tensors, config), token),
        }, truth


def error(logits: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative error, root mean square."""
    return ((logits.float() - truth).norm() / truth.norm()).item()


def run(contestants: Contestants, batch: int, context: int, rounds: int) -> dict[str, Any]:
    steps, truth = contestants.steps(batch, context)
    errors = {name: error(step(), truth) for name, step in steps.items()}
    # Rounding differs from form to form: each may be a quarter further from the exact logits than eager is.
    equal = all(value <= max(1e-5, 1.25 * errors["eager"]) for value in errors.values())
    cell: dict[str, Any] = {"batch": batch, "context": context, "equal": equal}
    cell["error"] = {name: float(f"{value:.3g}") for name, value in errors.items()}
    cell["dtype"] = str(contestants.dtype).removeprefix("torch.")
    if equal:
        times = alternate(steps, rounds, warmup=3)
        best = min(("eager", "compiled", "static"), key=lambda name: median_ms(times[name]))
        cell["ratio"] = round(ratio(times, "paged", best), 3)
        cell["best"] = best
        cell |= {f"{name}_ms": round(median_ms(values), 2) for name, values in times.items()}
    return cell


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="2 layers, the smallest cell, nothing saved")
    parser.add_argument("--cells", nargs="*", default=[f"{b}x{c}" for b, c in CELLS])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 32  # for the others: as many variants as they like
    results = []
    for name in options.dtypes:
        torch._dynamo.reset()
        contestants = Contestants(getattr(torch, name), 2 if options.quick else LAYERS)
        for cell in options.cells[:1] if options.quick else options.cells:
            batch, context = map(int, cell.split("x"))
            results.append(run(contestants, batch, context, options.rounds))
            print(*(f"{key}={value}" for key, value in results[-1].items()), flush=True)
            gc.collect()
            paged_inductor.trim()
        del contestants
    if not options.quick:
        print(save("decode_step", results, layers=LAYERS, rounds=options.rounds))


if __name__ == "__main__":
    main()
