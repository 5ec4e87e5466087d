"""A model dense and paged, and one loop on both."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import ConfigurationError
from ..difference import TOLERANCES, difference
from ..monitor import check_integrity, stats
from ..patch import is_paged, page, unpage
from .loops import Loop
from .player import Player, Step, default_step

__all__ = ["Different", "Generate", "Sides", "make_sides", "page_options"]

Generate = Callable[[Any, Tensor, Tensor], Tensor]
"""A loop of the user's own: `generate(model, tokens, mask)` returns the tokens of all rows."""


@dataclass(frozen=True)
class Sides:
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
                raise Different(
                    f"{place}: logits differ by {fault.largest:.3g} (paged and dense: {fault.note}), where "
                    f"{fault.allowed:.3g} is allowed; next tokens {got}, dense {chosen.flatten().tolist()}"
                )
            return chosen  # both sides go on with the same tokens, also where two are equally likely

        try:
            Player(self.paged, self.step, self.vocab_size, self.sequence_dim, compare).play(loop)
            check_integrity()
        except Different as error:
            return str(error)
        except Exception as error:
            return f"the paged run raised {type(error).__name__}: {error}"
        return ""

    def _tolerance(self, dtype: torch.dtype) -> float:
        """Rounding grows through the layers: ten times what one tensor may differ by, unless the user knows better."""
        return min(0.2, 10 * TOLERANCES.get(dtype, 0.0)) if self.tolerance is None else self.tolerance


class Different(Exception):
    """Ends the paged run at the first difference."""


def make_sides(
    model: nn.Module,
    step: Step | None,
    generate: Generate | None,
    vocab_size: int | None,
    padded: bool | None,
    sequence_dim: int,
    tolerance: float | None,
    options: Mapping[str, Any] | None,
) -> tuple[Sides, bool]:
    """The two copies; and whether batches are padded."""
    default, takes_padding = default_step(model)
    dense = _copy(model)
    paged = page(_copy(model), **page_options(model, options))
    size = vocab_size or _vocab_size(model)
    sides = Sides(dense, paged, step or default, generate, size, sequence_dim, tolerance)
    return sides, takes_padding if padded is None else padded


def _copy(model: nn.Module) -> nn.Module:
    """An unpaged copy in eval mode that shares the weights (buffers are its own: models write to them)."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    duplicate = copy.deepcopy(model, memo)
    return (unpage(duplicate) if is_paged(duplicate) else duplicate).eval()


def page_options(model: Any, options: Mapping[str, Any] | None) -> dict[str, Any]:
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
