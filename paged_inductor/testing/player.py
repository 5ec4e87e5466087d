"""Plays a loop on a model: the one place where operations become calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..compare import cache_name
from .loops import Branch, Crop, Drop, Feed, Fork, Greedy, Loop, Operation, Reorder, Repeat

__all__ = ["CacheOperationError", "Player", "Step", "default_step"]

MAX_ROWS, MAX_BRANCHES = 8, 3


class Step(Protocol):
    """How a model is called: `step(model, tokens, cache, mask) -> (logits, cache)`.

    tokens: int64 [B, n]. cache: what the last call returned, None at first. mask: [B, T] with T the tokens so far,
    these included, 0 at padding; None if there is none. logits: [B, n, vocabulary].
    """

    def __call__(self, model: Any, tokens: Tensor, cache: Any, mask: Tensor | None) -> tuple[Tensor, Any]: ...


class CacheOperationError(Exception):
    """This kind of cache does not know an operation (as cropping, for some)."""


def default_step(model: Any) -> tuple[Step, bool]:
    """How to call `model`, and whether it takes padding: as a transformers model, or as `model(tokens, cache)`."""
    names = inspect.signature(model.forward).parameters
    if "past_key_values" in names or "attention_mask" in names:
        return _call_transformers, True
    return _call_plain, False


def _call_plain(model: Any, tokens: Tensor, cache: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
    return model(tokens, cache)


def _call_transformers(model: Any, tokens: Tensor, cache: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
    given = {cache_name(inspect.signature(model.forward).parameters): cache}
    out = model(input_ids=tokens, attention_mask=mask, use_cache=True, **given)
    return out.logits, out[cache_name(out)]


@dataclass
class Player:
    """Plays loops on one model. sequence_dim: of the tensors in a plain cache. `observe(place, logits, mask)` sees
    every call's logits [B, n, vocabulary] and mask [B, n], and returns the next tokens [B, 1]."""

    model: Any
    step: Step
    vocab_size: int
    sequence_dim: int
    observe: Callable[[str, Tensor, Tensor], Tensor]

    def play(self, loop: Loop) -> None:
        """Run a loop from its prompts to its end, and one more step of what is alive then.

        Raises `CacheOperationError`, and what the model raises.
        """
        parameter = next(self.model.parameters(), torch.empty(0))
        tokens, mask = loop.batch(parameter.device)
        empty = Branch(tokens[:, :0], mask[:, :0], None, tokens[:, :0])
        branches = [self._call(empty, tokens, mask, "the prompts")]
        for number, operation in enumerate(loop.operations, 1):
            at = operation.branch % len(branches)
            place = f"operation {number}, {operation}"
            if isinstance(operation, Fork):
                if len(branches) < MAX_BRANCHES:
                    old = branches[at]
                    branches.append(Branch(old.tokens, old.mask, copy.deepcopy(old.cache), old.chosen))
            elif isinstance(operation, Drop):
                if len(branches) > 1:
                    del branches[at]
            else:
                branches[at] = self._apply(branches[at], operation, place)
        for number, branch in enumerate(branches if loop.operations else (), 1):
            self._call(branch, branch.chosen, None, f"a last step of continuation {number}")

    def _apply(self, branch: Branch, operation: Operation, place: str) -> Branch:
        device, rows = branch.tokens.device, branch.tokens.shape[0]
        match operation:
            case Greedy(tokens=count):
                for n in range(count):
                    branch = self._call(branch, branch.chosen, None, f"{place}, token {n + 1}")
            case Feed(tokens=given):
                new = torch.tensor(given, device=device) + torch.arange(rows, device=device)[:, None]
                branch = self._call(branch, new % self.vocab_size, None, place)
            case Reorder(rows=picked):
                index = torch.tensor([row % rows for row in picked], device=device)
                branch = branch.rows(index, _rows(branch.cache, index))
            case Repeat(times=times) if rows * times <= MAX_ROWS:
                index = torch.arange(rows, device=device).repeat_interleave(times)
                branch = branch.rows(index, _repeated(branch.cache, times, index))
            case Crop(tokens=count):
                branch = self._crop(branch, count, place)
        return branch

    def _crop(self, branch: Branch, count: int, place: str) -> Branch:
        length = branch.tokens.shape[1]
        padding = length - int(branch.mask.sum(1).min())
        keep = max(length - count, padding + 2)
        if keep >= length:
            return branch
        cache = _cropped(branch.cache, length - keep + 1, self.sequence_dim)
        shorter = Branch(branch.tokens[:, : keep - 1], branch.mask[:, : keep - 1], cache, branch.chosen)
        return self._call(shorter, branch.tokens[:, keep - 1 : keep], None, place)

    def _call(self, branch: Branch, tokens: Tensor, mask: Tensor | None, place: str) -> Branch:
        new = torch.ones_like(tokens) if mask is None else mask
        whole = torch.cat([branch.mask, new], 1)
        logits, cache = self.step(self.model, tokens, branch.cache, None if bool(whole.all()) else whole)
        chosen = self.observe(place, logits, new)
        return Branch(torch.cat([branch.tokens, tokens], 1), whole, cache, chosen)


def _rows(cache: Any, index: Tensor) -> Any:
    if hasattr(cache, "reorder_cache"):
        return _in_place(cache, "reorder_cache", index)
    return _mapped(cache, "reorder_cache", lambda tensor: tensor.index_select(0, index))


def _repeated(cache: Any, times: int, index: Tensor) -> Any:
    """Every row `times` times, which is to say the rows `index`."""
    if hasattr(cache, "batch_repeat_interleave"):
        return _in_place(cache, "batch_repeat_interleave", times)
    if hasattr(cache, "reorder_cache"):
        return _in_place(cache, "reorder_cache", index)
    return _mapped(cache, "batch_repeat_interleave", lambda tensor: tensor.repeat_interleave(times, 0))


def _cropped(cache: Any, count: int, sequence_dim: int) -> Any:
    """Without the last `count` tokens."""
    if hasattr(cache, "crop"):
        return _in_place(cache, "crop", -count)
    index = (slice(None),) * sequence_dim + (slice(None, -count),)
    return _mapped(cache, "crop", lambda tensor: tensor[index])


def _in_place(cache: Any, name: str, argument: Any) -> Any:
    try:
        getattr(cache, name)(argument)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise CacheOperationError(f"{type(cache).__name__}.{name}({argument}): {error}") from error
    return cache


def _mapped(cache: Any, name: str, change: Callable[[Tensor], Tensor]) -> Any:
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(cache)):
        raise CacheOperationError(f"{type(cache).__name__} has no {name}(), and is no nest of tensors")
    return tree_map_only(Tensor, change, cache)
