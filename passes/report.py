"""What the passes found, for people: one row per attention and per cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from torch.fx import Node

from .advice import advise
from .base import GraphState
from .sites import AttentionSite, CacheSite
from .tensors import shape

__all__ = ["CacheReport", "GraphReport", "SiteReport", "layer_of", "report"]


@dataclass(frozen=True)
class SiteReport:
    """One attention of a graph, or one cache that no attention of it reads.

    site: its name. layout: the cache's axes, as "BHSD". form: how the cache comes about ("append by cat", "create by
    cat", "create by returned", "read by input"). attention: how it is spelled ("sdpa", "by hand: softcap 50, sinks",
    "flex_attention"), "" for a cache. mask: what was proven of the mask. paged: whether K and V live in pages. reason:
    why not, or what still reads a dense copy of them. bytes_per_token: of its caches. advice: what would remove the
    reason. layer: the module it belongs to, or its name. reads: names of the caches that it reads
    (`GraphReport.caches`). rounded: the dtype that the tokens of its caches are rounded to, or "".
    """

    site: str
    layout: str
    form: str
    attention: str
    mask: str
    paged: bool
    reason: str
    bytes_per_token: int
    advice: str = ""
    layer: str = ""
    reads: tuple[str, ...] = ()
    rounded: str = ""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class CacheReport:
    """One cached tensor of a graph that lives in pages.

    name, layer: as in `SiteReport`. group: which block table serves it, counted from 0. role: "key", "value" or "".
    kind: "append", "create", "static", "slide" or "read". bytes_per_token: of one token. reason: what still reads a
    dense copy of it, or "". rounded: the dtype that its tokens are rounded to, or "".
    """

    name: str
    layer: str
    group: int
    role: str
    kind: str
    bytes_per_token: int
    reason: str
    rounded: str = ""


@dataclass(frozen=True)
class GraphReport:
    """Everything found in one graph.

    groups: how many block tables serve it. passes: (name, matches, seconds) of each. note: why the whole graph was left
    un-paged, if it was. caches: every cached tensor in pages. sharing: why equal prefixes do not share blocks, or "".
    """

    sites: tuple[SiteReport, ...]
    groups: int = 0
    passes: tuple[tuple[str, int, float], ...] = ()
    note: str = ""
    caches: tuple[CacheReport, ...] = ()
    sharing: str = ""

    @property
    def advice(self) -> str:
        """What would remove the note."""
        return advise(self.note)


def report(state: GraphState) -> GraphReport:
    """The report of a finished pipeline."""
    rows = [_attention_row(attention) for attention in state.attentions]
    read = {id(site) for attention in state.attentions for site in (attention.key, attention.value)}
    rows += [_cache_row(site) for site in state.sites if id(site) not in read]
    history = tuple((result.name, result.matches, result.seconds) for result in state.history)
    caches = [
        CacheReport(
            site.name,
            layer_of(site.new or site.node, site.name),
            g,
            site.role,
            site.kind,
            _token_bytes(site),
            site.reason,
            _rounded([site]),
        )
        for g, group in enumerate(state.groups)
        for site in group.sites
    ]
    sharing = state.sharing.reason if state.sharing is not None else ""
    return GraphReport(tuple(rows), len(state.groups), history, caches=tuple(caches), sharing=sharing)


def layer_of(node: Node, otherwise: str = "") -> str:
    """The module that a node belongs to, as "model.layers.0.self_attn"; else `otherwise`, or the node's name."""
    stack = node.meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if stack else ""
    path = re.sub(r"^L\['\w+'\](\.__self__)?\.?", "", path)
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path) or otherwise or node.name


def _attention_row(attention: AttentionSite) -> SiteReport:
    sites = [site for site in (attention.key, attention.value) if site is not None]
    reason = attention.reason or "; ".join(f"{site.name}: {site.reason}" for site in sites if site.reason)
    created = bool(sites) and sites[0].kind == "create"
    mask = "as written (dense over the new tokens)" if created else attention.mask.proof if attention.mask else ""
    layout = sites[0].axes if sites else ""
    form = f"{sites[0].kind} by {sites[0].form}" if sites else ""
    size = sum(map(_token_bytes, sites))
    layer = layer_of(attention.result)
    reads = tuple(site.name for site in sites)
    name, spelling, paged = attention.node.name, attention.form, attention.paged
    return SiteReport(
        name, layout, form, spelling, mask, paged, reason, size, advise(reason), layer, reads, _rounded(sites)
    )


def _cache_row(site: CacheSite) -> SiteReport:
    reason = f"{site.name}: {site.reason}" if site.reason else ""
    form, layer = f"{site.kind} by {site.form}", layer_of(site.new or site.node, site.name)
    size = _token_bytes(site)
    facts = ("", "", True, reason, size, advise(reason), layer, (site.name,), _rounded([site]))
    return SiteReport(site.name, site.axes, form, *facts)


def _token_bytes(site: CacheSite) -> int:
    value = site.node.meta["example_value"]
    if site.stored is not None:
        block = site.stored.sizes
        return prod(block) // block[-2] * site.stored.dtype.itemsize
    sizes = shape(site.node)
    return int(sizes[site.axes.index("H")]) * int(sizes[site.axes.index("D")]) * value.dtype.itemsize


def _rounded(sites: Sequence[CacheSite]) -> str:
    stored = [site.stored for site in sites if site.stored is not None and site.stored.packed]
    return str(stored[0].dtype).removeprefix("torch.") if stored else ""
