"""Tiny random models of transformers whose attention is written by hand: dense tokens, and every step reads pages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import paged_inductor

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # large and untied: logits differ clearly from token to token
    "pad_token_id": 0,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
SIZES = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["full_attention"] * 2,
}


def gemma2() -> transformers.PreTrainedModel:
    config = transformers.Gemma2Config(
        **SIZES, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=None
    )
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss() -> transformers.PreTrainedModel:
    config = transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.GptOssForCausalLM(config)


def bloom() -> transformers.PreTrainedModel:
    config = transformers.BloomConfig(**COMMON, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config)


def falcon() -> transformers.PreTrainedModel:
    config = transformers.FalconConfig(**COMMON, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)
    return transformers.FalconForCausalLM(config)


def t5() -> transformers.PreTrainedModel:
    """Its bias is learned, its scores are not scaled, and the encoder's keys are attended to, too."""
    options = {name: value for name, value in COMMON.items() if name != "initializer_range"}
    config = transformers.T5Config(
        **options,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        initializer_factor=3.0,
        decoder_start_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "gemma2": (gemma2, "by hand: softcap 2"),
    "gpt_oss": (gpt_oss, "by hand: sinks"),
    "bloom": (bloom, "by hand"),
    "falcon": (falcon, "by hand"),
    "t5": (t5, "by hand"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_the_dense_models_and_steps_read_pages(name: str) -> None:
    torch.manual_seed(0)
    make, form = MODELS[name]
    model = make().eval()
    pads = slice(-3, None) if name == "t5" else slice(3)  # an encoder's prompt is padded on its right
    prompt = torch.randint(1, 97, (2, 7))
    mask = torch.ones_like(prompt)
    mask[0, pads] = 0
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "output_scores": True}
    expected = model.generate(prompt, return_dict_in_generate=True, **options)
    paged = paged_inductor.page(copy.deepcopy(model), inner="eager")
    got = paged.generate(prompt, return_dict_in_generate=True, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.scores, expected.scores):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    sites = paged_inductor.explain(paged).sites
    assert sum(site.form.startswith("append") for site in sites) == 4
    for site in sites:
        assert (site.attention, site.paged, site.reason) == (form, True, "")
