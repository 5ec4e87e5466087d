"""`explain()`: what was found in a model's graphs, what is paged, and why the rest is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn

from . import reports
from ._errors import PatchError
from ._layout import KV_DTYPES
from .compiling import compile_paged
from .passes import GraphReport, SiteReport
from .patch import PagedForward, is_paged

__all__ = ["Explanation", "explain"]

JSON_VERSION = 1
_COLUMNS = ("graph", "site", "layout", "cache", "attention", "mask", "paged", "bytes/token", "why")


@dataclass(frozen=True)
class Explanation:
    """One `GraphReport` per compiled graph. `print` it for a table; `.sites` lists all sites of all graphs."""

    graphs: tuple[GraphReport, ...]

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        """One row per attention of a graph, and per cache that no attention of it reads."""
        return tuple(site for graph in self.graphs for site in graph.sites)

    def as_json(self) -> str:
        """All reports: {"version": 1, "graphs": [...]}, a graph having the fields of `GraphReport` and its `advice`.
        The version changes when a field loses or changes its meaning, not when one is added."""
        graphs = [{**asdict(graph), "advice": graph.advice} for graph in self.graphs]
        return json.dumps({"version": JSON_VERSION, "graphs": graphs}, indent=1)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the caches of every graph, and which attention reads them, into a file (its ending says the format).

        Boxes are cache groups; a line of one is a layer's K and V, and leads to the attention that reads it, with its
        mask. Green is paged, yellow a paged cache that something still reads as a dense copy, red dense. At most the
        last four graphs are drawn. Raises `MissingExtraError` without matplotlib.
        """
        from .plot import draw

        draw(self.graphs, path)

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph was compiled: the call ran eagerly, or was not made yet"
        rows: list[Sequence[str]] = [_COLUMNS]
        for number, graph in enumerate(self.graphs, 1):
            if graph.note:
                rows.append((str(number), "(whole graph)", "", "", "", "", "no", "", graph.note))
            rows += [(str(number), *_cells(site)) for site in graph.sites]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        paged = sum(site.paged for site in self.sites)
        advice = {
            text for graph in self.graphs for text in (graph.advice, *(site.advice for site in graph.sites)) if text
        }
        lines += [
            f"graph {number} does not share prefixes: {graph.sharing}"
            for number, graph in enumerate(self.graphs, 1)
            if graph.sharing
        ]
        rounded = {site.rounded for site in self.sites if site.rounded}
        lines += [
            f'tokens are rounded: kv_dtype="{name}". Attention is not that of a dense cache to the bit'
            for name, dtype in KV_DTYPES.items()
            if str(dtype).removeprefix("torch.") in rounded
        ]
        lines += [f"to page more: {text}" for text in sorted(advice)]
        lines.append(f"{paged} of {len(self.sites)} sites paged in {len(self.graphs)} graph(s)")
        return "\n".join(lines)


def _cells(site: SiteReport) -> tuple[str, ...]:
    paged = "yes" if site.paged else "no"
    return (
        site.site,
        site.layout,
        site.form,
        site.attention,
        site.mask,
        paged,
        str(site.bytes_per_token or ""),
        site.reason,
    )


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What the passes find in `model`.

    With arguments, the model is called once with them, without gradients, through a fresh compilation of its own
    (graphs run eagerly, so it is quick); caches among the arguments are used as any call would use them. Without
    arguments, `model` must be paged: all its graphs compiled since `page` are explained, and no other model's.
    """
    if not args and not kwargs and isinstance(model, nn.Module) and is_paged(model):
        return Explanation(tuple(model.forward.reports))  # type: ignore[attr-defined]
    if not args and not kwargs:
        raise PatchError(
            f"explain() got {type(model).__name__} without arguments, and it is not paged: pass the arguments of a "
            "call, or page(model) and let it run first"
        )
    function = model
    if isinstance(model, nn.Module):
        function = type(model).forward.__get__(model) if isinstance(model.forward, PagedForward) else model.forward
    with reports.collect() as found, torch.no_grad():
        compile_paged(function, {"inner": "eager", "label": "explain"})(*args, **kwargs)
    return Explanation(tuple(found))
