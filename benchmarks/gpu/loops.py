"""Whole generation loops: a model's forward, step by step, with its cache in pages and as others keep it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

import paged_inductor

from .bench import Bench, Cell, ratio, require_close

__all__ = ["CASES", "TINY", "Case", "run"]


@dataclass(frozen=True)
class Case:
    """A random Llama of a known model's shape with fewer layers: `tokens` steps after a prompt."""

    shape: str
    layers: int
    batch: int
    prompt: int
    tokens: int
    dtype: str = "bfloat16"


SHAPES = {  # hidden, intermediate, heads, KV heads
    "SmolLM2-135M": (576, 1536, 9, 3),
    "Llama-3-8B": (4096, 14336, 32, 8),
    "tiny": (32, 32, 4, 2),
}
CASES = [
    Case("Llama-3-8B", 4, 8, 4096, 64),
    Case("SmolLM2-135M", 8, 1, 1024, 64),
]
TINY = [Case("tiny", 1, 2, 9, 3, "float32")]
VOCABULARY = 4096


def make_model(case: Case, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, heads, kv_heads = SHAPES[case.shape]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=case.prompt + case.tokens + 8,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM(config).to(getattr(torch, case.dtype)).eval()


def dynamic_cache(model: Any, case: Case) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def static_cache(model: Any, case: Case) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=case.prompt + case.tokens + 8)


def static_graphs(model: Any) -> Callable[..., Any]:
    """Steps in CUDA graphs and prompts without, as `generate` does it with a StaticCache: a prompt that is not compiled
    marks the cache's tensors as staying where they are."""
    step = torch.compile(model, mode="reduce-overhead")
    return lambda input_ids, **inputs: (step if input_ids.shape[1] == 1 else model)(input_ids=input_ids, **inputs)


def forms(bench: Bench) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any, Case], Any]]]:
    """How each contestant treats a copy of the model, and makes its cache."""
    if bench.tiny:
        return {
            "eager": (lambda model: model, dynamic_cache),
            "paged": (lambda model: paged_inductor.page(model, inner="eager"), dynamic_cache),
            "paged_static": (lambda model: paged_inductor.page(model, inner="eager"), static_cache),
        }
    return {
        "eager": (lambda model: model, dynamic_cache),
        "paged": (lambda model: paged_inductor.page(model, mode="reduce-overhead"), dynamic_cache),
        "paged_static": (lambda model: paged_inductor.page(model, mode="reduce-overhead"), static_cache),
        "static_graphs": (static_graphs, static_cache),
        "compiled": (torch.compile, dynamic_cache),
    }


def run(case: Case, bench: Bench) -> Cell:
    """Milliseconds a step of every contestant; those whose logits differ from eager's are not timed."""
    base = make_model(case, bench.device)
    prompt = torch.randint(0, VOCABULARY, (case.batch, case.prompt), device=bench.device)
    script = torch.randint(0, VOCABULARY, (case.tokens, case.batch, 1), device=bench.device)
    logits: dict[str, Tensor] = {}
    times: dict[str, float] = {}
    cell: Cell = {}
    for name, (prepare, make_cache) in forms(bench).items():
        if bench.left < 60 and not bench.tiny:
            cell[f"{name}_why"] = "out of time"
            continue
        try:
            model = prepare(copy.deepcopy(base))
            generate(model, base, make_cache, case, prompt, script)  # compiles
            logits[name], times[name] = generate(model, base, make_cache, case, prompt, script)
            if name != "eager":
                require_close(logits[name], logits["eager"], 5e-2 if case.dtype == "bfloat16" else 1e-4)
        except Exception as error:
            if bench.tiny:
                raise
            times.pop(name, None)
            cell[f"{name}_why"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        torch._dynamo.reset()
    if bench.tiny:
        return {"equal": sorted(logits)}
    cell |= {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in times.items()}
    cell |= {
        f"{name}_over_paged": ratio(times.get(name), times.get("paged")) for name in forms(bench) if name != "paged"
    }
    cell["static_graphs_over_paged_static"] = ratio(times.get("static_graphs"), times.get("paged_static"))
    return cell


def generate(
    model: Any,
    base: Any,
    make_cache: Callable[[Any, Case], Any],
    case: Case,
    prompt: Tensor,
    script: Tensor,
) -> tuple[Tensor, float]:
    """Feed the prompt, then the tokens of `script` one by one; returns the last logits and the median time of a step.

    The tokens are given, not chosen from the logits: rounding may then not lead contestants apart.
    """
    cache = make_cache(base, case)
    name = "cache" if "cache" in inspect.signature(type(base).forward).parameters else "past_key_values"
    synchronize = torch.cuda.synchronize if prompt.is_cuda else contextlib.nullcontext
    times = []
    with torch.no_grad():
        out = model(input_ids=prompt, use_cache=True, **{name: cache})
        for token in script:
            synchronize()
            start = time.perf_counter()
            out = model(input_ids=token, use_cache=True, **{name: cache})
            synchronize()
            times.append(time.perf_counter() - start)
    return out.logits[:, -1].float().clone(), statistics.median(times)
