"""The runtime side of a graph's cache groups: where their tensors come from, and where their handles go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ._layout import KV_DTYPES
from .passes import CacheGroupSites, CacheSite, GraphState, KeptOutput, PagedInput
from .passes.tensors import expr, same_size
from .positions import StartReader, start_reader
from .runtime import CacheGroup, SiteSpec, View, manager
from .sizes import size_reader
from .step import Slide, StaticWrites, Step
from .tensor import PagedTensor, derive
from .tensor.handle import Form, plain

__all__ = ["GroupPlan", "describe", "plan_groups", "site_spec"]

ROUNDED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def describe(handle: PagedTensor) -> PagedInput | None:
    """What the passes may know of a handle; None if only a dense copy of it will do."""
    form = handle._form
    if form is not plain(form.site, form.axes) or form.axes not in ("BHSD", "BSHD"):
        return None
    group = handle._view.group
    spec = group.sites[form.site]
    view = handle._view
    return PagedInput(
        form.axes,
        spec.heads,
        spec.head_dim,
        spec.dtype,
        group.block_size,
        spec.layout(group.block_size),
        form.site,
        cache=id(view),
        static=view.static,
        full=view.static and view.extent == view.length,
    )


def site_spec(site: CacheSite, kv_dtype: str | None) -> SiteSpec:
    """How a cache born in a graph is stored. On the CPU, the attention formula wants K's blocks transposed.

    kv_dtype: what keys and values are rounded to, see `Config`.
    """
    value = site.node.meta["example_value"]
    transposed = site.role == "key" and value.device.type == "cpu"
    rounded = kv_dtype is not None and site.role != "" and value.dtype in ROUNDED_DTYPES
    stored_as = KV_DTYPES[kv_dtype] if rounded else None  # type: ignore[index]
    return SiteSpec(int(site.size("H")), int(site.size("D")), value.dtype, value.device, transposed, stored_as)


@dataclass(frozen=True)
class HandleOutput:
    """A handle to return: its position in the graph's result, its form, and how much of the sequence it shows.

    first, stop: read the bounds from the call's arguments; None for the whole.
    """

    position: int
    form: Form
    first: Callable[[Sequence[Any]], int] | None = None
    stop: Callable[[Sequence[Any]], int] | None = None

    def view(self, whole: View, args: Sequence[Any]) -> View:
        """What this output shows of the view that a call made."""
        if self.first is None or self.stop is None:
            return whole
        stop = self.stop(args)
        kept = derive.crop(whole, self.form.site, stop)
        return derive.suffix(kept, self.form.site, stop - self.first(args))


@dataclass
class GroupPlan:
    """One cache group of a compiled graph: where its tensors come from, and where its handles go.

    inputs: argument positions and forms of the paged inputs. sites: their arenas' positions. outputs: the handles to
    return. batch, count: rows, and new tokens per row, of a call; equal
    and equal_batches: counts and rows of other caches of the group that were the same when the graph was captured, and
    must be at every call. takes: picks the graph's arguments, but for the arenas, from what a step has (`Step.inputs`).
    streams: the graph waits for each layer's old tokens itself.
    static: where a call writes, if the caches are static; slide: if they slide.
    """

    kind: str
    group: CacheGroup
    sites: list[int]
    inputs: list[tuple[int, Form]]
    outputs: list[HandleOutput]
    batch: Callable[[Sequence[Any]], int]
    count: Callable[[Sequence[Any]], int]
    equal: list[Callable[[Sequence[Any]], int]]
    equal_batches: list[Callable[[Sequence[Any]], int]]
    takes: Callable[[dict[str, Any]], tuple[Any, ...]]
    streams: bool
    static: StaticWrites | None
    slide: Slide | None

    def start(self, args: Sequence[Any], label: str) -> Step | None:
        """Make the view that this call fills; None if the call does not fit what was compiled."""
        count = self.count(args)
        if any(other(args) != count for other in self.equal):
            return None
        view: View | None = None
        batch = self.batch(args)
        if self.inputs:
            view = args[self.inputs[0][0]]._view
            if not all(args[i]._view is view and args[i]._form is form for i, form in self.inputs):
                return None
            if view.group is not self.group:
                return None
        elif any(other(args) != batch for other in self.equal_batches):
            return None
        if self.static is not None:
            return self.static.start(self.group, view, batch, count, args, label)
        if self.slide is not None and view is not None:
            return self.slide.start(view, count, args)
        if view is not None and view.static and view.extent < view.length:
            return None  # what was full when the graph was compiled is not
        if view is None:
            return Step.of(manager().create(self.group, batch, count, label))
        return Step(view) if self.kind == "read" else Step.of(manager().append(view, count, later=self.streams))


def _handle_output(kept: KeptOutput, form: Form, captured: Sequence[Node]) -> HandleOutput:
    if kept.stop is None:
        return HandleOutput(kept.position, form)
    return HandleOutput(kept.position, form, size_reader(kept.first, captured), size_reader(kept.stop, captured))


def _static_writes(
    group: CacheGroupSites, num_sites: int, gm: GraphModule, count: Callable[[Sequence[Any]], int]
) -> StaticWrites:
    readers: dict[object, StartReader] = {}
    for site in group.sites:
        start = site.start
        assert start is not None
        key = start.node if start.size is None else expr(start.size)
        if key not in readers:
            readers[key] = start_reader(start, gm, count)
    lead = group.sites[0]
    length = size_reader(lead.size("S"), gm.graph.find_nodes(op="placeholder"))
    return StaticWrites(list(readers.values()), length, lead.functional, complete=len(group.sites) == num_sites)


def plan_groups(
    gm: GraphModule,
    state: GraphState,
    examples: Sequence[Any],
    block_size: int,
    spec: Callable[[CacheSite], SiteSpec],
) -> list[GroupPlan]:
    """The runtime side of every cache group that the passes found. `examples`: the arguments of the first call; `spec`:
    how caches born in the graph are stored."""
    captured = gm.graph.find_nodes(op="placeholder")
    position = {node.name: i for i, node in enumerate(captured)}
    plans = []
    for g, group in enumerate(state.groups):
        lead = group.sites[0]
        inputs = [
            (position[site.past.name], plain(state.inputs[site.past].site, site.axes))
            for site in group.sites
            if site.past
        ]
        if not inputs:
            cache_group = manager().group(tuple(map(spec, group.sites)), block_size)
            ordinals = list(range(len(group.sites)))
        else:
            cache_group = examples[inputs[0][0]]._view.group
            ordinals = [form.site for _, form in inputs]
        counts = [site.new_tokens for site in group.sites]
        count = size_reader(counts[0], captured)
        batches = [site.size("B") for site in group.sites]
        plans.append(
            GroupPlan(
                group.kind,
                cache_group,
                ordinals,
                inputs,
                [
                    _handle_output(kept, plain(ordinal, site.axes), captured)
                    for site, ordinal in zip(group.sites, ordinals)
                    for kept in (site.outputs if group.kind != "read" else ())
                ],
                size_reader(lead.size("B"), captured),
                count,
                [size_reader(other, captured) for other in counts[1:] if not same_size(other, counts[0])],
                [size_reader(batch, captured) for batch in batches[1:] if not same_size(batch, batches[0])],
                itemgetter(*(new.kind for new in state.new_inputs if new.group == g and new.kind != "arena")),
                group.streams,
                _static_writes(group, len(cache_group.sites), gm, count) if group.kind == "static" else None,
                Slide(size_reader(lead.base_stop, captured)) if group.kind == "slide" else None,
            )
        )
    return plans
