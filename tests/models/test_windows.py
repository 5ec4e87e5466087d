"""Sliding-window layers: the dense model's tokens, and no more blocks than the window needs, however long it runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import paged_inductor
from benchmarks.coverage.architectures import ARCHITECTURES, WINDOW

MODELS = {architecture.name: architecture for architecture in ARCHITECTURES}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "padded": {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
}
NEW_TOKENS = 50


def blocks(cache: Any, layer: int) -> list[int]:
    return [len(row.blocks) for row in cache.layers[layer].keys._view.rows]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Mistral", "Gemma 3"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_equal_and_blocks_behind_the_window_are_freed(name: str, mode: str) -> None:
    """Gemma 3 has window and global layers in turn."""
    model = MODELS[name].build("sdpa")
    torch.manual_seed(0)
    prompt = torch.randint(1, 97, (2, 7))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **MODES[mode]}
    expected = model.generate(prompt, **options)
    before = paged_inductor.stats()
    paged = paged_inductor.page(copy.deepcopy(model), inner="eager", label=f"{name} {mode}")
    out = paged.generate(prompt, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, expected)
    stats = paged_inductor.stats()
    assert stats.dense_fallbacks == before.dense_fallbacks
    assert stats.materializations == before.materializations
    cache = out.past_key_values
    assert isinstance(cache.layers[0].keys, paged_inductor.PagedTensor)
    assert cache.layers[0].keys.shape[2] == (WINDOW if mode == "static" else WINDOW - 1)
    assert max(blocks(cache, 0)) <= -(-WINDOW // 16) + 1
    if name == "Gemma 3":
        assert max(blocks(cache, 1)) == -(-(7 + NEW_TOKENS - 1) // 16)
    assert all(site.paged and not site.reason for site in paged_inductor.explain(paged).sites)


@pytest.mark.filterwarnings("ignore")
def test_a_prompt_longer_than_the_window_is_freed_by_the_next_step() -> None:
    model = paged_inductor.page(MODELS["Mistral"].build("sdpa"), inner="eager")
    tokens = torch.randint(1, 97, (1, 150))
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        assert cache.layers[0].keys.shape[2] == WINDOW - 1
        assert blocks(cache, 0) == [-(-150 // 16)]
        for _ in range(2):
            model(tokens[:, :1], past_key_values=cache)
    assert blocks(cache, 0) == [2]  # tokens 128 .. 151, of which 141 .. 151 are seen
