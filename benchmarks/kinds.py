"""One decode step with the other kinds of caches: static ones of four times the context, and sliding windows.

    OMP_NUM_THREADS=1 python -m benchmarks.kinds [--quick]

Static: transformers' StaticCache with room for four times the tokens that it holds, dense and paged, beside a paged
DynamicCache. Window: a model with a window of 512 tokens, after 1,024 and after 8,192 tokens; "all kept" is a
DynamicCache that does not know of the window, so that only the mask says so. The model is that of `decode_step`.
"""

from __future__ import annotations

import argparse
import copy
import gc
from typing import Any

import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, StaticCache

import paged_inductor

from .decode_step import LAYERS, dynamic, error, make_model, paged, random_caches, stepper
from .harness import alternate, median_ms, ratio, save

STATIC_CELLS = [(1, 8192), (4, 2048)]
WINDOW, CONTEXTS = 512, (1024, 8192)


def static(tensors: list[tuple[Any, Any]], config: Any) -> StaticCache:
    cache = StaticCache(config=config, max_cache_len=4 * tensors[0][0].shape[2])
    for layer, (key, value) in enumerate(tensors):
        cache.update(key, value, layer)
    return cache


def static_cell(batch: int, context: int, layers: int, rounds: int) -> dict[str, Any]:
    model = make_model(torch.float32, layers)
    config = model.config
    tensors = random_caches(batch, context, torch.float32, layers)
    token = torch.randint(0, 8192, (batch, 1))
    ours = paged_inductor.page(copy.deepcopy(model), label="paged")
    steps = {
        "dynamic": stepper(model, dynamic(tensors, config), token),
        "static": stepper(model, static(tensors, config), token),
        "paged dynamic": stepper(ours, paged(tensors, config), token),
    }
    before = paged_inductor.stats().bytes_used
    buffers = static(tensors, config)
    steps["paged static"] = stepper(ours, buffers, token)
    truth = steps["dynamic"]()
    errors = {name: error(step(), truth) for name, step in list(steps.items())[1:]}
    for _ in range(3):
        steps["paged static"]()  # adopted, captured anew, then with dynamic sizes
    held = paged_inductor.stats().bytes_used - before
    cell = {
        "case": "static",
        "batch": batch,
        "context": context,
        "capacity": 4 * context,
        "equal": max(errors.values()) < 1e-4,
        "held_over_tokens": round(held / (batch * context * layers * 2 * 3 * 64 * 4), 3),
    }
    if cell["equal"]:
        times = alternate(steps, rounds, warmup=3)
        cell["ratio"] = round(ratio(times, "paged static", "paged dynamic"), 3)
        cell["dense_ratio"] = round(ratio(times, "static", "dynamic"), 3)
        cell |= {f"{name}_ms": round(median_ms(values), 2) for name, values in times.items()}
    return cell


def window_model(layers: int) -> MistralForCausalLM:
    llama = make_model(torch.float32, layers)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(llama.config, name) for name in (*names, "vocab_size", "max_position_embeddings")}
    model = MistralForCausalLM(MistralConfig(**sizes, head_dim=64, sliding_window=WINDOW)).eval()
    model.load_state_dict(llama.state_dict())
    return model


def filled(model: MistralForCausalLM, context: int, all_kept: bool) -> DynamicCache:
    """A cache after `context` tokens, read in pieces."""
    cache = DynamicCache() if all_kept else DynamicCache(config=model.config)
    tokens = torch.randint(0, 8192, (1, context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for piece in tokens.split(512, dim=1):
            model(piece, past_key_values=cache, use_cache=True)
    return cache


def window_cell(all_kept: bool, layers: int, rounds: int) -> dict[str, Any]:
    model = window_model(layers)
    ours = paged_inductor.page(copy.deepcopy(model), label="window")
    token = torch.randint(0, 8192, (1, 1))
    steps, equal = {}, True
    for context in CONTEXTS:
        dense = filled(model, context, all_kept)
        handles = filled(ours, context, all_kept)
        steps[f"dense {context}"] = stepper(model, dense, token)
        steps[f"paged {context}"] = stepper(ours, handles, token)
        equal &= error(steps[f"paged {context}"](), steps[f"dense {context}"]()) < 1e-4
    cell: dict[str, Any] = {"case": "window, all kept" if all_kept else "window", "window": WINDOW, "equal": equal}
    if equal:
        times = alternate(steps, rounds, warmup=3)
        long, short = CONTEXTS[1], CONTEXTS[0]
        cell["ratio"] = round(ratio(times, f"paged {long}", f"paged {short}"), 3)
        cell["dense_ratio"] = round(ratio(times, f"dense {long}", f"dense {short}"), 3)
        cell |= {f"{name}_ms": round(median_ms(values), 2) for name, values in times.items()}
    return cell


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="2 layers, the smallest cell, nothing saved")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    layers = 2 if options.quick else LAYERS
    results = []
    for batch, context in STATIC_CELLS[1:] if options.quick else STATIC_CELLS:
        results.append(static_cell(batch, context, layers, options.rounds))
        print(*(f"{key}={value}" for key, value in results[-1].items()), flush=True)
        gc.collect()
        paged_inductor.trim()
    for all_kept in (False, True):
        torch._dynamo.reset()
        results.append(window_cell(all_kept, layers, options.rounds))
        print(*(f"{key}={value}" for key, value in results[-1].items()), flush=True)
        gc.collect()
    if not options.quick:
        print(save("kinds", results, layers=layers, rounds=options.rounds))


if __name__ == "__main__":
    main()
