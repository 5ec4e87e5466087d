"""Models of transformers: unmodified `generate`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor

from .architectures import Architecture
from .case import Run, Subject, random_tokens

BATCH, PROMPT, TURN = 2, 7, 5


class Generation(Subject):
    """cache: "DynamicCache" or "StaticCache". attention: "sdpa", "eager", or None for the model's default."""

    def __init__(self, architecture: Architecture, cache: str = "DynamicCache", attention: str | None = None) -> None:
        self.architecture, self.cache, self.attention = architecture, cache, attention

    def build(self) -> Any:
        return self.architecture.build(self.attention)

    def run(self, model: Any, mode: str, new_tokens: int) -> Run:
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}
        if self.cache == "StaticCache":
            options["past_key_values"] = self._static(model, mode, PROMPT + TURN + 2 * new_tokens)
        if mode == "beams":
            options["num_beams"] = 3
        inputs = self._inputs(mode)
        caches: list[Any] = []  # as the model returns them: Whisper's `generate` takes its result apart
        hook = model.register_forward_hook(lambda *call: caches.append(call[-1].past_key_values))
        out = model.generate(**inputs, **options)
        if mode == "second turn":
            options["past_key_values"] = out.past_key_values
            tokens = torch.cat([out.sequences, random_tokens(BATCH, TURN, 2)], 1)
            inputs = {**inputs, "decoder_input_ids": tokens} if "decoder_input_ids" in inputs else {"input_ids": tokens}
            out = model.generate(**inputs, **options)
        hook.remove()
        return Run(out.sequences, _tensors(caches[-1]))

    def sensitivity(self, model: Any) -> float:
        options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        inputs = self._inputs("greedy")
        out = model.generate(**inputs, **options, max_new_tokens=14)
        if self.architecture.kind == "decoder":
            inputs = {"input_ids": out.sequences}
        else:
            inputs["decoder_input_ids"] = out.sequences
        logits = []
        for change in (0.0, 1.0):
            cache = copy.deepcopy(out.past_key_values)
            for tensor in _tensors(getattr(cache, "self_attention_cache", cache)):
                tensor[:, :, 0] += change * torch.randn(tensor[:, :, 0].shape, generator=_generator(3))
            step = model.generate(**inputs, **options, max_new_tokens=1, past_key_values=cache)
            logits.append(step.logits[0])
        return (logits[0] - logits[1]).abs().max().item()

    def _inputs(self, mode: str) -> dict[str, Any]:
        padding = torch.ones(BATCH, PROMPT, dtype=torch.long)
        if self.architecture.kind == "speech":
            features = torch.randn(BATCH, 8, 40, generator=_generator(1))
            if mode == "padded":
                features[0, :, 30:] = 0
            return {"input_features": features}
        if mode == "padded" and self.architecture.kind == "decoder":
            padding[0, :3] = 0
        elif mode == "padded":
            padding[0, -3:] = 0
        return {"input_ids": random_tokens(BATCH, PROMPT, 1) * padding, "attention_mask": padding}

    def _static(self, model: Any, mode: str, length: int) -> Any:
        cache = transformers.StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)
        if self.architecture.kind == "decoder":
            return cache
        encoded = 20 if self.architecture.kind == "speech" else PROMPT
        cross = transformers.StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=encoded)
        return transformers.EncoderDecoderCache(cache, cross)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tensors(cache: Any) -> list[Tensor]:
    """K and V of all layers; of an encoder-decoder's cache, those of both."""
    if isinstance(cache, transformers.EncoderDecoderCache):
        return _tensors(cache.self_attention_cache) + _tensors(cache.cross_attention_cache)
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
