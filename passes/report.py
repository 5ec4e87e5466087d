"""What the passes found, for people: one row per attention and per cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .base import AttentionSite, CacheSite, GraphState
from .tensors import shape

__all__ = ["GraphReport", "SiteReport", "report"]


@dataclass(frozen=True)
class SiteReport:
    """One attention of a graph, or one cache that no attention of it reads.

    site: its name. layout: the cache's axes, as "BHSD". form: how the cache comes about ("append by cat", "create by
    cat", "create by returned", "read by input"). attention: how it is spelled ("sdpa", "by hand: softcap 50, sinks",
    "flex_attention"). mask: what was proven of the mask. paged: whether K and V live in pages. reason: why not, or what
    still reads a dense copy of them. bytes_per_token: of its caches.
    """

    site: str
    layout: str
    form: str
    attention: str
    mask: str
    paged: bool
    reason: str
    bytes_per_token: int

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class GraphReport:
    """Everything found in one graph.

    groups: how many block tables serve it. passes: (name, matches, seconds) of each. note: why the whole graph was left
    un-paged, if it was.
    """

    sites: tuple[SiteReport, ...]
    groups: int = 0
    passes: tuple[tuple[str, int, float], ...] = ()
    note: str = ""


def report(state: GraphState) -> GraphReport:
    """The report of a finished pipeline."""
    rows = [_attention_row(attention) for attention in state.attentions]
    read = {id(site) for attention in state.attentions for site in (attention.key, attention.value)}
    rows += [_cache_row(site) for site in state.sites if id(site) not in read]
    history = tuple((result.name, result.matches, result.seconds) for result in state.history)
    return GraphReport(tuple(rows), len(state.groups), history)


def _attention_row(attention: AttentionSite) -> SiteReport:
    sites = [site for site in (attention.key, attention.value) if site is not None]
    reason = attention.reason or "; ".join(f"{site.name}: {site.reason}" for site in sites if site.reason)
    created = bool(sites) and sites[0].kind == "create"
    mask = "as written (dense over the new tokens)" if created else attention.mask.proof if attention.mask else ""
    layout = sites[0].axes if sites else ""
    form = f"{sites[0].kind} by {sites[0].form}" if sites else ""
    size = sum(map(_token_bytes, sites))
    return SiteReport(attention.node.name, layout, form, attention.form, mask, attention.paged, reason, size)


def _cache_row(site: CacheSite) -> SiteReport:
    reason = f"{site.name}: {site.reason}" if site.reason else ""
    return SiteReport(site.name, site.axes, f"{site.kind} by {site.form}", "", "", True, reason, _token_bytes(site))


def _token_bytes(site: CacheSite) -> int:
    value = site.node.meta["example_value"]
    sizes = shape(site.node)
    return int(sizes[site.axes.index("H")]) * int(sizes[site.axes.index("D")]) * value.dtype.itemsize
