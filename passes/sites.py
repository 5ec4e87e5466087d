"""What passes find in a graph: caches, and the attention that reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch
from torch import SymInt
from torch.fx import Node

from .._layout import ArenaLayout
from .flex import Lowered
from .hand_written import HandWritten
from .masks import MaskSpec

__all__ = ["AttentionSite", "CacheGroupSites", "CacheSite", "KeptOutput", "PagedInput", "Start"]


@dataclass(frozen=True)
class PagedInput:
    """What is known of a graph input that is a paged tensor.

    axes: order of its dimensions, as "BHSD". arena: how its arena is stored. site: its position among the tensors of
    its cache group. cache: names the batch it belongs to; inputs with equal `cache` have equal rows and lengths.
    static: it is a buffer of a maximal length that is written in place; full: to its end.
    """

    axes: str
    heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    arena: ArenaLayout
    site: int
    cache: object
    static: bool = False
    full: bool = False


@dataclass(frozen=True)
class KeptOutput:
    """A graph output that is a cache, or positions `first .. stop-1` of its sequence.

    position: among the graph's outputs. text: how the slice was written, "" for the whole.
    """

    position: int
    first: int | SymInt = 0
    stop: int | SymInt | None = None
    text: str = ""


@dataclass(frozen=True)
class Start:
    """Where a step writes into a static cache: consecutive positions, of which this says the first.

    size: a number that the graph computes from its integer inputs, or else node: a tensor of the graph, which holds the
    positions, or (scalar) the first one.
    """

    size: int | SymInt | None = None
    node: Node | None = None
    scalar: bool = False


@dataclass
class CacheSite:
    """A K or V cache of the graph.

    kind: "append" (paged input, new tokens are joined to it), "create" (a dense tensor born here that the program
        keeps), "static" (a buffer of a maximal length, paged input or born here, that new tokens are written into),
        "slide" (a full buffer, paged input, that new tokens push the oldest out of), or "read" (paged input that is
        read without being extended).
    node: the tensor that holds old and new tokens; past: the paged input; new: the new tokens, laid out as `axes`.
    form: what made `node`, for people ("cat", "returned", "input").
    role: "key", "value" or "" when no attention of this graph reads it. outputs: what the program keeps of it.
    Of static caches, write: the node that writes `new` (which is `node` itself if the write is functional), start: to
    where, parts: slices of the first positions that are read, adopted: it came in dense, and is to become paged. Of
    sliding ones, base_stop: how many positions must have been written before. obsolete: nodes that go with the write.
    stored: how its tokens are kept in pages, once that is known.
    """

    kind: str
    node: Node
    axes: str
    form: str
    past: Node | None = None
    new: Node | None = None
    role: str = ""
    outputs: list[KeptOutput] = field(default_factory=list)
    reason: str = ""  # what still reads a dense copy, if anything does
    write: Node | None = None
    start: Start | None = None
    parts: list[Node] = field(default_factory=list)
    adopted: bool = False
    base_stop: int | SymInt = 0
    obsolete: list[Node] = field(default_factory=list)
    stored: ArenaLayout | None = None

    @property
    def nodes(self) -> list[Node]:
        """The nodes that attention may read."""
        return [self.node, *self.parts]

    @property
    def functional(self) -> bool:
        """Whether a static cache is written by making a new one."""
        return self.kind == "static" and self.write is self.node

    @property
    def name(self) -> str:
        """What people call it: the paged input's name, or that of the tensor born here."""
        return (self.past or self.node).name

    @property
    def new_tokens(self) -> int | SymInt:
        """Tokens per row that a step writes here."""
        if self.kind == "create":
            return self.size("S")
        return 0 if self.new is None else self.new.meta["example_value"].shape[self.axes.index("S")]

    def size(self, axis: str) -> int | SymInt:
        """Size of `node` along "B", "H", "S" or "D"."""
        return self.node.meta["example_value"].shape[self.axes.index(axis)]


@dataclass
class CacheGroupSites:
    """Cache sites whose lengths move together: one block table serves them all. start: stands for the first position
    that a step writes, if they are static. streams: the graph waits for each layer's old tokens before it touches them,
    so that a step may begin without."""

    kind: str
    sites: list[CacheSite]
    start: sympy.Symbol | None = None
    streams: bool = False


@dataclass
class AttentionSite:
    """An attention of the graph. `paged` once it is certain to read pages; else `reason` says why not.

    `key` and `value` are the cache sites it reads, if K and V are caches; `candidates` are (node, axes) of K and of V,
    traced back through head repetition and transposition; `scale` is None for the default 1/sqrt(D); `form` is how the
    attention is spelled, for people. Those spelled `by_hand` are one node only once `NormalizeAttention` has made them
    one: `query`, the scale and the mask have their meaning from then on. `tiled`: query head h reads key head h % H,
    where there are H and `tiled` times as many query heads (0: the usual order, h // (number of heads / H)).
    """

    node: Node
    query: Node
    num_queries: int | SymInt
    form: str = "sdpa"
    by_hand: HandWritten | None = None
    lowered: Lowered | None = None
    num_heads: int = 0
    key_scale: float = 1.0
    key: CacheSite | None = None
    value: CacheSite | None = None
    candidates: tuple[tuple[Node, str], tuple[Node, str]] | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Node | None = None
    tiled: int = 0
    is_causal: bool = False
    mask_node: Node | None = None
    mask: MaskSpec | None = None
    paged: bool = False
    reason: str = ""

    @property
    def result(self) -> Node:
        """The node with the attention's result as the program wrote it, which has its metadata; it may be replaced."""
        if self.lowered is not None:
            return self.lowered.output
        return self.node if self.by_hand is None else self.by_hand.output.node

    @property
    def kv_len(self) -> int | SymInt:
        """How many keys the attention is written over. Obligation: it has candidates."""
        assert self.candidates is not None
        node, axes = self.candidates[0]
        return node.meta["example_value"].shape[axes.index("S")]
