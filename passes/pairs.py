"""A layer's K and V written in one launch, where kernels write them."""

from __future__ import annotations

from torch.fx import Graph, Node

from .. import ops
from .base import GraphState, Pass
from .mask_effects import Writers
from .tensors import is_call, shape

__all__ = ["PairWrites"]


class PairWrites(Pass):
    """Where two writes follow each other, have the first one done with the second, if nothing between would notice.

    On a GPU a write takes less time than its launch.
    """

    def apply(self, state: GraphState) -> int:
        graph = state.gm.graph
        writes = [node for node in graph.nodes if is_call(node, (ops.cache_write,))]
        if not writes or not ops.uses_kernels(_arena(writes[0]).meta["example_value"].device):
            return 0
        pairs: list[tuple[Node, Node]] = []
        writers = Writers(graph)
        first: Node | None = None
        for write in writes:
            if first is not None and _may_wait(first, write, writers):
                pairs.append((first, write))
                first = None
            else:
                first = write
        for early, late in pairs:
            _pair(graph, early, late)
        if pairs:
            state.gm.recompile()
        return len(pairs)


def _arena(write: Node) -> Node:
    arena = write.args[0]
    assert isinstance(arena, Node)
    return arena


def _may_wait(first: Node, second: Node, writers: Writers) -> bool:
    """Whether `first` can be done where `second` is, by one kernel for both."""
    one, other, source = _arena(first), _arena(second), first.args[1]
    assert isinstance(source, Node)
    alike = (
        first.args[2] is second.args[2]
        and one is not other
        and shape(one)[1:3] == shape(other)[1:3]
        and one.meta["example_value"].dtype == other.meta["example_value"].dtype
    )
    read = any(first < user < second for user in one.users)
    return alike and not read and writers.between([source], first, second, frozenset()) is None


def _pair(graph: Graph, first: Node, second: Node) -> None:
    (k_arena, k, plan), (v_arena, v, _) = first.args, second.args
    with graph.inserting_before(second):
        graph.call_function(ops.cache_write_kv, (k_arena, v_arena, k, v, plan))
    graph.erase_node(second)
    graph.erase_node(first)
