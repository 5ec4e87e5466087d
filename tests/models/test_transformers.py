"""Tiny random models of transformers: unmodified `generate` gives the dense model's tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import paged_inductor

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # large and untied: logits differ clearly from token to token
    "pad_token_id": 0,
    "eos_token_id": None,
}


def llama() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def deepseek_v3() -> transformers.PreTrainedModel:
    """Its router scatters in place, and throws the result of the call away."""
    config = transformers.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )
    return transformers.DeepseekV3ForCausalLM(config)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "padded": {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])},
    "beams": {"num_beams": 3},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [llama, deepseek_v3])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_the_dense_models(make: Any, mode: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    prompt = torch.randint(1, 97, (2, 7))
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **MODES[mode]}
    expected = model.generate(prompt, **options)
    paged = paged_inductor.page(copy.deepcopy(model), inner="eager")
    out = paged.generate(prompt, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, expected)
    for layer in out.past_key_values.layers:
        assert isinstance(layer.keys, paged_inductor.PagedTensor)
        assert isinstance(layer.values, paged_inductor.PagedTensor)
    assert paged_inductor.stats().dense_fallbacks == 0
