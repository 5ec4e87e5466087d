"""How long the passes take, against what torch.compile itself takes for the same graphs.

    OMP_NUM_THREADS=1 python -m benchmarks.pass_time [--layers 32]

A Llama of 32 small layers reads a prompt and makes two steps, once compiled by torch.compile as it is, and once paged.
All of Inductor's caches are off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor_config
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import paged_inductor

from .harness import save


def make_model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=97)).eval()


def seconds(model: Callable[..., Any], cache: Any) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        for length in (7, 1, 1):
            model(torch.ones(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    cells = []
    with inductor_config.patch(force_disable_caches=True):
        for kind in ("dynamic", "static"):

            def make_cache(config: Any, kind: str = kind) -> Any:
                return (
                    DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=64)
                )

            plain = make_model(options.layers)
            config = plain.config
            torch._dynamo.reset()
            dense = seconds(torch.compile(plain), make_cache(config))
            torch._dynamo.reset()
            model = paged_inductor.page(make_model(options.layers), label=kind)
            total = seconds(model, make_cache(config))
            graphs = paged_inductor.explain(model).graphs
            passes = sum(took for graph in graphs for _, _, took in graph.passes)
            cells.append(
                {
                    "cache": kind,
                    "ratio": round(passes / dense, 4),
                    "passes_s": round(passes, 3),
                    "torch_compile_s": round(dense, 1),
                    "paged_total_s": round(total, 1),
                    "graphs": len(graphs),
                }
            )
            print(*(f"{key}={value}" for key, value in cells[-1].items()), flush=True)
    print(save("pass_time", cells, layers=options.layers))


if __name__ == "__main__":
    main()
