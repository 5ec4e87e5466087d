"""`Explanation.plot(path)`: a picture of the caches of each graph and of the attention that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from ._errors import missing_extra
from .passes.report import CacheReport, GraphReport, SiteReport

__all__ = ["draw"]

PAGED, CACHE_ONLY, DENSE = "#2e9e5b", "#e0a526", "#c94f4f"
MEANING = {PAGED: "paged", CACHE_ONLY: "cache paged, a dense copy is read", DENSE: "dense"}
_MOST_GRAPHS, _LONGEST = 4, 46
_WIDTH, _ROW = 6.4, 0.27  # inches of a graph, and of a line
_CACHES, _ATTENTION = (0.01, 0.46), (0.58, 0.99)  # horizontal spans of the two columns

Line = tuple[int, str]
"""A line of a group's box: group and layer."""


def draw(graphs: Sequence[GraphReport], path: str | PathLike[str]) -> None:
    """Draw `graphs` side by side into the file `path`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("Explanation.plot()", "matplotlib", "plot") from error
    shown = list(enumerate(graphs, 1))[-_MOST_GRAPHS:]
    rows = max((_height(graph) for _, graph in shown), default=1)
    figure = Figure(figsize=(_WIDTH * max(1, len(shown)), _ROW * rows + 0.9), layout="constrained")
    axes = figure.subplots(1, max(1, len(shown)), squeeze=False)[0]
    for panel in axes:
        panel.set(xlim=(0, 1), ylim=(rows, 0))
        panel.axis("off")
    for panel, (number, graph) in zip(axes, shown):
        panel.set_title(f"graph {number} of {len(graphs)}", fontsize=10, loc="left")
        _panel(panel, graph)
    handles = [axes[0].scatter([], [], color=colour, marker="s", label=text) for colour, text in MEANING.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(MEANING), frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def _lines(graph: GraphReport) -> dict[Line, list[CacheReport]]:
    lines: dict[Line, list[CacheReport]] = {}
    for cache in graph.caches:
        lines.setdefault((cache.group, cache.layer), []).append(cache)
    return dict(sorted(lines.items(), key=lambda item: item[0][0]))


def _height(graph: GraphReport) -> int:
    """Lines that a graph needs: one per layer, two per group, and those of attention that reads no cache."""
    alone = sum(not site.reads for site in graph.sites)
    return len(_lines(graph)) + 2 * graph.groups + alone + bool(graph.note)


def _panel(panel: Any, graph: GraphReport) -> None:
    at: dict[str, float] = {}
    y, group = 0.2, -1
    lines = _lines(graph)
    for (number, layer), caches in lines.items():
        if number != group:
            y, group = y + (0.9 if group >= 0 else 0.0), number
            members = [cache for line, found in lines.items() if line[0] == number for cache in found]
            count = sum(line[0] == number for line in lines)
            _box(panel, y, count + 1, f"group {number}: {sum(c.bytes_per_token for c in members)} B/token")
            y += 1.0
        colour = CACHE_ONLY if any(cache.reason for cache in caches) else PAGED
        sizes = " + ".join(f"{(cache.role or 'cache')[0].upper()} {cache.bytes_per_token}" for cache in caches)
        _text(panel, _CACHES[0] + 0.02, y + 0.5, _short(layer, 30), colour)
        panel.text(_CACHES[1] - 0.01, y + 0.5, sizes, fontsize=8, va="center", ha="right", color="#444444")
        for cache in caches:
            at.setdefault(cache.name, y + 0.5)  # an input may be both extended and read as it came
        y += 1.0
    y += 0.9
    taken: dict[float, int] = {}
    for site in graph.sites:
        if site.attention:
            y = _attention(panel, site, at, taken, y)
    if graph.note:
        panel.text(0.0, y + 0.5, _short(graph.note, 90), fontsize=8, va="center", color=DENSE)


def _attention(panel: Any, site: SiteReport, at: dict[str, float], taken: dict[float, int], free: float) -> float:
    """One attention, level with the caches that it reads, or on the next free line; returns the new free line."""
    sources = sorted({at[name] for name in site.reads if name in at})
    place = free + 0.5 if not sources else sources[0]
    colour = DENSE if not sources else PAGED if site.paged and not site.reason else CACHE_ONLY
    again = taken.get(place, 0)  # layers that share a cache
    taken[place] = again + 1
    for source in sources:
        panel.plot([_CACHES[1], _ATTENTION[0]], [source, place + 0.25 * again], color=colour, linewidth=1.0)
    label = f"mask: {site.mask}" if site.mask else site.reason
    if site.attention != "sdpa":
        label = f"{site.attention}, {label}"
    if not sources:
        label = f"{_short(site.layer, 20)}: {label}"
    if not again:
        _text(panel, _ATTENTION[0] + 0.02, place, _short(label, _LONGEST), colour)
    return free if sources else free + 1.0


def _box(panel: Any, y: float, height: float, title: str) -> None:
    from matplotlib.patches import Rectangle

    width = _CACHES[1] - _CACHES[0]
    panel.add_patch(Rectangle((_CACHES[0], y), width, height, facecolor="#f3f5f8", edgecolor="#8a94a6", linewidth=0.8))
    panel.text(_CACHES[0] + 0.01, y + 0.5, title, fontsize=8.5, va="center", fontweight="bold", color="#333a47")


def _text(panel: Any, x: float, y: float, text: str, colour: str) -> None:
    panel.scatter([x - 0.008], [y], color=colour, marker="s", s=26)
    panel.text(x + 0.008, y, text, fontsize=8, va="center")


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
