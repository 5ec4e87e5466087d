"""A compiled graph whose caches live on pages: what runs at every call."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from torch.fx import GraphModule

from . import ops
from ._callers import users_stacklevel
from .group_plan import GroupPlan
from .passes import GraphState
from .replay import Replay
from .runtime import Preempted, Steps, View, few_lengths, manager
from .sharer import Loan, Sharer, StalePrefix, loans
from .sizes import size_reader
from .step import Step, commit, undo
from .tensor import Handle, PagedTensor
from .triangles import Triangles

__all__ = ["PagedProgram", "make_dense"]


def make_dense(value: Any) -> Any:
    """A dense copy of a handle; anything else as it is."""
    return value.dense() if isinstance(value, Handle) else value


class PagedProgram:
    """Runs a rewritten graph as one transaction: allocate, copy on write, run, and only then hand out new handles.

    Any exception on the way drops the new views, and with them their blocks; older handles keep their meaning.
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
    ) -> None:
        """`gm` is the graph as captured, for calls that do not fit; `compiler` compiles the rewritten one; `triangles`
        are what the proofs of its masks rely on."""
        captured = gm.graph.find_nodes(op="placeholder")
        paged = {node.name for node in state.inputs} | state.dropped
        self._dense = gm
        self._label = label
        self._triangles = triangles
        self._plans = plans
        self._kept = [i for i, node in enumerate(captured) if node.name not in paged]
        self._densify = [j for j, i in enumerate(self._kept) if isinstance(examples[i], PagedTensor)]
        self._dense_outputs = state.dense_outputs
        self._host_outputs = [(i, size_reader(size, captured)) for i, size in state.host_outputs.items()]
        self._num_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        self._sharer = Sharer(state.sharing, captured) if state.sharing and not state.sharing.reason else None
        self._warned = False
        self._ran = False
        self._replay = Replay(state) if state.held else None
        inputs = [make_dense(examples[i]) for i in self._kept]
        inputs += [new.node.meta["example_value"] for new in state.new_inputs]
        inputs += [held.node.meta["example_value"] for held in state.held]
        self._run = compiler(state.gm, inputs)
        self._streams = any(plan.streams for plan in plans)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """The captured graph's results for `args`, with handles in the places of the caches."""
        done = self._step(args)
        return self._run_dense(args) if done is None else self._results(args, *done)

    def _step(self, args: Sequence[Any]) -> tuple[Sequence[Any], list[Step]] | None:
        """The rewritten graph's results and the views that it filled; None if the call does not fit the graph."""
        began = perf_counter_ns()
        runtime = manager()
        with runtime.preemptible():
            while True:
                try:
                    done = self._attempt(args)
                    break
                except Preempted:
                    pass  # the views of the attempt die with the exception, before the wait
                runtime.wait_for_others()
        if done is not None:
            steps = Steps.of(self._label, done[1][0].view.tenant.name, self._plans[0].count(args))
            runtime.counters.latencies.record(steps, perf_counter_ns() - began)
        return done

    def _attempt(self, args: Sequence[Any]) -> tuple[Sequence[Any], list[Step]] | None:
        """One attempt at `_step`; raises `Preempted`, with everything given back, if it must be made again."""
        steps: list[Step] = []
        lent = self._confirm(args) if loans else ()
        if not self._triangles.hold(args):
            return None
        try:
            for plan in self._plans:
                step = plan.start(args, self._label)
                if step is None:
                    undo(steps)
                    return None
                steps.append(step)
        except BaseException:
            undo(steps)
            raise
        runtime = manager()
        views = [step.view for step in steps]
        try:
            inputs = [args[i] for i in self._kept]
            for j in self._densify:
                inputs[j] = inputs[j].dense()
            named = self._sharer.begin(args, self._plans, steps) if self._sharer is not None else None
            later = [view for plan, view in zip(self._plans, views) if plan.streams] if self._streams else ()
            runtime.begin(views, later)
        except BaseException:
            undo(steps)
            raise
        try:
            schedules = []
            for plan, step in zip(self._plans, steps):
                arenas = plan.group.arenas
                ops.execute_copies(arenas, step.copies)
                schedules.append(manager().schedule(step.view))
                given = step.inputs(schedules[-1])
                if self._replay is not None:
                    given["shared_prefix"] = few_lengths(given["shared_prefix"], plan.group.block_size)
                inputs += plan.takes(given)
                inputs += [arenas[site] for site in plan.sites]
            if self._replay is not None:
                inputs += self._replay.inputs(args, self._plans, views, schedules)
                self._replay.note(args, inputs, self._plans)
            dense = self._run_behind(inputs, views) if self._streams else self._run(*inputs)
        except BaseException:
            undo(steps)
            raise
        finally:
            del inputs
            runtime.end(views)
        commit(steps)
        if self._sharer is not None and named is not None:
            self._sharer.finish(args, self._plans, views, named, dense)
        for loan in lent:
            loan.outputs, loan.views = dense, views
        for plan, step in zip(self._plans, steps):
            if plan.static is not None and step.extent is not None:
                plan.static.succeeded(args, step.extent - plan.count(args))
        if not self._ran:
            self._ran = True
            gc.collect()  # Dynamo leaves this call's caches in reference cycles: let them die with their last handle
        return dense, steps

    def _run_behind(self, inputs: Sequence[Any], views: Sequence[View]) -> Sequence[Any]:
        """The graph's results, which waits for what is on its way to the views of its groups."""
        arrivals = [manager().arrival(view) for view in views]

        def wait(group: int, sites: Sequence[int]) -> None:
            arrival = arrivals[group]
            if arrival is not None:
                arrival.wait([self._plans[group].sites[i] for i in sites])

        with ops.arriving(wait if any(arrivals) else None):
            dense = self._run(*inputs)
        manager().complete(views)
        return dense

    def _confirm(self, args: Sequence[Any]) -> Sequence[Loan]:
        """The loans of the prefix that the call goes on from; raises `StalePrefix` if this graph would have computed it
        otherwise."""
        views: list[View] = [args[plan.inputs[0][0]]._view for plan in self._plans if plan.inputs]
        lent = [loan for view in views if (loan := loans.get(view)) is not None]
        if not lent:
            return ()
        sharer = self._sharer if len(lent) == len(self._plans) else None
        if sharer is None or not all(sharer.confirm(args, self._plans, views, loan) for loan in set(lent)):
            raise StalePrefix
        for loan in lent:
            loan.confirmed = True
        return lent

    def _results(self, args: Sequence[Any], dense: Sequence[Any], steps: Sequence[Step]) -> tuple[Any, ...]:
        results: list[Any] = [None] * self._num_outputs
        for i, value in zip(self._dense_outputs, dense):
            results[i] = value
        for i, number in self._host_outputs:
            results[i] = number(args)
        for plan, step in zip(self._plans, steps):
            for output in plan.outputs:
                results[output.position] = PagedTensor(output.view(step.view, args), output.form)
        return tuple(results)

    def _run_dense(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The graph as captured, on dense copies: for caches whose layers do not belong together as they did, and
        static ones that are written elsewhere than was foreseen."""
        in_place = any(plan.static is not None or plan.slide is not None for plan in self._plans)
        manager().counters.dense_fallbacks += 1
        if not self._warned:
            self._warned = True
            why = (
                "the layers of the cache it was given do not share one block table (were some cropped or reordered "
                "differently, or written by another graph, as after a graph break or under autocast?)"
            )
            if in_place:
                why += ", or write to positions that are not consecutive or not the same in all layers"
            warnings.warn(
                f"paged_inductor: a step of {self._label} ran on dense copies, because {why}. The tokens are right; "
                "the step was slower. stats().dense_fallbacks counts such steps.",
                stacklevel=users_stacklevel(),
            )
        if in_place:
            return self._dense(*args)  # eager operations on handles write into the pages
        return self._dense(*map(make_dense, args))
