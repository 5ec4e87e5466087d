"""`verify=True`: every compiled step runs dense beside paged, and the first layer that differs is named.

The dense side is the graph as captured, on the shadows of the handles that it is given (`tensor.verified`): its caches
are dense tensors that grow from step to step and are never read from pages. Compared are, in the order of the graph,
the tokens stored in every cache that the step extends or reads, the output of every attention that reads pages, and
what the graph returns. After an attention that agrees, both sides go on with the paged output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ._errors import VerificationError
from .dense_run import DenseRun
from .difference import Difference, difference
from .group_plan import GroupPlan
from .passes import CacheSite, GraphState
from .passes.clone import clone
from .passes.mask_effects import Writers
from .passes.report import layer_of
from .program import PagedProgram
from .step import Step
from .tensor import PagedTensor
from .tensor.handle import Form, plain
from .tensor.materialize import copy_out
from .tensor.verified import Shadow, VerifiedTensor, promote
from .triangles import Triangles

__all__ = ["VerifiedProgram", "mark"]

_MARK = "captured_name"


def mark(gm: GraphModule) -> GraphModule:
    """A copy of a captured graph whose nodes carry their names, so that what the passes make of them is recognised."""
    copy = clone(gm)
    for node in copy.graph.nodes:
        node.meta[_MARK] = node.name
    return copy


@dataclass(frozen=True)
class _Check:
    """A comparison. kind: "stored" (`source` is a group, and `form` shows the cache of its view), "output" (`source` is
    a position among the watched attentions), "result" or "input" (of the graph, the latter after it was written to).
    node: the captured node whose value is compared, if it is not the one that the comparison waits for."""

    kind: str
    source: int
    layer: str
    what: str
    form: Form | None = None
    node: str = ""


class VerifiedProgram(PagedProgram):
    """A paged program that runs its captured graph, too, and compares. Raises `VerificationError` before any handle of
    the step is handed out, which frees its blocks; only static buffers keep what was written into them.

    It runs the graph twice and keeps every cache twice, once dense: for finding faults. A graph that draws random
    numbers is compared only as far as both sides draw the same, which compilers do not promise.
    """

    def __init__(
        self,
        gm: GraphModule,
        state: GraphState,
        examples: Sequence[Any],
        plans: list[GroupPlan],
        compiler: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
        label: str,
        triangles: Triangles,
        number: int,
        tolerance: float | None,
    ) -> None:
        """`gm` must be what `mark` returned, and `state` made of it. number: of the graph, for people."""
        self._number = number
        self._tolerance = tolerance
        captured = gm.graph.find_nodes(op="placeholder")
        position = {node.name: i for i, node in enumerate(captured)}
        writers = Writers(gm.graph)
        self._written = [i for i, node in enumerate(captured) if writers.of([node])]
        self._checks: dict[str, list[_Check]] = {}
        self._hides_padding: dict[str, tuple[int, bool]] = {}
        self._kept_results: dict[int, _Check] = {}
        for g, (group, plan) in enumerate(zip(state.groups, plans)):
            for site, ordinal in zip(group.sites, plan.sites):
                self._check_cache(gm, writers, position, site, g, plain(ordinal, site.axes))
        self._add_outputs(state, position)
        super().__init__(gm, state, examples, plans, compiler, label, triangles)

    def _check_cache(
        self, gm: GraphModule, writers: Writers, position: dict[str, int], site: CacheSite, g: int, form: Form
    ) -> None:
        """Compare what a cache holds, as soon as the captured graph has made it, or has written to it last."""
        name = site.node.meta[_MARK]
        layer = layer_of(site.new or site.node, site.name)
        check = _Check("stored", g, layer, _stored(site), form)
        self._kept_results |= dict.fromkeys((kept.position for kept in site.outputs), check)
        if site.kind in ("static", "slide") and not site.functional:
            buffer = site.past.name if site.past is not None else name
            node = next(node for node in gm.graph.nodes if node.name == buffer)
            name = writers.all_of([node])[-1].name
            check = replace(check, node=buffer)
            if site.past is not None:
                check = replace(check, kind="input", source=position[buffer])
        self._checks.setdefault(name, []).append(check)

    def _add_outputs(self, state: GraphState, position: dict[str, int]) -> None:
        """Have the rewritten graph return the outputs of its paged attentions, behind what it returns."""
        marked = {node.meta[_MARK]: node for node in state.gm.graph.nodes if _MARK in node.meta}
        watched: list[Node] = []
        for attention in state.attentions:
            key = attention.key
            if not attention.paged or key is None or key.kind == "create":
                continue
            name = attention.result.meta[_MARK]
            node = marked.get(name)
            if node is None:  # nobody reads its result
                continue
            if key.kind in ("append", "read") and key.past and attention.mask and attention.mask.tensor is None:
                self._hides_padding[name] = (position[key.past.name], attention.by_hand is None)
            self._checks.setdefault(name, []).append(
                _Check("output", len(watched), layer_of(attention.result), "output")
            )
            watched.append(node)
        output = state.gm.graph.output_node()
        output.args = ((*output.args[0], *watched),)  # type: ignore[misc]
        state.gm.recompile()

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        given = [promote(x, self._tolerance) if isinstance(x, PagedTensor) else x for x in args]
        step = 1 + max((x._shadow.step for x in given if isinstance(x, VerifiedTensor)), default=0)
        with torch.inference_mode(False), torch.no_grad():
            dense = [x._shadow.values if isinstance(x, VerifiedTensor) else x for x in given]
            for i in self._written:  # both sides will write
                dense[i] = dense[i].clone()
        seed = torch.random.get_rng_state()
        done = self._step(args)
        if done is None:
            return self._run_dense(given)
        results = list(self._results(args, *done))
        with torch.random.fork_rng(), torch.inference_mode(False), torch.no_grad():
            torch.random.set_rng_state(seed)
            expected = self._compare(given, dense, *done, results)
        if isinstance(expected, _Fault):
            del done, results  # a traceback must not keep the step's blocks
            check, fault = expected
            raise VerificationError(self._label, self._number, step, check.layer, check.what, *fault)
        for i in self._written:
            if isinstance(given[i], VerifiedTensor):
                given[i]._shadow.values.copy_(dense[i])
        self._attach(results, expected, step)
        return tuple(results)

    def _compare(
        self,
        given: Sequence[Any],
        dense: Sequence[Any],
        returned: Sequence[Any],
        steps: Sequence[Step],
        results: Sequence[Any],
    ) -> Sequence[Any] | _Fault:
        """Run the captured graph on `dense`; returns its results, or the first difference."""

        def differing(paged: Any, dense: Any, check: _Check) -> None:
            if isinstance(paged, PagedTensor):
                paged = copy_out(paged._view, paged._form)
            if isinstance(paged, Tensor) and paged.is_floating_point():
                fault = difference(paged, dense, self._tolerance)
                if fault is not None:
                    raise _Found(_Fault(check, fault))

        values: dict[str, Any] = {}
        buffers = {check.node for checks in self._checks.values() for check in checks}
        ragged = {name: (given[i], sdpa) for name, (i, sdpa) in self._hides_padding.items() if given[i]._view.ragged}

        def computed(name: str, value: Any) -> Any:
            """What the graph goes on with in place of `value`: the paged output of an attention, so that what is
            allowed at one does not grow from layer to layer."""
            if name in buffers:
                values[name] = value
            for check in self._checks.get(name, ()):
                if check.kind == "output":
                    paged = returned[len(self._dense_outputs) + check.source].to(value.dtype)
                    if name not in ragged or ragged[name][1]:  # by hand, the captured graph sees virtual padding
                        differing(paged, value, check)
                    value = paged
                elif check.kind == "input":
                    differing(given[check.source], values[check.node], check)
                else:
                    whole = PagedTensor(steps[check.source].view, check.form)  # type: ignore[arg-type]
                    differing(whole, values[check.node] if check.node else value, check)
            return value

        padded = {name: handle for name, (handle, sdpa) in ragged.items() if sdpa}
        try:
            expected = DenseRun(self._dense, computed, padded).run(*dense)
            for i, result in enumerate(results):
                check = _Check("result", i, "the graph", f"result {i}")
                differing(result, expected[i], self._kept_results.get(i, check))
            for i in self._written:
                differing(given[i], dense[i], _Check("input", i, "the graph", f"changed input {i}"))
        except _Found as found:
            return found.fault
        return expected

    def _attach(self, results: list[Any], expected: Sequence[Any], step: int) -> None:
        """Give the handles among the results their shadows."""
        for plan in self._plans:
            for output in plan.outputs:
                i = output.position
                values = expected[i].clone() if plan.kind == "create" else expected[i]  # it may be part of a larger one
                check = self._kept_results[i]
                shadow = Shadow(values, check.layer, check.what, step, self._tolerance)
                results[i] = VerifiedTensor(results[i]._view, output.form, None, shadow)


class _Fault(NamedTuple):
    check: _Check
    difference: Difference


class _Found(Exception):
    """Ends a dense run at the first difference."""

    def __init__(self, fault: _Fault) -> None:
        self.fault = fault


def _stored(site: CacheSite) -> str:
    return {"key": "stored keys", "value": "stored values"}.get(site.role, "stored tokens")
