"""All rows of the table."""

from __future__ import annotations

from functools import partial

from tests.models.static_zoo import FORMS

from .architectures import ARCHITECTURES, Architecture
from .case import MODES, Case
from .hf import Generation
from .packages import LitGPT, TorchTune, XTransformers
from .small import Small

FEWER = ("greedy", "padded", "second turn")


def _transformers() -> list[Case]:
    cases = []
    for architecture in ARCHITECTURES:
        make = partial(Generation, architecture)
        modes = MODES if architecture.kind == "decoder" else MODES[:3]
        cases.append(Case("transformers", architecture.name, "DynamicCache", make, modes))
        if architecture.static:
            static = partial(make, cache="StaticCache")
            cases.append(Case("transformers", architecture.name, "StaticCache", static, _fewer(architecture)))
        if architecture.eager:
            eager = partial(make, attention="eager")
            cases.append(Case("transformers", architecture.name, "eager attention", eager, _fewer(architecture)))
    return cases


def _fewer(architecture: Architecture) -> tuple[str, ...]:
    return FEWER if architecture.kind == "decoder" else FEWER[:2]


def _packages() -> list[Case]:
    capped = partial(LitGPT, attention_logit_softcapping=50.0)
    window = partial(LitGPT, sliding_window_size=12, sliding_window_indices=[1, 0])
    both = ("greedy", "padded")
    return [
        Case("litgpt", "Llama-like", "KVCache buffers", LitGPT, ("greedy",)),
        Case("litgpt", "soft-capped scores", "KVCache buffers", capped, ("greedy",)),
        Case("litgpt", "sliding and full layers", "KVCache buffers", window, ("greedy",)),
        Case("torchtune", "Llama 3", "KVCache buffers", TorchTune, both),
        Case("x-transformers", "decoder", "cat", XTransformers, both),
        Case("x-transformers", "decoder, flash", "cat", partial(XTransformers, attn_flash=True), both),
        Case("x-transformers", "decoder, rotary", "cat", partial(XTransformers, rotary_pos_emb=True), both),
        Case(
            "x-transformers",
            "decoder, flash, GQA",
            "cat",
            partial(XTransformers, attn_flash=True, attn_kv_heads=2),
            both,
        ),
        Case("x-transformers", "decoder, ALiBi", "cat", partial(XTransformers, alibi_pos_bias=True), both),
    ]


def _small() -> list[Case]:
    kinds = {
        "functional-index-copy": "caches in and out",
        "stacked-cat": "one tensor [L, 2, B, H, S, D]",
        "nanogpt": "none",
    }
    return [
        Case(
            "",
            form.name,
            kinds.get(form.name, f"buffers {form.layout}"),
            partial(Small, form),
            ("greedy", "second turn"),
        )
        for form in FORMS
    ]


CASES = (*_transformers(), *_packages(), *_small())
