"""Match caches: K and V tensors that a program keeps and joins new tokens to."""

from __future__ import annotations

import sympy
import torch
from torch.fx import Node

from .base import GraphState, Pass
from .mask_effects import Writers
from .sites import CacheGroupSites, CacheSite, KeptOutput
from .slices import one_slice
from .tensors import argument, hint, is_call, is_tensor, shape

__all__ = ["GroupCaches", "MatchAppends", "MatchCreates", "joined", "kept_outputs"]


def joined(node: Node) -> tuple[list[Node], int] | None:
    """The parts and the (non-negative) dimension of a concatenation of tensors, or None."""
    if not is_call(node, (torch.cat, torch.concat, torch.concatenate)) or not is_tensor(node) or "out" in node.kwargs:
        return None
    parts, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", node.kwargs.get("axis", 0))
    if not isinstance(parts, (list, tuple)) or not all(is_tensor(part) for part in parts) or not isinstance(dim, int):
        return None
    return list(parts), dim % len(shape(node))


def _is_empty(node: Node) -> bool:
    """Whether a part of a concatenation is an empty 1-D tensor, which `torch.cat` skips whatever its shape."""
    return tuple(shape(node)) == (0,)


class MatchAppends(Pass):
    """Paged inputs, and the concatenations that extend them along the sequence."""

    def apply(self, state: GraphState) -> int:
        found = 0
        writers = Writers(state.gm.graph)
        for past, facts in state.inputs.items():
            if facts.static or any(site.past is past for site in state.sites):
                continue
            for user in past.users:
                parts = joined(user)
                if parts is None or parts[0][0] is not past or facts.axes[parts[1]] != "S":
                    continue
                rest = parts[0][1:]
                if past in rest or not rest or writers.of([user]):
                    continue
                if any(part.meta["example_value"].dtype != facts.dtype for part in rest):  # the result is promoted
                    continue
                new = rest[0] if len(rest) == 1 else self._join(state, user, rest, parts[1])
                site = CacheSite("append", user, facts.axes, "cat", past=past, new=new)
                state.sites.append(site)
                found += 1
            appended = {site.node for site in state.sites if site.past is past}
            others = [user for user in past.users if user not in appended]
            if others or not appended:
                state.sites.append(CacheSite("read", past, facts.axes, "input", past=past))
        return found

    @staticmethod
    def _join(state: GraphState, user: Node, rest: list[Node], dim: int) -> Node:
        with state.gm.graph.inserting_before(user):
            new = state.gm.graph.call_function(torch.cat, (rest, dim))
        new.meta["example_value"] = torch.cat([part.meta["example_value"] for part in rest], dim)
        return new


def kept_outputs(state: GraphState) -> dict[Node, list[tuple[int, KeptOutput]]]:
    """Tensors of which the graph returns all or a slice: (the slice's dimension, or -1; what is kept) for each."""
    kept: dict[Node, list[tuple[int, KeptOutput]]] = {}
    for i, output in enumerate(state.outputs):
        if not is_tensor(output):
            continue
        kept.setdefault(output, []).append((-1, KeptOutput(i)))  # type: ignore[arg-type]
        part = one_slice(output)  # type: ignore[arg-type]
        if part is not None and part.text == ":":  # it leaves nothing out, as it is written
            kept.setdefault(part.source, []).append((-1, KeptOutput(i)))
        elif part is not None:
            kept.setdefault(part.source, []).append((part.dim, KeptOutput(i, part.first, part.stop, part.text)))
    return kept


def _along(outputs: list[tuple[int, KeptOutput]], axes: str) -> list[KeptOutput]:
    """Those that are whole, or a part of the sequence."""
    return [output for dim, output in outputs if dim < 0 or axes[dim] == "S"]


class MatchCreates(Pass):
    """Dense K and V tensors that the program keeps: returned by the graph, whole or in part, and either read by an
    attention of this graph whose K and V are both returned, or made by joining tokens to an empty or a dense cache."""

    def apply(self, state: GraphState) -> int:
        outputs = kept_outputs(state)
        for site in state.sites:
            kept = _along(outputs.pop(site.node, []), site.axes)
            site.outputs = [output for output in kept if output.stop is None or site.kind != "static"]
        writers = Writers(state.gm.graph)
        axes = self._kept_by_attention(state, outputs, writers)
        for node in outputs:
            if node not in axes and (join := self._kept_by_join(node, writers)):
                axes[node] = join
        created = [
            CacheSite("create", node, layout, form, role=role, outputs=_along(outputs[node], layout))
            for node, (layout, role, form) in axes.items()
        ]
        state.sites += [site for site in created if site.outputs]
        return len(created)

    def _kept_by_attention(
        self, state: GraphState, outputs: dict[Node, list[tuple[int, KeptOutput]]], writers: Writers
    ) -> dict[Node, tuple[str, str, str]]:
        kept: dict[Node, tuple[str, str, str]] = {}
        for attention in state.attentions:
            pair = attention.candidates
            if pair is None or not all(node in outputs and node.op != "placeholder" for node, _ in pair):
                continue
            writer = writers.of([node for node, _ in pair])
            if writer is not None:
                attention.reason = f"{writer.name} writes to its K or V in place"
                continue
            for (node, axes), role in zip(pair, ("key", "value")):
                if _storable(node, axes):
                    kept[node] = (axes, role, "cat" if joined(node) else "returned")
        return kept

    def _kept_by_join(self, node: Node, writers: Writers) -> tuple[str, str, str] | None:
        parts = joined(node)
        if parts is None or len(shape(node)) != 4 or parts[1] not in (1, 2):
            return None
        axes = "BHSD" if parts[1] == 2 else "BSHD"
        grows = _is_empty(parts[0][0]) or (parts[0][0].op == "placeholder" and len(parts[0]) == 2)
        if not grows or not _storable(node, axes) or writers.of([node]):
            return None
        return axes, "", "cat"


def _storable(node: Node, axes: str) -> bool:
    """Whether a tensor can live in pages: floating point, and static heads and head dim."""
    value = node.meta["example_value"]
    if value.dim() != 4 or value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    return all(isinstance(value.shape[axes.index(axis)], int) for axis in "HD") and not value.requires_grad


class GroupCaches(Pass):
    """Sites whose lengths move together share one block table.

    Paged inputs say themselves which cache they belong to; tensors born here go together when they had the same
    batch and length at capture (each call verifies it again), and the same part of them is kept: a window's length
    parts from the others' later.
    """

    def apply(self, state: GraphState) -> int:
        groups: dict[object, CacheGroupSites] = {}
        taken: dict[object, set[int]] = {}
        for site in state.sites:
            if site.kind == "create":
                value = site.node.meta["example_value"]
                sizes = (hint(site.size("B")), hint(site.size("S")))
                key: tuple[object, ...] = (
                    "create",
                    *sizes,
                    value.device,
                    *sorted({kept.text for kept in site.outputs}),
                )
            elif site.past is None:  # a static buffer that is born here
                lengths = (hint(site.size("B")), hint(site.size("S")), hint(site.new_tokens))
                key = ("static", *lengths, site.node.meta["example_value"].device)
            else:
                facts = state.inputs[site.past]  # type: ignore[index]
                key = (site.kind, facts.cache, hint(site.new_tokens), site.functional, hint(site.base_stop))
                while facts.site in taken.setdefault(key, set()):  # two appends to one input: two branches
                    key = (*key, "branch")
                taken[key].add(facts.site)
            groups.setdefault(key, CacheGroupSites(site.kind, [])).sites.append(site)
        state.groups = list(groups.values())
        for g, group in enumerate(state.groups):
            if group.kind == "static":
                group.start = sympy.Symbol(f"start_{g}", integer=True, nonnegative=True)
        return len(groups)
