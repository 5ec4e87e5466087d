"""`python -m paged_inductor ab`: one generation, dense and paged, side by side."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from . import ConfigurationError, explain, page, stats
from ._amounts import size
from .compare import Generation, first_difference, generate, percentile

__all__ = ["ab"]


def ab(options: argparse.Namespace) -> int:
    """Run the comparison. Returns 0 if the tokens are equal, 1 if not, 2 if the model cannot be loaded."""
    try:
        model, tokenizer = _load(options)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    texts = [_chat(tokenizer, prompt) for prompt in options.prompt]
    encoded = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1)
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    settings: dict[str, Any] = {"max_new_tokens": options.tokens, "num_beams": options.beams, "do_sample": False}
    print("dense ...", flush=True)
    dense = _timed(model, inputs, settings)
    page(model, inner=options.inner)
    print("paged (the first run compiles) ...", flush=True)
    paged = _timed(model, inputs, settings)
    start = inputs["input_ids"].shape[1]
    for left, right in zip(dense.tokens, paged.tokens):
        _beside(*(tokenizer.decode(row[start:], skip_special_tokens=True) for row in (left, right)))
    _row("", "dense", "paged")
    _row("KV KiB held", *(f"{side.kv_bytes / 1024:.0f}" for side in (dense, paged)))
    for percent in (50, 95):
        _row(
            f"ms/token P{percent}",
            *(f"{percentile(side.watch.milliseconds, percent):.1f}" for side in (dense, paged)),
        )
    _row("copied on write", "-", str(stats().copies_on_write))
    print(str(explain(model)).splitlines()[-1])
    where = first_difference(dense.tokens, paged.tokens)
    print("tokens: equal" if where is None else f"tokens: DIFFERENT from row {where[0]}, position {where[1]} on")
    print(_meaning(dense.kv_bytes, paged.kv_bytes, len(texts) * options.beams))
    return 0 if where is None else 1


def _meaning(dense: int, paged: int, sequences: int) -> str:
    """What the bytes held say, in a line."""
    if paged < dense:
        return f"pages hold {size(dense - paged)} less ({1 - paged / dense:.0%}): what sequences share is there once"
    if sequences == 1:
        return "one sequence alone saves nothing, and has a partly filled block: try --beams 4, or several --prompt"
    return "nothing is saved here: the sequences share no full block; longer prompts and --beams do"


def _load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its tokenizer. Raises `ConfigurationError` if there is none, or it cannot be loaded."""
    folder = Path(options.model)
    if not folder.is_dir() and (folder.is_absolute() or options.model.startswith((".", "~"))):
        raise ConfigurationError(f"--model {options.model}: there is no such folder")
    if folder.is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are there: nothing to ask a server for
        files = sorted(file.name for file in folder.glob("*.gguf"))
        if options.gguf and options.gguf not in files:
            raise ConfigurationError(
                f"--gguf {options.gguf}: {folder} has no such file; its GGUF files are: {', '.join(files) or 'none'}"
            )
        if files and not options.gguf and not (folder / "config.json").exists():
            raise ConfigurationError(f"the weights in {folder} are in GGUF: add --gguf {files[0]}")
    try:
        return _load_with_transformers(options)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error}: this command needs pip install 'paged-inductor[hf]'") from error
    except (OSError, ValueError, ImportError) as error:
        why = " ".join(str(error).split())
        raise ConfigurationError(
            f"--model {options.model} cannot be loaded: give the folder of a causal language model of transformers, "
            f"with its config.json, weights and tokenizer, and --gguf FILE if the weights are in GGUF ({why})"
        ) from error


def _load_with_transformers(options: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": options.gguf} if options.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left", **source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, **source)
    return model.eval(), tokenizer


def _chat(tokenizer: Any, prompt: str) -> str:
    """The prompt as a chat turn, if the model has a chat template."""
    if not tokenizer.chat_template:
        return prompt
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)


def _timed(model: Any, inputs: dict[str, torch.Tensor], settings: dict[str, Any]) -> Generation:
    """The second of two equal runs, so that neither compiling nor first-time allocation counts."""
    generate(model, inputs, **settings)
    return generate(model, inputs, **settings)


def _beside(left: str, right: str) -> None:
    width = max(30, (shutil.get_terminal_size().columns - 3) // 2)
    columns = [[line for part in text.splitlines() for line in textwrap.wrap(part, width)] for text in (left, right)]
    for a, b in zip_longest(*columns, fillvalue=""):
        print(f"{a:{width}} | {b}")
    print()


def _row(name: str, *cells: str) -> None:
    print(f"{name:18}" + "".join(f"{cell:>14}" for cell in cells))
