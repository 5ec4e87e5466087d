"""`fuzz(model)`: drawn loops on the model, dense and paged, until one differs; and `replay` for one loop."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import ConfigurationError, PagedInductorError
from ..difference import TOLERANCES, difference
from ..monitor import check_integrity, stats
from ..patch import is_paged, page, unpage
from .loops import Loop
from .player import CacheOperationError, Player, Step, default_step
from .script import write_script
from .strategies import import_hypothesis, loops

__all__ = ["FuzzFailure", "fuzz", "replay"]

Generate = Callable[[Any, Tensor, Tensor], Tensor]
"""A loop of the user's own: `generate(model, tokens, mask)` returns the tokens of all rows."""


class FuzzFailure(PagedInductorError, AssertionError):
    """Paged and dense differ. loop: the smallest loop found to fail. reason: how. script: the path of a Python script
    that reproduces it; `str()` shows its text."""

    def __init__(self, reason: str, loop: Loop, script: str = "", text: str = ""):
        where = f"\n\nThis script reproduces it ({script}):\n\n{text}" if script else ""
        super().__init__(f"{reason}\nwith {loop}{where}")
        self.reason, self.loop, self.script = reason, loop, script


@dataclass(frozen=True)
class _Sides:
    """The same model dense and paged, and how both are called and compared."""

    dense: nn.Module
    paged: nn.Module
    step: Step
    generate: Generate | None
    vocab_size: int
    sequence_dim: int
    tolerance: float | None

    def differing(self, loop: Loop) -> str:
        """How the paged side differs in a loop, or "". Raises what the dense side raises."""
        before = stats().blocks_used
        with torch.no_grad():
            reason = self._in_loop(loop) if self.generate is None else self._in_generate(self.generate, loop)
        if not reason and stats().blocks_used > before:
            gc.collect()  # compilers leave caches of their first call in reference cycles
            left = stats().blocks_used - before
            reason = f"{left} blocks are still in use after the loop has dropped all its caches" if left > 0 else ""
        return reason

    def _in_generate(self, generate: Generate, loop: Loop) -> str:
        tokens, mask = loop.batch(next(self.dense.parameters(), torch.empty(0)).device)
        wanted = generate(self.dense, tokens, mask)
        try:
            got = generate(self.paged, tokens, mask)
            check_integrity()
        except Exception as error:
            return f"the paged run raised {type(error).__name__}: {error}"
        return "" if torch.equal(got, wanted) else f"tokens {got.tolist()} where dense gives {wanted.tolist()}"

    def _in_loop(self, loop: Loop) -> str:
        seen: list[tuple[Tensor, Tensor]] = []

        def remember(place: str, logits: Tensor, mask: Tensor) -> Tensor:
            seen.append((logits, logits[:, -1].argmax(-1, keepdim=True)))
            return seen[-1][1]

        Player(self.dense, self.step, self.vocab_size, self.sequence_dim, remember).play(loop)
        calls = iter(seen)

        def compare(place: str, logits: Tensor, mask: Tensor) -> Tensor:
            wanted, chosen = next(calls)
            fault = difference(logits[mask.bool()], wanted[mask.bool()], self._tolerance(wanted.dtype))
            if fault is not None:
                got = logits[:, -1].argmax(-1).tolist()
                raise _Different(
                    f"{place}: logits differ by {fault.largest:.3g} (paged and dense: {fault.note}), where "
                    f"{fault.allowed:.3g} is allowed; next tokens {got}, dense {chosen.flatten().tolist()}"
                )
            return chosen  # both sides go on with the same tokens, also where two are equally likely

        try:
            Player(self.paged, self.step, self.vocab_size, self.sequence_dim, compare).play(loop)
            check_integrity()
        except _Different as error:
            return str(error)
        except Exception as error:
            return f"the paged run raised {type(error).__name__}: {error}"
        return ""

    def _tolerance(self, dtype: torch.dtype) -> float:
        """Rounding grows through the layers: ten times what one tensor may differ by, unless the user knows better."""
        return min(0.2, 10 * TOLERANCES.get(dtype, 0.0)) if self.tolerance is None else self.tolerance


class _Different(Exception):
    """Ends the paged run at the first difference."""


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
    max_…: bounds of what is drawn. seed: the same seed draws the same loops. tolerance: of logits, as a share of the
    largest; by default 1e-3 for float32. Half precision rounds so much that small faults hide: prefer float32.
    options: for `page`; by default those of `model` if it is paged, else {"inner": "eager"}. folder: where a failure's
    script and weights are saved; by default a new temporary folder.

    Raises `FuzzFailure` with the smallest failing loop and a script that reproduces it; `MissingExtraError` without
    Hypothesis; whatever the model raises when it runs dense. Loops whose cache operations the model's cache class does
    not know are passed over.
    """
    hypothesis = import_hypothesis()
    sides, padded = _sides(model, step, generate, vocab_size, padded, sequence_dim, tolerance, options)
    failing: list[tuple[Loop, str]] = []
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
        try:
            reason = sides.differing(loop)
        except CacheOperationError:
            hypothesis.reject()
        if reason:
            failing.append((loop, reason))
            raise _Different(reason)

    try:
        agree()
    except (_Different, hypothesis.errors.Flaky):
        loop, reason = failing[-1]
        call = {
            "step": step,
            "generate": generate,
            "vocab_size": sides.vocab_size,
            "sequence_dim": sequence_dim,
            "tolerance": tolerance,
            "options": _options(model, options),
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
    sides, _ = _sides(model, step, generate, vocab_size, None, sequence_dim, tolerance, options)
    reason = sides.differing(loop)
    if reason:
        raise FuzzFailure(reason, loop)


def _sides(
    model: nn.Module,
    step: Step | None,
    generate: Generate | None,
    vocab_size: int | None,
    padded: bool | None,
    sequence_dim: int,
    tolerance: float | None,
    options: Mapping[str, Any] | None,
) -> tuple[_Sides, bool]:
    """The two copies; and whether batches are padded."""
    default, takes_padding = default_step(model)
    dense = _copy(model)
    paged = page(_copy(model), **_options(model, options))
    size = vocab_size or _vocab_size(model)
    sides = _Sides(dense, paged, step or default, generate, size, sequence_dim, tolerance)
    return sides, takes_padding if padded is None else padded


def _copy(model: nn.Module) -> nn.Module:
    """An unpaged copy in eval mode that shares the weights (buffers are its own: models write to them)."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    duplicate = copy.deepcopy(model, memo)
    return (unpage(duplicate) if is_paged(duplicate) else duplicate).eval()


def _options(model: Any, options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is not None:
        return dict(options)
    return model.forward.options if is_paged(model) else {"inner": "eager"}


def _vocab_size(model: nn.Module) -> int:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is None:
        size = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if not isinstance(size, int):
        raise ConfigurationError(
            f"fuzz() cannot tell the vocabulary of {type(model).__name__}, which has no config.vocab_size and no "
            "nn.Embedding: pass vocab_size=…, the number of token ids that may be drawn"
        )
    return size
