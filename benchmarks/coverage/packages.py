"""Models of litgpt, torchtune and x-transformers, with the generation loops of these packages.

The packages are imported when a subject is made: one that is not installed is a row that says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Run, Subject, random_tokens

PROMPT = 7


def redrawn(model: nn.Module, deviation: float) -> Any:
    """`model` with all its matrices drawn anew, for inference."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=deviation)
    return model.eval().requires_grad_(False)


def disturb(caches: Iterable[Tensor]) -> None:
    """Change the oldest token of each cache [B, H, S, D]."""
    generator = torch.Generator().manual_seed(3)
    for cache in caches:
        cache[:, :, 0] += torch.randn(cache[:, :, 0].shape, generator=generator)


class LitGPT(Subject):
    """litgpt.GPT, `litgpt.generate.base.generate`: one sequence. options: of `litgpt.Config`."""

    LONGEST = 96

    def __init__(self, **options: Any) -> None:
        import litgpt
        import litgpt.generate.base

        self._package, self._options = litgpt, options

    def build(self) -> Any:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "block_size": self.LONGEST,
            "vocab_size": 97,
            "padded_vocab_size": 97,
            "n_layer": 2,
            "n_head": 4,
            "n_query_groups": 2,
            "n_embd": 32,
            "intermediate_size": 48,
            "rotary_percentage": 1.0,
            "parallel_residual": False,
            "norm_class_name": "RMSNorm",
            "mlp_class_name": "LLaMAMLP",
            "bias": False,
        }
        return redrawn(self._package.GPT(self._package.Config(**{**sizes, **self._options})), 0.3)

    def run(self, model: Any, mode: str, new_tokens: int) -> Run:
        model.set_kv_cache(batch_size=1)
        generate = self._package.generate.base.generate
        tokens = generate(model, random_tokens(1, PROMPT, 1)[0], PROMPT + new_tokens, temperature=0.0)
        return Run(tokens[None], self._caches(model))

    def sensitivity(self, model: Any) -> float:
        run = self.run(model, "greedy", 20)
        end = run.tokens.shape[1] - 1
        logits = [model(run.tokens[:, end:], torch.tensor([end]))]
        disturb(run.caches)
        logits.append(model(run.tokens[:, end:], torch.tensor([end])))
        return (logits[0] - logits[1]).abs().max().item()

    @staticmethod
    def _caches(model: Any) -> list[Tensor]:
        caches = [block.attn.kv_cache for block in model.transformer.h]
        return [tensor for cache in caches for tensor in (cache.k, cache.v)]


class TorchTune(Subject):
    """A decoder of torchtune's llama3 builder, `torchtune.generation.generate`."""

    LONGEST = 96

    def __init__(self) -> None:
        import torchtune.generation
        import torchtune.models.llama3

        self._package = torchtune

    def build(self) -> Any:
        torch.manual_seed(0)
        return redrawn(self._package.models.llama3.llama3(97, 2, 4, 2, 32, self.LONGEST, intermediate_dim=48), 0.3)

    def run(self, model: Any, mode: str, new_tokens: int) -> Run:
        prompt = random_tokens(2, PROMPT, 1)
        if mode == "padded":
            prompt[0, :3] = 0
        model.setup_caches(2, torch.float32, decoder_max_seq_len=self.LONGEST)
        generate = self._package.generation.generate
        tokens, _ = generate(model, prompt, max_generated_tokens=new_tokens, pad_id=0, top_k=1)
        return Run(tokens, self._caches(model))

    def sensitivity(self, model: Any) -> float:
        run = self.run(model, "greedy", 20)
        at = run.tokens.shape[1] - 1
        position = torch.full((2, 1), at)
        mask = (torch.arange(self.LONGEST) <= at).expand(2, 1, -1)
        logits = []
        for _ in range(2):
            logits.append(model(run.tokens[:, -1:], mask=mask, input_pos=position))
            disturb(run.caches)
        return (logits[0] - logits[1]).abs().max().item()

    @staticmethod
    def _caches(model: Any) -> list[Tensor]:
        caches = [layer.attn.kv_cache for layer in model.layers]
        return [tensor for cache in caches for tensor in (cache.k_cache, cache.v_cache)]


class XTransformers(Subject):
    """x_transformers' decoder, its wrapper's own `generate`. options: of `Decoder`. The seed gives varied tokens."""

    SEED = 5

    def __init__(self, **options: Any) -> None:
        import x_transformers

        self._package, self._options = x_transformers, options

    def build(self) -> Any:
        torch.manual_seed(self.SEED)
        layers = self._package.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **self._options)
        net = self._package.TransformerWrapper(num_tokens=97, max_seq_len=256, attn_layers=layers)
        return self._package.AutoregressiveWrapper(redrawn(net, 0.5))

    def paged_part(self, model: Any) -> nn.Module:
        return model.net

    def run(self, model: Any, mode: str, new_tokens: int) -> Run:
        lengths = {"prompt_lens": torch.tensor([PROMPT - 3, PROMPT])} if mode == "padded" else {}
        prompt = random_tokens(2, PROMPT, 1)
        tokens, cache = model.generate(prompt, new_tokens, temperature=0.0, return_intermediates=True, **lengths)
        return Run(torch.cat([prompt, tokens], 1), self._caches(cache))

    def sensitivity(self, model: Any) -> float:
        run = model.generate(random_tokens(2, PROMPT, 1), 20, temperature=0.0, return_intermediates=True)
        tokens, cache = torch.cat([random_tokens(2, PROMPT, 1), run[0]], 1), run[1]
        logits = []
        for _ in range(2):
            logits.append(model.net(tokens, cache=cache, return_intermediates=True)[0][:, -1])
            disturb(self._caches(cache))
        return (logits[0] - logits[1]).abs().max().item()

    @staticmethod
    def _caches(cache: Any) -> list[Tensor]:
        return [tensor for layer in cache.attn_intermediates for tensor in layer.cached_kv]
