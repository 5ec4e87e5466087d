"""Sliding-window layers: the dense model's tokens, and no more blocks than the window needs, however long it runs."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import paged_inductor

from .test_transformers import MODES, SIZES

WINDOW = 20


def mistral() -> transformers.PreTrainedModel:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=WINDOW)
    )


def gemma3() -> transformers.PreTrainedModel:
    """Window and global layers in turn."""
    config = transformers.Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    )
    return transformers.Gemma3ForCausalLM(config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [mistral, gemma3])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_equal_and_blocks_behind_the_window_are_freed(make, mode: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    prompt = torch.randint(1, 97, (2, 7))
    new_tokens = 60
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, **MODES[mode]}
    expected = model.generate(prompt, **options)
    before = paged_inductor.stats()
    paged = paged_inductor.page(copy.deepcopy(model), inner="eager", label=f"{make.__name__} {mode}")
    out = paged.generate(prompt, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, expected)
    stats = paged_inductor.stats()
    assert stats.dense_fallbacks == before.dense_fallbacks
    assert stats.materializations == before.materializations
    layer = out.past_key_values.layers[0]
    assert isinstance(layer.keys, paged_inductor.PagedTensor)
    assert layer.keys.shape[2] == WINDOW - 1
    view = layer.keys._view
    assert all(len(row.blocks) <= -(-(WINDOW - 1) // 16) + 1 for row in view.rows)
    if make is gemma3:
        assert out.past_key_values.layers[1].keys._view.length == 7 + new_tokens - 1
    assert all(site.paged and not site.reason for site in paged_inductor.explain(paged).sites)


def test_a_prompt_longer_than_the_window_is_freed_by_the_next_step() -> None:
    torch.manual_seed(0)
    model = paged_inductor.page(mistral().eval(), inner="eager")
    tokens = torch.randint(1, 97, (1, 150))
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        assert cache.layers[0].keys.shape[2] == WINDOW - 1
        for _ in range(2):
            model(tokens[:, :1], past_key_values=cache)
    assert [len(row.blocks) for row in cache.layers[0].keys._view.rows] == [2]
