"""Every test starts with empty books and no compiled code."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import paged_inductor
from paged_inductor import backend, program, stats
from paged_inductor._config import reset_config
from paged_inductor.runtime import manager
from paged_inductor.step import StaticWrites

from .replaying import ForbidReads, Recordings, let_twins_serve


@pytest.fixture
def formula(eager_formula: None) -> None:
    """What serves one query on the CPU. Modules that need the compiled code override this."""


@pytest.fixture(autouse=True)
def fresh(formula: None) -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # what earlier tests leave behind, until the next module begins: see tests/conftest.py
    paged_inductor.reset()
    yield
    paged_inductor.check_integrity()


@pytest.fixture
def own_options(fresh: None) -> Iterator[None]:
    """For tests that configure the process: options are the default ones again behind them."""
    yield
    reset_config()


@pytest.fixture
def idle(fresh: None) -> Iterator[None]:
    """Nothing runs on behind the test."""
    yield
    assert not any(group.active for group in manager().groups)


@pytest.fixture
def kernels_serve(own_options: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps run as on a GPU, but for the kernels and the recordings themselves; none may say that it is not replayed.
    All recordings must have been counted (those of graphs that run eagerly)."""
    compile_inner = backend.compile_inner
    graphs: list[Recordings] = []

    def compiled(graph: Any, inputs: Any, inner: str, options: dict[str, Any]) -> Callable[..., Any]:
        held = any(node.name.startswith("held_") for node in graph.graph.find_nodes(op="placeholder"))
        if inner == "eager" and held:
            graphs.append(Recordings(graph))
            return graphs[-1]
        return compile_inner(graph, inputs, inner, options)

    monkeypatch.setattr(backend, "compile_inner", compiled)
    paged_inductor.configure(triton_on_cpu=True)
    let_twins_serve(monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not replay")
        yield
    assert not graphs or sum(len(graph.made) for graph in graphs) == stats().graph_recordings


@pytest.fixture
def calls(kernels_serve: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The inputs of every replayed step, which must read nothing back, but where static caches are written."""
    seen: list[tuple[Any, ...]] = []
    step = program.PagedProgram._step
    first = StaticWrites.first

    def watched(self: program.PagedProgram, args: Sequence[Any]) -> Any:
        run: Callable[..., Any] = self._run
        if self._replay is None:
            return step(self, args)

        def recorded(*inputs: Any) -> Any:
            seen.append(inputs)
            return run(*inputs)

        self._run = recorded
        try:
            with ForbidReads():
                return step(self, args)
        finally:
            self._run = run

    def read(self: StaticWrites, args: Sequence[Any]) -> int:
        with _disable_current_modes():
            return first(self, args)

    monkeypatch.setattr(program.PagedProgram, "_step", watched)
    monkeypatch.setattr(StaticWrites, "first", read)
    return seen
