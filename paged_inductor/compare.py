"""The same generation, dense and paged: what was generated, the KV bytes held, and the time per token.

For `python -m paged_inductor ab`, the examples and their tests. Nothing here changes what `generate` does: it is
watched through a stopping criterion that never stops.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .monitor import Stats, stats
from .tensor import PagedStack, PagedTensor

__all__ = [
    "Generation",
    "Watch",
    "cache_name",
    "cache_tensors",
    "first_difference",
    "generate",
    "held_bytes",
    "percentile",
]


@dataclass
class Watch:
    """A stopping criterion that never stops: it times the steps of `generate`, and notes the books after each.

    milliseconds: per token, for every step but the first (which reads the prompt). lengths: tokens per row after each
    step. books: `stats()` after each step. `on_step` is called after each step; neither its time nor
    that of `stats()` counts.
    """

    on_step: Callable[[], object] | None = None
    milliseconds: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    books: list[Stats] = field(default_factory=list)
    _resumed: float = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        now = time.perf_counter()
        rows, length = input_ids.shape
        if self._resumed and length > self.lengths[-1]:
            self.milliseconds.append(1000 * (now - self._resumed) / (length - self.lengths[-1]))
        self.lengths.append(length)
        self.books.append(stats())
        if self.on_step is not None:
            self.on_step()
        self._resumed = time.perf_counter()
        return torch.zeros(rows, dtype=torch.bool, device=input_ids.device)

    def restart(self) -> None:
        """The next step reads a prompt again."""
        self._resumed = 0.0


@dataclass(frozen=True)
class Generation:
    """One call of `generate`. tokens: all of each row, the prompt included. kv_bytes: held by `cache` at the end."""

    tokens: list[list[int]]
    cache: Any
    kv_bytes: int
    watch: Watch


def generate(
    model: Any, inputs: Mapping[str, Tensor], watch: Watch | None = None, cache: Any = None, **options: Any
) -> Generation:
    """`model.generate(**inputs, **options)`, watched. The model may be paged or not; `cache` is an earlier turn's."""
    watch = watch or Watch()
    watch.restart()
    if cache is not None:
        options[cache_name(inspect.signature(model.forward).parameters)] = cache
    result = model.generate(**inputs, **options, stopping_criteria=[watch], return_dict_in_generate=True)
    cache = result[cache_name(result)]
    return Generation(result.sequences.tolist(), cache, held_bytes(cache_tensors(cache)), watch)


def cache_name(names: Container[str]) -> str:
    """What this release of transformers calls the cache."""
    return "cache" if "cache" in names else "past_key_values"


def cache_tensors(cache: Any) -> list[Tensor]:
    """K and V of every layer of a transformers cache."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory behind `tensors`: those of a dense one, and of the blocks of paged ones, each block once."""
    total = 0
    blocks: set[tuple[int, int]] = set()
    sizes: dict[int, int] = {}
    parts = (part for tensor in tensors for part in (tensor.handles if isinstance(tensor, PagedStack) else [tensor]))
    for tensor in parts:
        if not isinstance(tensor, PagedTensor):
            total += tensor.numel() * tensor.itemsize
            continue
        view = tensor._view
        group = view.group
        sizes[id(group)] = group.block_bytes
        for row, length in zip(view.rows, view.lengths):
            blocks.update((id(group), block) for block in row.blocks[: -(-length // group.block_size)])
    return total + sum(sizes[group] for group, _ in blocks)


def first_difference(left: list[list[int]], right: list[list[int]]) -> tuple[int, int] | None:
    """(row, position) of the first token that differs, or None if all are equal."""
    for row in range(max(len(left), len(right))):
        a = left[row] if row < len(left) else []
        b = right[row] if row < len(right) else []
        if a != b:
            return row, next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return None


def percentile(values: list[float], percent: int) -> float:
    """The value that `percent` of `values` do not exceed; nan if there are none."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
