"""Match sliding buffers: of a fixed length, full, and moved on by a step that drops their oldest tokens.

Two spellings are read: `roll`, set the last positions, `copy_` back; and `cat` of the newest tokens and the new ones,
of which the last are copied back. Either way the buffer means the newest tokens of a sequence that grows, and that is
what it becomes: no token moves.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from .base import GraphState, Pass
from .caches import joined
from .mask_effects import Writers
from .sites import CacheSite
from .slices import one_slice
from .static import born_as_zeros
from .tensors import argument, is_call, is_tensor, same_size, shape

__all__ = ["MatchSlides"]


class MatchSlides(Pass):
    """Buffers whose content is replaced as a whole: by their newest tokens and new ones, or at birth."""

    def apply(self, state: GraphState) -> int:
        found = 0
        writers = Writers(state.gm.graph)
        for node in state.gm.graph.find_nodes(op="call_method", target="copy_"):
            if not is_tensor(node.args[0]) or not is_tensor(argument(node, 1, "src")):
                continue
            buffer: Node = node.args[0]
            if writers.all_of([buffer]) != [node]:
                continue
            if born_as_zeros(buffer):
                found += self._forward(node, buffer, writers)
                continue
            site = self._slide(state, node, buffer, writers)
            if site is not None:
                state.sites.append(site)
                found += 1
        return found

    @staticmethod
    def _forward(node: Node, buffer: Node, writers: Writers) -> bool:
        """A new buffer that is filled as a whole is what it is filled with."""
        source: Node = argument(node, 1, "src")
        a, b = buffer.meta["example_value"], source.meta["example_value"]
        if a.dtype != b.dtype or a.shape != b.shape or writers.of([source]) is not None:
            return False
        if any(user is not node and user < node for user in buffer.users):
            return False
        buffer.replace_all_uses_with(source, delete_user_cb=lambda user: user is not node)
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)
        buffer.graph.erase_node(buffer)
        return True

    def _slide(self, state: GraphState, node: Node, buffer: Node, writers: Writers) -> CacheSite | None:
        source: Node = argument(node, 1, "src")
        if buffer not in state.inputs or any(output is buffer for output in state.outputs):
            return None
        if writers.of([source]) is None:
            return self._joined(state, node, buffer, source)
        return self._rolled(state, node, buffer, source)

    @staticmethod
    def _rolled(state: GraphState, node: Node, buffer: Node, rolled: Node) -> CacheSite | None:
        """`rolled = buffer.roll(-n); rolled[:, :, -n:] = new; buffer.copy_(rolled)`."""
        axes = state.inputs[buffer].axes
        dim = axes.index("S")
        if not is_call(rolled, (torch.roll,), ("roll",)) or rolled.args[0] is not buffer:
            return None
        shift, dims = argument(rolled, 1, "shifts"), argument(rolled, 2, "dims")
        shift, dims = (x[0] if isinstance(x, (tuple, list)) and len(x) == 1 else x for x in (shift, dims))
        users = [user for user in rolled.users if user is not node]
        early = [user for user in buffer.users if user is not rolled and user < node]
        if not isinstance(shift, int) or not isinstance(dims, int) or dims % 4 != dim or len(users) != 1 or early:
            return None
        (setitem,) = users
        if not is_call(setitem, (operator.setitem,)) or setitem.args[0] is not rolled or node < setitem:
            return None
        new = setitem.args[2]
        fits = is_tensor(new) and _others_equal(new, buffer, dim) and same_size(shape(new)[dim], -shift)  # type: ignore[arg-type]
        if not fits or not _is_end(setitem.args[1], dim, -shift):
            return None
        length = shape(buffer)[dim]
        return CacheSite(
            "slide",
            buffer,
            axes,
            "roll",
            past=buffer,
            new=new,  # type: ignore[arg-type]
            write=node,
            base_stop=length,
            obsolete=[setitem, rolled],
        )

    @staticmethod
    def _joined(state: GraphState, node: Node, buffer: Node, source: Node) -> CacheSite | None:
        """`full = cat([buffer[:, :, a:b], new]); buffer.copy_(full[:, :, -W:])`."""
        axes = state.inputs[buffer].axes
        dim = axes.index("S")
        part = one_slice(source)
        full = source if part is None else part.source
        parts = joined(full)
        if parts is None or parts[1] != dim or len(parts[0]) != 2:
            return None
        if part is not None and (part.dim != dim or not same_size(part.stop, shape(full)[dim])):
            return None
        base, new = parts[0]
        kept = one_slice(base)
        if kept is None or kept.source is not buffer or kept.dim != dim or not _others_equal(new, buffer, dim):
            return None
        if set(buffer.users) != {base, node} or set(base.users) != {full}:
            return None
        obsolete = [node] if source is full else [node, source]
        return CacheSite(
            "slide",
            full,
            axes,
            "cat and copy_",
            past=buffer,
            new=new,
            write=full,
            base_stop=kept.stop,
            obsolete=obsolete,
        )


def _others_equal(new: Node, buffer: Node, dim: int) -> bool:
    a, b = new.meta["example_value"], buffer.meta["example_value"]
    return (
        a.dim() == b.dim() == 4
        and a.dtype == b.dtype
        and all(same_size(a.shape[i], b.shape[i]) for i in range(4) if i != dim)
    )


def _is_end(item: object, dim: int, count: int) -> bool:
    """Whether an index is the last `count` positions of dimension `dim`."""
    items = item if isinstance(item, tuple) else (item,)
    if len(items) <= dim or any(other != slice(None) for i, other in enumerate(items) if i != dim):
        return False
    last = items[dim]
    if is_call(last, (torch.tensor,)):
        return last.args[0] == [-1] and count == 1  # type: ignore[union-attr]
    return isinstance(last, slice) and last.start == -count and last.stop is None and last.step in (None, 1)
