"""What loops of transformers do to caches besides stepping: the dense model's tokens, and nothing materialised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import paged_inductor
from benchmarks.coverage.architectures import ARCHITECTURES

MODELS = {architecture.name: architecture for architecture in ARCHITECTURES}


def tokens(batch: int, length: int, seed: int) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def prompt_lookup(model: Any) -> Tensor:
    repeated = tokens(1, 5, 1).repeat(1, 6)
    return model.generate(repeated, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=4)


def assisted(model: Any) -> Tensor:
    """With a draft model that shares nothing but its weights."""
    draft = copy.deepcopy(model)
    return model.generate(tokens(1, 9, 1), max_new_tokens=30, do_sample=False, assistant_model=draft)


def beams_sampled(model: Any) -> Tensor:
    torch.manual_seed(5)
    options = {"do_sample": True, "num_beams": 3, "num_return_sequences": 2}
    return model.generate(tokens(2, 9, 1), max_new_tokens=20, **options)


def next_turn(model: Any) -> Tensor:
    """One cache, two calls of `generate`."""
    first = model.generate(tokens(2, 9, 1), max_new_tokens=14, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([first.sequences, tokens(2, 4, 2)], 1)
    return model.generate(more, max_new_tokens=14, do_sample=False, past_key_values=first.past_key_values)


def _users(model: Any, cache: Any) -> Tensor:
    prompt = tokens(1, 20, 1)
    with torch.no_grad():
        model(prompt, past_key_values=cache, use_cache=True)
    answers = []
    copies = [copy.deepcopy(cache) for _ in range(3)]
    for i, own in enumerate(copies):
        question = torch.cat([prompt, torch.full((1, 2), 5 + i)], 1)
        answers.append(model.generate(question, max_new_tokens=10, do_sample=False, past_key_values=own))
    return torch.cat(answers)


def users(model: Any) -> Tensor:
    """A prefilled cache, copied for each user."""
    return _users(model, transformers.DynamicCache(config=model.config))


def users_static(model: Any) -> Tensor:
    return _users(model, transformers.StaticCache(config=model.config, max_cache_len=64))


def repeated_and_selected(model: Any) -> Tensor:
    """Rows of a cache are repeated, go their ways, and some are selected."""
    prompt = tokens(1, 20, 1)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(3)
        question = torch.cat([prompt.repeat(3, 1), tokens(3, 2, 2)], 1)
        out = [model.generate(question, max_new_tokens=8, do_sample=False, past_key_values=cache)[[2, 0]]]
        cache.batch_select_indices(torch.tensor([2, 0]))
        token = torch.tensor([[3], [4]])
        for _ in range(4):
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
            out.append(token)
    return torch.cat(out, 1)


def static_reset(model: Any) -> Tensor:
    """One StaticCache for one conversation after the other."""
    cache, out = transformers.StaticCache(config=model.config, max_cache_len=64), []
    for seed in (1, 2):
        prompt = tokens(2, 9 + seed, seed)
        out.append(model.generate(prompt, max_new_tokens=12, do_sample=False, past_key_values=cache)[:, -12:])
        cache.reset()
    assert all(int(layer.keys.count_nonzero()) == 0 for layer in cache.layers)
    return torch.cat(out)


def static_made_before(model: Any) -> Tensor:
    """Its dense buffers exist before the first call."""
    config = model.config
    cache = transformers.StaticCache(config=config, max_cache_len=64)
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache.early_initialization(2, heads, dim, torch.float32, torch.device("cpu"))
    out = model.generate(tokens(2, 9, 1), max_new_tokens=14, do_sample=False, past_key_values=cache)
    if paged_inductor.patch.is_paged(model):
        assert all(isinstance(layer.keys, paged_inductor.PagedTensor) for layer in cache.layers)
    return out


def static_rewound(model: Any) -> Tensor:
    """Cropped after a try, and tried again."""
    cache, out = transformers.StaticCache(config=model.config, max_cache_len=64), []
    with torch.no_grad():
        logits = model(tokens(1, 12, 1), past_key_values=cache, use_cache=True).logits
        for shift in range(3):
            token = logits[:, -1:].argmax(-1)
            for _ in range(5):
                token = (model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1) + shift) % 97
                out.append(token)
            cache.crop(-5)
    return torch.cat(out, 1)


LOOPS = [
    prompt_lookup,
    assisted,
    beams_sampled,
    next_turn,
    users,
    users_static,
    repeated_and_selected,
    static_reset,
    static_made_before,
    static_rewound,
]
CASES = [("Mistral", loop) for loop in LOOPS] + [("Llama", loop) for loop in (users_static, static_rewound)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "loop"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_loop(name: str, loop: Callable[[Any], Tensor]) -> None:
    model = MODELS[name].build("sdpa")
    expected = loop(model)
    before = paged_inductor.stats()
    paged = paged_inductor.page(copy.deepcopy(model), inner="eager")
    assert torch.equal(loop(paged), expected)
    after = paged_inductor.stats()
    assert after.dense_fallbacks == before.dense_fallbacks
    counted = {name: count for name, count in after.materializations.items() if "nonzero" not in name}
    assert counted == {name: count for name, count in before.materializations.items() if "nonzero" not in name}
    paged_inductor.check_integrity()
