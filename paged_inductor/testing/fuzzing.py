"""`fuzz(model)`: drawn loops on the model, dense and paged, until one differs; and `replay` for one loop."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from torch import nn

from .._errors import PagedInductorError
from .loops import Loop
from .player import CacheOperationError, Step
from .script import write_script
from .sides import Different, Generate, make_sides, page_options
from .strategies import import_hypothesis, loops

__all__ = ["FuzzFailure", "fuzz", "replay"]


class FuzzFailure(PagedInductorError, AssertionError):
    """Paged and dense differ. loop: the smallest loop found to fail. reason: how. script: the path of a Python script
    that reproduces it; `str()` shows its text."""

    def __init__(self, reason: str, loop: Loop, script: str = "", text: str = ""):
        where = f"\n\nThis script reproduces it ({script}):\n\n{text}" if script else ""
        super().__init__(f"{reason}\nwith {loop}{where}")
        self.reason, self.loop, self.script = reason, loop, script


def fuzz(
    model: nn.Module,
    *,
    step: Step | None = None,
    generate: Generate | None = None,
    vocab_size: int | None = None,
    padded: bool | None = None,
    sequence_dim: int = 2,
    max_batch: int = 3,
    max_prompt: int = 24,
    max_new_tokens: int = 8,
    max_operations: int = 6,
    max_examples: int = 25,
    seed: int = 0,
    shrink_seconds: float = 60.0,
    tolerance: float | None = None,
    options: Mapping[str, Any] | None = None,
    folder: str | None = None,
) -> None:
    """Draw loops and run each on a dense and on a paged copy of `model`; returns if logits and tokens always agree.

    The copies share the model's weights, are in eval mode, and need no gradients; `model` itself is never run, and
    stays as it was. A loop is a batch of prompts and operations on its cache (`Greedy`, `Feed`, `Reorder`, …).

    step: how the model is called (see `Step`); by default as a transformers model, or as `model(tokens, cache)`.
    generate: a loop of your own, `generate(model, tokens, mask) -> tokens`, to run in place of drawn operations.
    vocab_size: by default that of the model's config or first embedding. padded: whether rows of a batch have unequal
    lengths; by default only for transformers models. sequence_dim: of the tensors in a plain cache, for cropping.
    max_…: bounds of what is drawn. seed: the same seed draws the same loops. shrink_seconds: how long a failing loop
    may be made smaller. tolerance: of logits, as a share of the largest; by default 1e-3 for float32. Half precision
    rounds so much that small faults hide: prefer float32.
    options: for `page`; by default those of `model` if it is paged, else {"inner": "eager"}. folder: where a failure's
    script and weights are saved; by default a new temporary folder.

    Raises `FuzzFailure` with the smallest failing loop and a script that reproduces it; `MissingExtraError` without
    Hypothesis; whatever the model raises when it runs dense. Loops whose cache operations the model's cache class does
    not know are passed over.
    """
    hypothesis = import_hypothesis()
    sides, padded = make_sides(model, step, generate, vocab_size, padded, sequence_dim, tolerance, options)
    known: dict[Loop, str] = {}
    failing: list[tuple[Loop, str]] = []
    deadline = math.inf
    operations = 0 if generate is not None else max_operations
    drawn = loops(sides.vocab_size, max_batch, max_prompt, padded, max_new_tokens, operations)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=max_examples,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(drawn)
    def agree(loop: Loop) -> None:
        nonlocal deadline
        if loop not in known and time.monotonic() < deadline:
            try:
                known[loop] = sides.differing(loop)
            except CacheOperationError:
                hypothesis.reject()
        reason = known.get(loop, "")
        if reason:
            deadline = min(deadline, time.monotonic() + shrink_seconds)
            failing.append((loop, reason))
            raise Different(reason)

    try:
        agree()
    except (Different, hypothesis.errors.Flaky):
        loop, reason = failing[-1]
        call = {
            "step": step,
            "generate": generate,
            "vocab_size": sides.vocab_size,
            "sequence_dim": sequence_dim,
            "tolerance": tolerance,
            "options": page_options(model, options),
        }
        path, text = write_script(sides.dense, loop, call, reason, folder)
        raise FuzzFailure(reason, loop, path, text) from None


def replay(
    model: nn.Module,
    loop: Loop,
    *,
    step: Step | None = None,
    generate: Generate | None = None,
    vocab_size: int | None = None,
    sequence_dim: int = 2,
    tolerance: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Run one loop on a dense and on a paged copy of `model`. Arguments and errors as for `fuzz`."""
    sides, _ = make_sides(model, step, generate, vocab_size, None, sequence_dim, tolerance, options)
    reason = sides.differing(loop)
    if reason:
        raise FuzzFailure(reason, loop)
