"""`verify=True`: every compiled step runs dense beside paged, and the first layer that differs is named.

The dense side is the graph as captured, on the shadows of the handles that it is given (`tensor.verified`): its caches
are dense tensors that grow from step to step and are never read from pages. Compared are, in the order of the graph,
the tokens stored in every cache that the step extends or reads, the output of every attention that reads pages, and
what the graph returns. After an attention that agrees, both sides go on with the paged output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ._errors import VerificationError
from .difference import Difference, difference
from .passes import CacheSite, GraphState
from .passes.clone import clone
from .passes.mask_effects import Writers
from .program import GroupPlan, PagedProgram
from .runtime import StepViews
from .tensor import PagedTensor
from .tensor.handle import Form, plain
from .tensor.materialize import copy_out
from .tensor.verified import Shadow, VerifiedTensor, adopt, visible_tokens

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
    a position among the watched attentions), "result" or "input" (of the graph)."""

    kind: str
    source: int
    layer: str
    what: str
    form: Form | None = None


class VerifiedProgram(PagedProgram):
    """A paged program that runs its captured graph, too, and compares. Raises `VerificationError` before any handle of
    the step is handed out; the step is undone by that.

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
        self._hides_padding: dict[str, int] = {}
        self._kept_results: dict[int, _Check] = {}
        for g, (group, plan) in enumerate(zip(state.groups, plans)):
            for site, ordinal in zip(group.sites, plan.sites):
                check = _Check("stored", g, _layer(site.node), _stored(site), plain(ordinal, site.axes))
                self._checks.setdefault(site.node.meta[_MARK], []).append(check)
                self._kept_results |= dict.fromkeys((kept.position for kept in site.outputs), check)
        self._add_outputs(state, position)
        super().__init__(gm, state, examples, plans, compiler, label)

    def _add_outputs(self, state: GraphState, position: dict[str, int]) -> None:
        """Have the rewritten graph return the outputs of its paged attentions, behind what it returns."""
        alive = set(state.gm.graph.nodes)
        watched: list[Node] = []
        for attention in state.attentions:
            node, key = attention.node, attention.key
            if not attention.paged or key is None or key.kind == "create" or node not in alive:
                continue
            name = node.meta[_MARK]
            self._checks.setdefault(name, []).append(_Check("output", len(watched), _layer(node), "output"))
            if key.past is not None and attention.mask is not None and attention.mask.tensor is None:
                self._hides_padding[name] = position[key.past.name]
            watched.append(node)
        output = state.gm.graph.output_node()
        output.args = ((*output.args[0], *watched),)  # type: ignore[misc]
        state.gm.recompile()

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        given = [adopt(x, self._tolerance) if isinstance(x, PagedTensor) else x for x in args]
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
        steps: Sequence[StepViews],
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

        def computed(name: str, value: Any) -> Any:
            """What the graph goes on with in place of `value`: the paged output of an attention, so that what is
            allowed at one does not grow from layer to layer."""
            for check in self._checks.get(name, ()):
                if check.form is not None:
                    differing(PagedTensor(steps[check.source].view, check.form), value, check)
                else:
                    paged = returned[len(self._dense_outputs) + check.source]
                    differing(paged, value, check)
                    value = paged
            return value

        padded = {name: given[i] for name, i in self._hides_padding.items() if given[i]._view.ragged}
        try:
            expected = _DenseRun(self._dense, computed, padded).run(*dense)
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


class _DenseRun(Interpreter):
    """Runs a captured graph; `computed(name, value)` sees every node's value, and says what to go on with.

    padded: by name of an attention, a key handle whose shorter rows are virtually left padded: hidden from it, as the
    paged attention does where the mask was proven.
    """

    def __init__(self, gm: GraphModule, computed: Callable[[str, Any], Any], padded: dict[str, VerifiedTensor]) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self._computed = computed
        self._padded = padded

    def run_node(self, n: Node) -> Any:
        handle = self._padded.get(n.name)
        return self._computed(n.name, super().run_node(n) if handle is None else self._hidden(n, handle))

    def _hidden(self, n: Node, handle: VerifiedTensor) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        values = dict(zip(names, args)) | kwargs
        query, key = values["query"], values["key"]
        axes = handle._form.axes
        seen = visible_tokens(handle).permute([axes.index(axis) for axis in "BHSD"])
        seen = seen[:, :1, :, :1].transpose(-2, -1)  # B 1 1 S
        new = key.shape[2] - seen.shape[3]
        visible = torch.cat([seen, seen.new_ones(seen.shape[0], 1, 1, new)], -1)
        if values.get("is_causal"):
            visible = visible & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
        mask = values.get("attn_mask")
        if mask is None:
            mask = torch.zeros((), dtype=query.dtype, device=query.device)
        if mask.dtype == torch.bool:
            mask = torch.zeros((), dtype=query.dtype, device=query.device).where(mask, float("-inf"))
        values |= {"attn_mask": mask.where(visible, float("-inf")).to(query.dtype), "is_causal": False}
        return n.target(**values)  # type: ignore[operator]


def _stored(site: CacheSite) -> str:
    return {"key": "stored keys", "value": "stored values"}.get(site.role, "stored tokens")


def _layer(node: Node) -> str:
    """The module that a node belongs to, as "model.layers.0.self_attn"; else the node's name."""
    stack = node.meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if stack else ""
    path = re.sub(r"^L\['\w+'\](\.__self__)?\.?", "", path)
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path) or node.name
