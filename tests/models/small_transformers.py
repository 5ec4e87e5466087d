"""Models of transformers that are small and random."""

from __future__ import annotations

from typing import Any

import torch


def small(kind: str, **options: Any) -> Any:
    """A model of transformers of two layers, with weights so large that its tokens vary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **options))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)
