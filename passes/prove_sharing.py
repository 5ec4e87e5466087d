"""ProveSharing: which inputs of a graph make K and V what they are, position by position.

Caches of equal tokens are equal only if nothing else enters them: so every operation between the inputs and the stored
tokens must be known to keep positions and rows apart (`flow_ops`), and every attention on the way must let a token see
exactly those up to itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import sympy
import torch
from torch.fx import Node

from . import flow_ops, flow_shapes  # noqa: F401  (they register their handlers)
from .attention import equal_lengths
from .base import GraphState, Pass, Sharing
from .flow import BATCH, TOKENS, Flow, Flows, NotShared, digest
from .flow_attention import AttentionFlows, new_tokens
from .flow_static import StaticStart
from .mask_effects import Writers
from .sites import CacheSite
from .tensors import expr, is_tensor, shape, source_name

__all__ = ["ProveSharing"]

_SMALL = 64  # elements of an input that is hashed whole


class ProveSharing(Pass):
    """Say what the caches of a graph depend on, or why the tokens alone do not say what is in them."""

    def apply(self, state: GraphState) -> int:
        if not state.sites:
            return 0
        try:
            proof = _Proof(state)
            state.sharing = proof.result()
            if proof.mixes:
                state.sharing = _Proof(state, told_apart=True).result()
        except NotShared as reason:
            state.sharing = Sharing(reason=str(reason))
        return int(not state.sharing.reason)


class _Proof:
    """mixes: positions come from more than one place; what comes from an input must be told apart from what is counted
    then. Else it is the same if an input says what would be counted, which belongs to a token's name if it does not."""

    def __init__(self, state: GraphState, told_apart: bool = False) -> None:
        kinds = {group.kind for group in state.groups}
        if kinds not in ({"create"}, {"append"}, {"static"}):
            raise NotShared(f"its caches are of kind {' and '.join(sorted(kinds))}, not all begun or all extended here")
        static = StaticStart.of(state) if kinds == {"static"} else None
        self.state = state
        self.told_apart = told_apart
        self.mixes = False
        self.creates = kinds == {"create"}
        self.static = static is not None
        lead = state.groups[0].sites[0]
        equal = equal_lengths(state)
        past = sympy.S.Zero
        if static is not None:
            equal |= static.equal
            past = static.past
        elif lead.past is not None:
            past = sympy.expand(expr(shape(lead.past)[lead.axes.index("S")]).xreplace(equal))
        inputs = (node.meta.get("example_value") for node in state.placeholders)
        integers = (expr(value) for value in inputs if isinstance(value, torch.SymInt))
        counters = frozenset(symbol for value in integers for symbol in value.free_symbols)
        self.flows = Flows(lead.size("B"), lead.new_tokens, past, equal, counters=counters)
        self.roles: dict[Node, str] = {}
        if static is not None:
            static.enter(self.flows, state.gm.graph)
        self.attend = AttentionFlows(state, self.flows, self.creates, self.static)

    def result(self) -> Sharing:
        """The proof's outcome; raises `NotShared`."""
        flows, graph = self.flows, self.state.gm.graph
        attentions = {node: site for site in self.state.attentions for node in (site.node, site.result)}
        for node in graph.nodes:
            flows.current = node
            try:
                if node.op == "placeholder":
                    self._input(node)
                elif node.op == "get_attr":
                    raise NotShared(f"{node.name} is a constant of the graph")
                elif node in attentions:
                    flows.values[node] = self.attend.flow(attentions[node])
                else:
                    flows.compute(node)
            except NotShared as reason:
                flows.values[node] = reason
        flows.current = None
        readers = list({id(site): site for node in graph.nodes if (site := attentions.get(node))}.values())
        first = {id(cache): at for at, site in reversed([*enumerate(readers)]) for cache in (site.key, site.value)}

        def since(site: CacheSite) -> int:
            return first.get(id(site), len(readers))

        groups = self.state.groups
        placed = sorted(range(len(groups)), key=lambda g: min(map(since, groups[g].sites)))
        order = tuple(placed.index(g) for g in range(len(groups)))
        digests = []
        for at, g in enumerate(placed):
            sites = sorted(groups[g].sites, key=lambda site: (since(site), site.role))
            digests += [digest(at, site.axes, self.attend.stored(site).digest) for site in sites]
        place = {id(site): at for at, group in zip(order, groups) for site in group.sites}
        windows = tuple((place.get(id(site.key), 0), self.attend.windows.get(site.node)) for site in readers)
        return self._sharing(digest(*digests), order, windows)

    def _sharing(self, how: bytes, order: tuple[int, ...], windows: tuple[tuple[int, int | None], ...]) -> Sharing:
        visited = self._visited(new_tokens(site) for site in self.state.sites)
        told = {self.attend.mask} if self.attend.mask is not None else set()
        writer = self._writer(visited | told)
        if writer is not None:
            raise NotShared(f"{writer.name} writes in place to what K and V come from")
        role = {node: self.roles[node] for node in self.state.placeholders if node in visited and node in self.roles}
        aligned = [node for node, kind in role.items() if kind == "aligned"]
        ids = [node for node in aligned if len(shape(node)) == 2 and "pos" not in node.name]
        if not ids or self.flows.sizes(ids[0])[0] != self.flows.num_rows:
            raise NotShared("no token ids make its K and V")
        positions = [node.name for node in aligned if "pos" in node.name]
        everything = visited | (set() if self.static else self._visited(self._returned()))
        returns = self.flows.current = self.state.gm.graph.output_node()
        results, last = (b"", 0) if self.static else self._results(role)  # it may return counters, moved on
        used = {None, returns, *everything} if results else {None, *visited}
        read = {("totals", self.flows.past)} if self.static else set()  # where a call writes, the runtime reads anyway
        assumed = sorted(set().union(*(self.flows.assumed.get(node, ()) for node in used)) - read, key=str)
        flows = (self.flows.values.get(node) for node in everything)
        counted = (isinstance(flow, Flow) and flow.offset is not None for flow in flows)
        self.mixes = len(positions) > 1 or (bool(positions) and any(counted))
        return Sharing(
            ids=ids[0].name,
            positions=tuple(positions),
            others=tuple(node.name for node in aligned if node is not ids[0] and node.name not in positions),
            mask=self.attend.mask.name if self.attend.mask is not None else "",
            weights=tuple(node.name for node, kind in role.items() if kind == "weight"),
            whole=tuple(node.name for node, kind in role.items() if kind == "whole"),
            digest=how,
            starts=(self.creates or self.static) and self.flows.num_tokens > 1,
            order=order,
            windows=windows,
            zeros=tuple(size for kind, size in assumed if kind == "zeros"),
            totals=tuple(size for kind, size in assumed if kind == "totals"),
            results=results,
            last=last,
        )

    def _results(self, role: Mapping[Node, str]) -> tuple[bytes, int]:
        """What `Sharing` says of the graph's other results. role: of the inputs that K and V come from."""
        nodes = self._returned()
        try:
            flows = [self.flows.resolved(self.flows.of(node)) for node in nodes]
        except NotShared:
            return b"", 0
        visited = self._visited(nodes)
        inputs = [node for node in self.state.placeholders if node in visited and is_tensor(node)]
        if (
            any(TOKENS in label for flow in flows for label in flow.labels)
            or any(node not in role and self.roles.get(node) != "weight" for node in inputs)
            or self._writer(visited | set(self.state.placeholders)) is not None
        ):
            return b"", 0
        shapes = [
            [label or size for label, size in zip(flow.labels, self.flows.sizes(node))]
            for flow, node in zip(flows, nodes)
        ]
        sources = [source_name(node) for node in inputs]  # the names of nodes are not those of weights
        how = digest(shapes, sorted(sources), *(flow.digest for flow in flows))
        return how, max([1, *(flow.last for flow in flows)])

    def _returned(self) -> list[Node]:
        """What the graph returns besides caches."""
        kept = {output.position for site in self.state.sites for output in site.outputs}
        (returned,) = self.state.gm.graph.output_node().args
        return [node for i, node in enumerate(returned) if i not in kept]  # type: ignore[arg-type, misc]

    def _writer(self, nodes: set[Node]) -> Node | None:
        """What writes to one of `nodes` in place."""
        known = {site.node for site in self.state.attentions}  # some are stand-ins that have no schema
        known |= self.flows.written
        return next((node for node in Writers(self.state.gm.graph).all_of(nodes) if node not in known), None)

    def _visited(self, nodes: Iterable[Node]) -> set[Node]:
        visited: set[Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node not in visited:
                visited.add(node)
                pending += self.flows.operands.get(node, ())
        return visited

    def _input(self, node: Node) -> None:
        value, flows = node.meta.get("example_value"), self.flows
        if not isinstance(value, torch.Tensor) or node in flows.values:
            return
        if node in self.state.inputs:
            raise NotShared(f"the cache {node.name} is read by something else than an attention")
        if _is_weight(node):
            self.roles[node] = "weight"
            flows.values[node] = Flow(("",) * value.dim(), digest("weight", node.name))
            return
        sizes = flows.sizes(node)
        if value.dtype.is_floating_point or value.dtype.is_complex:
            if sizes:
                raise NotShared(f"the input {node.name} holds floating-point numbers, not token ids")
        elif sizes in ((flows.num_rows, flows.num_tokens), (1, flows.num_tokens), (flows.num_tokens,)):
            if len(sizes) == 1 and flows.num_rows == flows.num_tokens > 1:
                raise NotShared(f"the input {node.name} may run along the tokens or along the rows")
            self.roles[node] = "aligned"
            labels = flows.labelled(sizes, (BATCH, TOKENS)[2 - len(sizes) :])
            counted = "pos" in node.name and not self.told_apart
            how = digest("position", 0) if counted else digest("input", node.name)
            flows.values[node] = Flow(labels, how, varies=True)
            return
        if math.prod(sizes) > _SMALL:
            raise NotShared(f"the input {node.name} of shape {list(shape(node))} is not one number a token")
        self.roles[node] = "whole"
        flows.values[node] = Flow(("",) * len(sizes), digest("whole", node.name))


def _is_weight(node: Node) -> bool:
    """Whether an input is a parameter or a buffer of a module."""
    name = source_name(node)
    return node.type is torch.nn.Parameter or "._parameters[" in name or "._buffers[" in name
