"""The torch.compile backend: `torch.compile(model, backend="paged_inductor")`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node

from ._callers import users_stacklevel
from ._config import config, require_bool, require_kv_dtype
from ._errors import ConfigurationError
from ._layout import ArenaLayout
from .adoption import AdoptingProgram
from .group_plan import describe, plan_groups, site_spec
from .inner import INNER_COMPILERS, compile_inner
from .metrics import serve_as_configured
from .passes import CacheSite, GraphReport, page_graph
from .passes.mask_effects import Writers, written
from .passes.stacked import unstack
from .passes.symbols import UnknownSize
from .program import PagedProgram, make_dense
from .replay import keep_in_place
from .reports import publish, published
from .stacked import StackedProgram
from .tensor import Handle, PagedStack, PagedTensor
from .triangles import Triangles
from .verified import VerifiedProgram, mark

__all__ = ["BackendOptions", "paged_inductor"]


class BackendOptions:
    """Options of the backend, from `torch.compile(..., options={...})`.

    inner: the compiler of the rewritten graph: "inductor" (default), "aot_eager" or "eager".
    mode: as of torch.compile. With "reduce-overhead" (and "max-autotune") steps on a GPU that add a fixed number of
        tokens to caches, at most 16, are recorded as CUDA graphs and replayed; others run as without it.
    inductor: options for Inductor, as `torch.compile(options=...)` takes them.
    label: what errors and `stats()` call this program.
    kv_dtype: what keys and values are rounded to in pages, "fp8_e4m3" or "int8", or None for not at all. By default as
        `configure(kv_dtype=...)` says.
    verify: run every step dense, too, and raise `VerificationError` at the first layer that differs. For finding
        faults: it costs a dense run a step and a dense copy of every cache.
    verify_tolerance: the difference that passes, as a share of a tensor's largest absolute value. None: 1e-9 for
        float64, 1e-4 for float32, 1e-2 for float16, 5e-2 for bfloat16.
    """

    NAMES = ("inner", "mode", "inductor", "label", "kv_dtype", "verify", "verify_tolerance")

    def __init__(self, options: Mapping[str, Any] | None, mode: str | None, owner: Hashable = None) -> None:
        """owner: whose graphs are compiled, for `reports`; by default whatever has this label."""
        options = dict(options or {})
        unknown = sorted(set(options) - set(self.NAMES))
        if unknown:
            raise ConfigurationError(f"unknown backend option {unknown[0]!r}: the options are {', '.join(self.NAMES)}")
        self.inner: str = options.get("inner", "inductor")
        if self.inner not in INNER_COMPILERS:
            raise ConfigurationError(
                f"inner={self.inner!r} is not allowed: choose one of {', '.join(map(repr, INNER_COMPILERS))}"
            )
        mode = options.get("mode") or mode or "default"
        modes = torch._inductor.list_mode_options()
        if mode not in modes:
            raise ConfigurationError(f"mode={mode!r} is not allowed: choose one of {', '.join(map(repr, modes))}")
        self.inductor: dict[str, Any] = {**modes[mode], **(options.get("inductor") or {})}
        self.replay = bool(self.inductor.get("triton.cudagraphs", False))
        self.label: str = str(options.get("label", "model"))
        self.owner: Hashable = self.label if owner is None else owner
        self.kv_dtype = require_kv_dtype(options["kv_dtype"]) if "kv_dtype" in options else config().kv_dtype
        self.verify: bool = require_bool("verify", options.get("verify", False))
        self.verify_tolerance: float | None = options.get("verify_tolerance")
        allowed = self.verify_tolerance
        if allowed is not None and not (isinstance(allowed, int | float) and 0 <= allowed < 1):
            raise ConfigurationError(
                f"verify_tolerance={allowed!r} is not allowed: choose a number from 0 to 1, the share of a tensor's "
                "largest absolute value by which paged and dense may differ, or None for the default of its dtype"
            )
        if self.verify and self.kv_dtype is not None and allowed is None:
            raise ConfigurationError(
                f"verify=True and kv_dtype={self.kv_dtype!r}: rounded tokens differ from dense ones. Say by how much "
                "they may, as verify_tolerance=0.1, or leave one of the options out"
            )


def paged_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    owner: Hashable = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured, with its KV caches on pages. See `BackendOptions` for the rest.

    Graphs without caches, and graphs that need gradients, are handed to the inner compiler as they are.
    """
    settings = BackendOptions(options, mode, owner)
    serve_as_configured()
    stacks = {n.name: x.lead for n, x in _given(gm, example_inputs, PagedStack)}
    unstacked = unstack(gm, stacks)
    if unstacked is not None:
        program = StackedProgram(unstacked)
        program.run = paged_inductor(
            unstacked.gm, program.flat(example_inputs), options=options, mode=mode, owner=owner
        )
        return program
    if stacks:
        return _unpaged(gm, example_inputs, settings, "not paged: a stack of caches is written to in place")
    if settings.verify:
        gm = mark(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    handles = {n.name: x for n, x in _given(gm, example_inputs, PagedTensor)}
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs):
        return _unpaged(gm, example_inputs, settings, "gradients are needed: not paged, so that they are right")
    fake_mode = detect_fake_mode([node.meta.get("example_value") for node in placeholders])
    if fake_mode is None:
        return _unpaged(gm, example_inputs, settings, "the graph has no tensor inputs")
    shared = _shared_and_written(gm, placeholders, example_inputs)
    if shared:
        return _unpaged(gm, example_inputs, settings, f"not paged: {shared} shares memory with another input")
    facts = {name: fact for name, handle in handles.items() if (fact := describe(handle)) is not None}
    block_size = config().block_size

    spec = partial(site_spec, kv_dtype=settings.kv_dtype)

    def arena_layout(site: CacheSite) -> ArenaLayout:
        return spec(site).layout(block_size)

    triangles = Triangles(placeholders, example_inputs)
    on_cpu = all(x.device.type == "cpu" for x in example_inputs if isinstance(x, Tensor))
    single_rows = settings.inner == "inductor" and on_cpu
    try:
        hold = settings.replay and not settings.verify and (not on_cpu or config().triton_on_cpu)
        state, report = page_graph(gm, facts, fake_mode, block_size, arena_layout, single_rows, triangles.numbers, hold)
        plans = [] if state.adoptions else plan_groups(gm, state, example_inputs, block_size, spec)
    except UnknownSize as unknown:  # the passes work on a copy: the graph is as it was
        return _unpaged(gm, example_inputs, settings, f"not paged: {unknown}")
    understood = {site.past.name for site in state.sites if site.past and site.kind in ("static", "slide")}
    left = [node for node in placeholders if node.name in handles and node.name not in understood]
    writer = written(gm.graph, left)
    if writer is not None:  # eager operations on handles write into the pages
        publish(settings.owner, GraphReport((), note=f"{writer.name} writes to a paged cache in place: run eagerly"))
        return gm.forward
    if state.adoptions:
        publish(settings.owner, report)
        dense = partial(_unpaged, gm, settings=settings, report=report)
        again = partial(paged_inductor, gm, options=options, mode=mode, owner=owner)
        return AdoptingProgram(gm, state.adoptions, spec, block_size, settings.label, dense, again)
    if not state.sites:
        return _unpaged(gm, example_inputs, settings, "no KV cache", report)
    publish(settings.owner, report)

    if state.not_held:
        _warn_not_replayed(settings.label, state.not_held)
    if state.held:
        keep_in_place(state)

    def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_inner(
            graph, inputs, settings.inner, {**settings.inductor, "triton.cudagraphs": bool(state.held)}
        )

    if settings.verify:
        number = len(published(settings.owner))
        return VerifiedProgram(
            gm, state, example_inputs, plans, compiler, settings.label, triangles, number, settings.verify_tolerance
        )
    return PagedProgram(gm, state, example_inputs, plans, compiler, settings.label, triangles)


def _warn_not_replayed(label: str, why: str) -> None:
    warnings.warn(
        f'paged_inductor: mode="reduce-overhead" does not replay a step of {label}, because {why}. It runs as without '
        "that mode. Steps that add a fixed number of tokens, at most 16, to their caches are replayed, if their masks "
        "are made of the step's inputs.",
        stacklevel=users_stacklevel(),
    )


paged_inductor.pages_kv = True  # type: ignore[attr-defined]  # how PagedTensor recognises its own backend


def _given(gm: GraphModule, example_inputs: Sequence[Any], kind: type) -> list[tuple[Node, Any]]:
    """The inputs of one kind, with their values."""
    return [(n, x) for n, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs) if isinstance(x, kind)]


def _shared_and_written(gm: GraphModule, placeholders: Sequence[Node], example_inputs: Sequence[Any]) -> str:
    """The name of an input that the graph writes to and that shares memory with another one, which nothing in the graph
    tells; or ''."""
    users: dict[int, list[Node]] = {}
    for node, value in zip(placeholders, example_inputs):
        if isinstance(value, Tensor) and not isinstance(value, Handle) and value.layout == torch.strided:
            users.setdefault(value.untyped_storage()._cdata, []).append(node)
    several = [node for nodes in users.values() if len(nodes) > 1 for node in nodes]
    if not several:
        return ""
    writers = Writers(gm.graph)
    return next((node.name for node in several if writers.of([node]) is not None), "")


def _unpaged(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    settings: BackendOptions,
    note: str,
    report: GraphReport | None = None,
) -> Callable[..., Any]:
    """The graph as the inner compiler would have compiled it; paged inputs, if any, become dense at each call. A graph
    that writes to them in place runs eagerly: only then do the writes reach the pages."""
    publish(settings.owner, replace(report or GraphReport(()), note=note))
    handles = [node for node, _ in _given(gm, example_inputs, Handle)]
    if written(gm.graph, handles) is not None:
        return gm.forward
    run = compile_inner(gm, [make_dense(x) for x in example_inputs], settings.inner, settings.inductor)
    if not handles:
        return run
    return lambda *args: run(*map(make_dense, args))
