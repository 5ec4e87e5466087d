"""Tiny random configurations of the models of transformers, as data.

Heads are untied, and all matrices drawn anew with a large deviation: a tiny model with its standard initialisation
repeats one token, whatever its cache holds. Windows are short enough to fill up within a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCABULARY = 97
WINDOW = 12


@dataclass(frozen=True)
class Architecture:
    """config, model: classes of transformers. options: of the configuration. kind: "decoder", "encoder-decoder" or
    "speech". deviation, seed: of the weights. varied: no two tokens may follow each other twice, for models whose
    tokens would soon repeat. static: whether it takes a StaticCache. eager: whether hand-written attention is an
    option, and not the default.
    """

    name: str
    config: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "decoder"
    deviation: float = 0.3
    seed: int = 0
    varied: bool = False
    static: bool = True
    eager: bool = True

    def build(self, attention: str | None = None) -> Any:
        """The model, the same at each call. attention: "sdpa", "eager" or None for the model's default."""
        torch.manual_seed(self.seed)
        config = getattr(transformers, self.config)(**self.options)
        if attention is not None:
            config._attn_implementation = attention
        model = getattr(transformers, self.model)(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=self.deviation)
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None
        model.generation_config.no_repeat_ngram_size = 2 if self.varied else 0
        return model.requires_grad_(False)


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SIZES: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
WITH_HEAD_DIM = {**GROUPED, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING_AND_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
ENCODER_DECODER = {
    **COMMON,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}

ARCHITECTURES = (
    Architecture("Llama", "LlamaConfig", "LlamaForCausalLM", GROUPED),
    Architecture("Mistral", "MistralConfig", "MistralForCausalLM", {**WITH_HEAD_DIM, "sliding_window": WINDOW}),
    Architecture("Mixtral", "MixtralConfig", "MixtralForCausalLM", {**GROUPED, **EXPERTS}),
    Architecture("Qwen2", "Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    Architecture("Qwen3", "Qwen3Config", "Qwen3ForCausalLM", WITH_HEAD_DIM),
    Architecture("Gemma", "GemmaConfig", "GemmaForCausalLM", {**WITH_HEAD_DIM, "num_key_value_heads": 1}),
    Architecture(
        "Gemma 2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**WITH_HEAD_DIM, **SLIDING_AND_FULL, "query_pre_attn_scalar": 8},
    ),
    Architecture(
        "Gemma 3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**WITH_HEAD_DIM, **SLIDING_AND_FULL, "query_pre_attn_scalar": 8},
    ),
    Architecture("Phi-3", "Phi3Config", "Phi3ForCausalLM", GROUPED),
    Architecture(
        "GPT-2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    ),
    Architecture("GPT-NeoX", "GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES, seed=4),
    Architecture("Falcon", "FalconConfig", "FalconForCausalLM", SIZES, deviation=0.5),
    Architecture(
        "Falcon, ALiBi",
        "FalconConfig",
        "FalconForCausalLM",
        {**SIZES, "alibi": True, "new_decoder_architecture": False, "multi_query": False},
        deviation=0.5,
        seed=5,
        static=False,  # it builds ALiBi for the prompt's length
    ),
    Architecture(
        "BLOOM", "BloomConfig", "BloomForCausalLM", {**COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4}, seed=2
    ),
    Architecture(
        "MPT",
        "MptConfig",
        "MptForCausalLM",
        {**COMMON, "d_model": 32, "n_layers": 2, "n_heads": 4, "use_cache": True, "max_seq_len": 256},
        deviation=0.5,
        varied=True,
    ),
    Architecture(
        "OPT",
        "OPTConfig",
        "OPTForCausalLM",
        {
            **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
        },
    ),
    Architecture(
        "DeepSeek-V3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    Architecture(
        "gpt-oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **WITH_HEAD_DIM,
            **SLIDING_AND_FULL,
            **EXPERTS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    Architecture(
        "T5",
        "T5Config",
        "T5ForConditionalGeneration",
        {
            **COMMON,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 1,
        },
        "encoder-decoder",
        varied=True,
    ),
    Architecture(
        "BART",
        "BartConfig",
        "BartForConditionalGeneration",
        {**ENCODER_DECODER, "max_position_embeddings": 256, "forced_eos_token_id": None},
        "encoder-decoder",
        deviation=0.5,
        seed=2,
        varied=True,
    ),
    Architecture(
        "Whisper",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **ENCODER_DECODER,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 128,
            "begin_suppress_tokens": None,
        },
        "speech",
    ),
)
