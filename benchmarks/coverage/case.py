"""What a case is, and how one is examined: dense and paged, the same loop, in each of its modes."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import paged_inductor
from paged_inductor.compare import first_difference
from paged_inductor.passes import GraphReport

MODES = ("greedy", "padded", "beams", "second turn")

HANDLES = (paged_inductor.PagedTensor, paged_inductor.PagedStack)


@dataclass(frozen=True)
class Run:
    """tokens [B, S]: all of each sequence, the prompts included. caches: K and V of all layers at the end."""

    tokens: Tensor
    caches: list[Tensor]


class Subject(ABC):
    """A model, and the loop of its package."""

    @abstractmethod
    def build(self) -> Any:
        """A new model, with equal weights at each call."""

    def paged_part(self, model: Any) -> nn.Module:
        """The module that the loop calls: `page` is applied to it."""
        return model

    @abstractmethod
    def run(self, model: Any, mode: str, new_tokens: int) -> Run:
        """The package's loop, deterministic."""

    @abstractmethod
    def sensitivity(self, model: Any) -> float:
        """The largest change of the next logits when the oldest cached values change: 0 if nobody reads them."""


@dataclass(frozen=True)
class Case:
    """A row of the table. package: the distribution, "" for this repository's own models. cache: the kind of cache,
    or of attention. make: the subject; raises ImportError if the package cannot be imported.
    """

    package: str
    model: str
    cache: str
    make: Callable[[], Subject]
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True)
class Outcome:
    """One mode of a case.

    fault: "" if the tokens equal the dense model's; else what differs, or the exception. caches, attention: (in pages,
    all): of the K and V tensors at the end, and of the attentions of a decode step, in the last such step that was
    compiled; copied: the caches that this step copies whole. reasons: why others are not paged, or what reads dense
    copies, in all graphs. materializations, dense_fallbacks, graphs: counted over the mode. varied: distinct tokens
    among the new ones of a row.
    """

    mode: str
    fault: str = ""
    caches: tuple[int, int] = (0, 0)
    attention: tuple[int, int] = (0, 0)
    copied: int = 0
    reasons: tuple[str, ...] = ()
    materializations: dict[str, int] = field(default_factory=dict)
    dense_fallbacks: int = 0
    graphs: int = 0
    varied: int = 0
    seconds: float = 0.0


def examine(subject: Subject, mode: str, new_tokens: int) -> Outcome:
    """Run one mode dense, then paged. Exceptions of the paged run become the outcome's fault; others are raised."""
    fresh()
    start = time.perf_counter()
    with torch.no_grad():
        expected = subject.run(subject.build(), mode, new_tokens).tokens
        model = subject.build()
        part = paged_inductor.page(subject.paged_part(model), inner="eager")
        marks: list[int] = []
        part.register_forward_pre_hook(lambda *_: marks.append(len(paged_inductor.explain(part).graphs)))
        try:
            run = subject.run(model, mode, new_tokens)
            fault = _difference(expected, run.tokens)
            paged_inductor.check_integrity()
        except Exception as error:  # a row that fails is shown, and the others still run
            run, fault = Run(expected, []), f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    graphs = paged_inductor.explain(part).graphs
    sites = [site for graph in _last_step(graphs, marks) for site in graph.sites]
    attention = [site for site in sites if site.attention]
    books = paged_inductor.stats()
    return Outcome(
        mode,
        fault,
        caches=(
            sum(isinstance(cache, HANDLES) for cache in run.caches),
            len(run.caches),
        ),
        attention=(sum(site.paged for site in attention), len(attention)),
        copied=sum(site.reason.count("reads it whole") for site in sites),
        reasons=_reasons(graphs),
        materializations=books.materializations,
        dense_fallbacks=books.dense_fallbacks,
        graphs=len(graphs),
        varied=min(row[-new_tokens:].unique().numel() for row in expected),
        seconds=round(time.perf_counter() - start, 1),
    )


def random_tokens(batch: int, length: int, seed: int, vocabulary: int = 97) -> Tensor:
    """Tokens [batch, length], the same for the same seed; none is 0 or 1, which mean padding and start."""
    return torch.randint(2, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def fresh() -> None:
    """No compiled code, no counters, no reports."""
    torch._dynamo.reset()
    gc.collect()
    paged_inductor.reset()


def _difference(expected: Tensor, tokens: Tensor) -> str:
    where = first_difference(expected.tolist(), tokens.tolist())
    return "" if where is None else f"tokens differ from row {where[0]}, position {where[1]} on"


def _last_step(graphs: tuple[GraphReport, ...], marks: list[int]) -> tuple[GraphReport, ...]:
    """The graphs of the last call that compiled any and was not the first. marks: graphs known at each call's start."""
    ends = [*marks[1:], len(graphs)]
    for start, end in reversed(list(zip(marks, ends))[1:]):
        if end > start:
            return graphs[start:end]
    return ()


def _reasons(graphs: tuple[GraphReport, ...]) -> tuple[str, ...]:
    sites = [site.reason for graph in graphs for site in graph.sites if site.reason]
    return tuple(dict.fromkeys([*sites, *(graph.note for graph in graphs if graph.note)]))
