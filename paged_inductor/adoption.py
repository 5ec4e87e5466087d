"""The first call of a graph with dense static caches: it runs as captured, and then the caches become handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from .passes import CacheSite
from .runtime import SiteSpec
from .tensor import PagedTensor
from .tensor.adopt import Buffer, adopt, refusal

__all__ = ["AdoptingProgram"]


class AdoptingProgram:
    """Runs a captured graph on dense tensors, and turns the static caches among them into handles, in place.

    The next call finds handles where the buffers were, so that Dynamo captures the graph anew. Caches that cannot be
    turned stay dense, and the graph is compiled as it is.
    """

    def __init__(
        self,
        gm: GraphModule,
        sites: Sequence[CacheSite],
        spec: Callable[[CacheSite], SiteSpec],
        block_size: int,
        label: str,
        compile_dense: Callable[..., Callable[..., Any]],
        compile_paged: Callable[[Sequence[Any]], Callable[..., Any]],
    ) -> None:
        """sites: the caches to be turned. compile_dense, compile_paged: compile the captured graph for the inputs of a
        call; the first reports why, the second is for handles."""
        position = {node.name: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self._gm = gm
        self._block_size = block_size
        self._label = label
        self._compile_dense = compile_dense
        self._compile_paged = compile_paged
        self._dense: Callable[..., Any] | None = None
        self._paged: Callable[..., Any] | None = None
        self._inputs: list[tuple[int, str, SiteSpec]] = []
        self._outputs: list[tuple[int, str, SiteSpec]] = []
        for site in sites:
            if site.functional:
                places = [kept.position for kept in site.outputs if kept.stop is None]
                self._outputs += [(place, site.axes, spec(site)) for place in places[:1]]
            else:
                self._inputs.append((position[site.node.name], site.axes, spec(site)))

    def __call__(self, *args: Any) -> Any:
        if self._inputs and all(isinstance(args[i], PagedTensor) for i, *_ in self._inputs):
            if self._paged is None:  # guards of torch 2.11 do not notice that a module's buffers have become handles
                self._paged = self._compile_paged(args)
            return self._paged(*args)
        if self._dense is not None:
            return self._dense(*args)
        results = self._gm(*args)
        reason = self._adopt(args, self._inputs) or self._adopt(results, self._outputs)
        if reason:
            self._dense = self._compile_dense(args, note=f"a static cache stays dense: {reason}")
        return results

    def _adopt(self, values: Sequence[Any], places: Sequence[tuple[int, str, SiteSpec]]) -> str:
        """Turn all buffers, or none of them: why not."""
        groups: dict[object, list[Buffer]] = {}
        for i, axes, spec in places:
            value: Tensor = values[i]
            if reason := refusal(value):
                return reason
            sizes = tuple(value.shape[axes.index(axis)] for axis in "BS")
            groups.setdefault((*sizes, value.device), []).append(Buffer(value, axes, spec))
        for buffers in groups.values():
            adopt(buffers, self._block_size, self._label)
        return ""
