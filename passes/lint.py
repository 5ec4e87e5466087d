"""Lint: the rewritten graph is well formed, and every cache in it is written once and handed out."""

from __future__ import annotations

from .. import ops
from .base import GraphState, NewInput, Pass
from .tensors import is_call

__all__ = ["Lint", "LintError"]


class LintError(AssertionError):
    """A pass left a graph that breaks an invariant of docs/passes.md: a bug of this package."""


class Lint(Pass):
    """Check those invariants of a rewritten graph that can be read off it: inputs, writes and outputs of its caches."""

    def apply(self, state: GraphState) -> int:
        graph = state.gm.graph
        graph.lint()
        names = [node.name for node in graph.nodes if node in state.inputs]
        if names:
            raise LintError(f"paged inputs are left in the graph: {names}")
        writes = sum(is_call(node, (ops.cache_write,)) for node in graph.nodes)
        writes += 2 * sum(is_call(node, (ops.cache_write_kv,)) for node in graph.nodes)
        expected = sum(site.kind != "read" for site in state.sites)
        if writes != expected:
            raise LintError(f"{writes} cache writes for {expected} caches")
        for site in state.sites:
            born = site.kind == "create" or (site.kind == "static" and (site.past is None or site.functional))
            if born and not site.outputs:
                raise LintError(f"{site.name} is written into pages that nobody receives")
        for new in state.new_inputs:
            if new.kind == "arena" and state.groups[new.group].streams:
                _check_waits(new)
        return writes


def _check_waits(arena: NewInput) -> None:
    for user in arena.node.users:
        waits = [node for node in user.all_input_nodes if is_call(node, (ops.arrived,))]
        if not any(wait.args[2] == arena.group and arena.site in wait.args[3] for wait in waits):  # type: ignore[operator]
            raise LintError(f"{user.name} does not wait for the tokens of {arena.node.name}")
