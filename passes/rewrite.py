"""Rewrite: caches become writes into pages, attention reads pages, and the dense cache tensors vanish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import sympy
import torch
from torch import SymInt
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from .. import ops
from .._layout import ArenaLayout
from .base import GraphState, NewInput, Pass
from .emit import Emitter
from .mask_effects import Writers
from .masks import MaskSpec
from .prune import prune
from .sites import AttentionSite, CacheGroupSites, CacheSite
from .static_reads import StaticReads
from .streams import wait_for_layers
from .symbols import fake_like, fresh_size, size_node
from .tensors import argument, expr, hint, is_call, shape

__all__ = ["ArenaLayouts", "Rewrite"]

ArenaLayouts = Callable[[CacheSite], ArenaLayout]


class Rewrite(Pass):
    """Replace cache concatenations and the attention on them by the paged operations.

    `arena_layout(site)` says how a created site's arena is stored. streams: steps of several tokens may wait for the
    old ones layer by layer.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        block_size: int,
        arena_layout: ArenaLayouts,
        streams: bool = True,
    ) -> None:
        self._mode = fake_mode
        self._block_size = block_size
        self._arena_layout = arena_layout
        self._streams = streams
        self._masks: dict[tuple[Node, Node], Node] = {}
        self._reads = StaticReads()
        self._group_of: dict[int, CacheGroupSites] = {}
        self._starts: dict[sympy.Symbol, sympy.Expr] = {}
        self._windows: dict[tuple[object, ...], Node] = {}

    def apply(self, state: GraphState) -> int:
        graph = state.gm.graph
        self._writers = Writers(graph)  # what is inserted from here on writes to arenas only
        plans: dict[int, Node] = {}
        arenas: dict[int, Node] = {}
        for g, group in enumerate(state.groups):
            tables = self._add_inputs(state, g, group, arenas)
            for site in group.sites:
                plans[id(site)] = tables
                self._group_of[id(site)] = group
        for g, group in enumerate(state.groups):
            if group.streams:
                wait_for_layers(state, g, plans)
            for site in group.sites:
                if site.kind != "read":
                    self._write(graph, site, arenas[id(site)], plans[id(site)])
        for attention in state.attentions:
            if attention.paged and attention.key is not None and attention.key.kind != "create":
                self._attend(graph, attention, arenas, plans[id(attention.key)])
        self._drop_outputs(state)
        prune(graph)
        alive = set(graph.nodes)
        for site in state.sites:
            if site.kind != "create" and site.node in alive:
                self._densify(graph, site, arenas[id(site)], plans[id(site)])
        prune(graph)  # slices of buffers that slid
        for past in {site.past for site in state.sites if site.past is not None}:
            graph.erase_node(past)
        for site in state.sites:
            if site.kind == "static" and site.past is None:  # the zeros that it began as
                graph.erase_node(site.node)
        state.gm.recompile()
        return len(state.sites) + sum(attention.paged for attention in state.attentions)

    # -- inputs ----------------------------------------------------------------------------------------------

    def _add_inputs(self, state: GraphState, g: int, group: CacheGroupSites, arenas: dict[int, Node]) -> Node:
        """Placeholders for the group's table, lengths and arenas, and the node that makes its plan of them."""
        graph = state.gm.graph
        lead = group.sites[0]
        env = self._mode.shape_env
        device = lead.node.meta["example_value"].device
        batch = lead.size("B")
        one_query = any(
            attention.key in group.sites and attention.paged and hint(attention.num_queries) == 1
            for attention in state.attentions
        )
        kernels = ops.uses_kernels(device)
        decodes = one_query and not kernels
        several = hint(lead.new_tokens) > 1 and hint(batch) > 0 and not one_query
        group.streams = self._streams and group.kind == "append" and several and device.type == "cpu"
        shares = one_query and kernels and group.kind in ("append", "read")
        width, blocks = fresh_size(env, f"pi_width_{g}", 8 + g), fresh_size(env, f"pi_blocks_{g}", 64 + g)
        after = state.placeholders[-1]
        created: list[Node] = []

        def add(kind: str, site: int, value: torch.Tensor | SymInt) -> Node:
            with graph.inserting_after(created[-1] if created else after):
                node = graph.placeholder(f"paged_{kind}_{g}_{site}")
            node.meta["example_value"] = value
            node._dynamo_source = ConstantSource(node.name)  # type: ignore[attr-defined]  # AOTAutograd demands one
            created.append(node)
            state.new_inputs.append(NewInput(kind, g, site, node))
            return node

        table = add("table", 0, fake_like((batch, width), (width, 1), torch.int32, device, self._mode))
        lens = add("lens", 0, fake_like((batch,), (1,), torch.int32, device, self._mode))
        stop = lead.size("S")
        if group.kind == "static":
            start = next((site.start.size for site in group.sites if site.start and site.start.size is not None), None)
            if start is None:
                stop = fresh_size(env, f"pi_extent_{g}", 48 + g)
                add("extent", 0, stop)
            else:
                stop = start + lead.new_tokens
            all_lens = add("written_lens", 0, fake_like((batch,), (1,), torch.int32, device, self._mode))
            written = add("written", 0, fresh_size(env, f"pi_written_{g}", 96 + g))
            row_start = add("row_start", 0, fresh_size(env, f"pi_row_start_{g}", 224 + g)) if kernels else 0
        chunks = []
        if decodes:
            for n, kind in enumerate(("num_chunks", "row_chunks")):
                chunks.append(add(kind, 0, fresh_size(env, f"pi_{kind}_{g}", 16 + 2 * g + n)))
        options: dict[str, Node] = {}
        if shares:
            options["shared_prefix"] = add("shared_prefix", 0, fresh_size(env, f"pi_shared_prefix_{g}", 160 + g))
        for i, site in enumerate(group.sites):
            facts = state.inputs.get(site.past) if site.past is not None else None
            layout = site.stored = facts.arena if facts else self._arena_layout(site)
            value = fake_like((blocks, *layout.sizes), layout.strides, layout.dtype, device, self._mode)
            arenas[id(site)] = add("arena", i, value)
            block_size = facts.block_size if facts else self._block_size  # of all sites
        with graph.inserting_after(created[-1]):
            anchor = graph.call_function(ops.plan_step, ())
        with graph.inserting_before(anchor):
            kv_len = size_node(graph, stop)
            new_tokens = size_node(graph, lead.new_tokens)
        anchor.args = (table, lens, kv_len, new_tokens, block_size, *chunks)
        anchor.kwargs = {**options}
        if group.start is not None:
            self._reads.whole[anchor] = ((table, all_lens, written, new_tokens, block_size, *chunks), row_start)
            self._starts[group.start] = expr(stop) - expr(lead.new_tokens)
        return anchor

    # -- bodies ----------------------------------------------------------------------------------------------

    @staticmethod
    def _write(graph: Graph, site: CacheSite, arena: Node, plan: Node) -> None:
        source = site.node if site.kind == "create" else site.new
        before = site.write or site.node
        assert source is not None
        place = graph.inserting_after(source) if site.kind == "create" else graph.inserting_before(before)
        with place:
            write = graph.call_function(ops.cache_write, (arena, source, plan))
        if site.write is not None and site.write is not site.node:
            graph.erase_node(site.write)
            site.write = write
        for node in site.obsolete:
            graph.erase_node(node)
        if site.axes == "BSHD":
            with graph.inserting_before(write):
                write.args = (arena, graph.call_method("transpose", (source, 1, 2)), plan)

    def _plan_mask(self, graph: Graph, mask: Node | None, plan: Node) -> Node | None:
        """The mask as attention takes it: worked out once for all layers that share it."""
        if mask is None:
            return None
        known = self._masks.get((mask, plan))
        if known is None:
            known = graph.call_function(ops.plan_mask, (mask, plan))
            if not self._writers.of([mask]):  # else it may change between two layers
                self._masks[mask, plan] = known
        return known

    def _with_starts(self, mask: MaskSpec, attention: AttentionSite) -> MaskSpec:
        """The bounds of a mask in terms of the graph's inputs; none if they only say that one query sees all keys that
        were written."""
        if mask.causal_offset is None:
            return mask
        offset = sympy.expand(mask.causal_offset.xreplace(self._starts))
        window = sympy.sympify(mask.window).xreplace(self._starts) if mask.window is not None else None
        last = [start + expr(attention.key.new_tokens) - 1 for start in self._starts.values()]  # type: ignore[union-attr]
        if window is None and hint(attention.num_queries) == 1 and any(sympy.expand(offset - key) == 0 for key in last):
            return replace(mask, causal_offset=None)
        return replace(mask, causal_offset=offset, window=window)

    def _plan_window(self, graph: Graph, mask: MaskSpec, plan: Node, options: dict[str, object]) -> Node:
        """The plan of one query's bounds: worked out once for all layers that share them."""
        key = (plan, mask.causal_offset, mask.window)
        if key not in self._windows:
            bounds = (options["causal_offset"], options.get("window"))
            self._windows[key] = graph.call_function(ops.plan_window, (plan, *bounds))
        return self._windows[key]

    def _attend(self, graph: Graph, attention: AttentionSite, arenas: dict[int, Node], plan: Node) -> None:
        assert attention.key is not None and attention.value is not None and attention.mask is not None
        mask, mask_tensor = attention.mask, attention.mask.tensor
        query = argument(attention.node, 0, "query")  # as it is now: it may be an attention that was rewritten before
        head_dim = shape(query)[3]
        emit = Emitter(graph, attention.node)
        if attention.tiled:
            heads = int(attention.key.size("H"))
            query = _regrouped(emit, query, attention.tiled, heads)
            if mask_tensor is not None and len(shape(mask_tensor)) == 4 and shape(mask_tensor)[1] != 1:
                mask_tensor = _regrouped(emit, mask_tensor, attention.tiled, heads)
        with graph.inserting_before(attention.node):
            options: dict[str, object] = {
                "scale": attention.scale if attention.scale is not None else float(hint(head_dim)) ** -0.5
            }
            one_query = hint(attention.num_queries) == 1
            if attention.softcap is not None:
                options["softcap"] = attention.softcap
            if attention.sinks is not None:
                options["sinks"] = attention.sinks
            if attention.key.kind == "static":
                start = self._group_of[id(attention.key)].start
                assert start is not None
                plan, mask_tensor = self._reads.plan(graph, attention, plan, start)
                mask = self._with_starts(mask, attention)
            if mask_tensor is not None and mask.tensor is None:  # the mask as it was written says it all
                mask = MaskSpec(None, None, False, mask_tensor, mask.proof)
            if mask.causal_offset is not None and not (mask.tensor is not None and one_query and mask.window is None):
                options["causal_offset"] = size_node(graph, mask.causal_offset)
            if mask.window is not None and "causal_offset" in options:
                options["window"] = size_node(graph, mask.window)
            if one_query and "causal_offset" in options:
                plan = self._plan_window(graph, mask, plan, options)
            node = graph.call_function(
                ops.attention,
                (
                    query,
                    arenas[id(attention.key)],
                    arenas[id(attention.value)],
                    plan,
                    self._plan_mask(graph, mask_tensor, plan),
                ),
                options,
            )
        node.meta = dict(attention.node.meta)
        if attention.tiled:
            node = _regrouped(emit, node, heads, attention.tiled)
        dtypes = [value.meta["example_value"].dtype for value in (query, attention.node)]
        if dtypes[0] != dtypes[1]:  # autocast rounds what attention takes, and so what it returns
            node = emit.method("to", node, dtypes[1])
        attention.node.replace_all_uses_with(node)
        graph.erase_node(attention.node)
        attention.node = node

    @staticmethod
    def _drop_outputs(state: GraphState) -> None:
        """The runtime returns handles in the caches' places; the graph returns the rest."""
        handles = {kept.position for site in state.sites if site.kind != "read" for kept in site.outputs}
        state.dense_outputs = [i for i in range(len(state.outputs)) if i not in handles]
        outputs = state.outputs
        state.gm.graph.output_node().args = (tuple(outputs[i] for i in state.dense_outputs),)

    @staticmethod
    def _answer_sizes(graph: Graph, site: CacheSite) -> None:
        """Who asks for a size of a cache is no reader of it."""
        for user in list(site.node.users):
            size = user.meta.get("example_value")
            if is_call(user, (), ("size", "dim", "numel")) and isinstance(size, (int, SymInt)):
                with graph.inserting_before(user):
                    user.replace_all_uses_with(size_node(graph, size))  # type: ignore[arg-type]
                graph.erase_node(user)

    def _densify(self, graph: Graph, site: CacheSite, arena: Node, plan: Node) -> None:
        """Whoever still reads the dense cache gets a copy of the pages."""
        self._answer_sizes(graph, site)
        users = list(site.node.users)
        if users:
            site.reason = f"{users[0].name} reads it whole"
            after = plan if site.kind == "read" else site.write
            with graph.inserting_before(site.node if after in (None, site.node) else after.next):
                if site.kind == "static":
                    plan = self._reads.whole_plan(graph, plan, site.size("S"))
                dense = graph.call_function(ops.gather, (arena, plan, site.node.meta["example_value"].dtype))
            if site.axes == "BSHD":
                with graph.inserting_after(dense):
                    dense = graph.call_method("transpose", (dense, 1, 2))
            dense.meta = dict(site.node.meta)
            for user in users:
                user.replace_input_with(site.node, dense)
        if site.node is not site.past and (site.past is not None):
            graph.erase_node(site.node)


def _regrouped(emit: Emitter, node: Node, outer: int, inner: int) -> Node:
    """[B, outer * inner, ...] with its second dimension in the order inner * outer."""
    parts = emit.method("unflatten", node, 1, (outer, inner))
    return emit.method("flatten", emit(torch.transpose, parts, 1, 2), 1, 2)
