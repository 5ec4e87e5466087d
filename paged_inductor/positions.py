"""Where a step writes into static caches: read from its arguments at every call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakIdKeyDictionary

from .passes import Start
from .passes.mask_effects import Writers
from .passes.subgraph import ancestors, extracted
from .sizes import size_reader

__all__ = ["StartReader", "start_reader"]

Reader = Callable[[Sequence[Any]], int]


class StartReader(ABC):
    """Computes the first position of a call's writes from its arguments."""

    @abstractmethod
    def __call__(self, args: Sequence[Any]) -> int:
        """The first position; -1 if the positions are not consecutive."""

    def succeeded(self, args: Sequence[Any], first: int) -> None:  # noqa: B027  (most have nothing to remember)
        """The call for `args`, whose position was read as `first`, succeeded."""


class _Size(StartReader):
    """A number that appears in the arguments' sizes or is one of them."""

    def __init__(self, read: Reader) -> None:
        self._read = read

    def __call__(self, args: Sequence[Any]) -> int:
        return self._read(args)


class _Positions(StartReader):
    """A tensor of all positions."""

    def __init__(self, evaluate: Callable[[Sequence[Any]], torch.Tensor], count: Reader) -> None:
        self._evaluate = evaluate
        self._count = count

    def __call__(self, args: Sequence[Any]) -> int:
        positions = self._evaluate(args).tolist()
        first = positions[0] if positions else -1
        return first if positions == list(range(first, first + self._count(args))) else -1


class _Counter(StartReader):
    """A tensor of one number, on the device.

    If it is an argument that the graph itself moves on, it is read only if something else wrote to it since the last
    call: a read waits for the device. (Not on the CPU, where it costs nothing.)
    """

    def __init__(
        self, evaluate: Callable[[Sequence[Any]], torch.Tensor], position: int | None, moves: Reader | None
    ) -> None:
        """position: of the argument that the counter is. moves: by how much the graph moves it on. None: not known."""
        self._evaluate = evaluate
        self._position = position
        self._moves = moves
        self._known = WeakIdKeyDictionary()  # tensor -> (its version, its value)

    def __call__(self, args: Sequence[Any]) -> int:
        counter = self._tracked(args)
        if counter is not None:
            version, value = self._known.get(counter, (-1, 0))
            if version == counter._version:
                return value
        return int(self._evaluate(args))

    def succeeded(self, args: Sequence[Any], first: int) -> None:
        counter = self._tracked(args)
        if counter is not None and self._moves is not None:
            self._known[counter] = (counter._version, first + self._moves(args))

    def _tracked(self, args: Sequence[Any]) -> torch.Tensor | None:
        """The counter, if its version tells of every write that is not the graph's own."""
        if self._position is None or self._moves is None:
            return None
        counter: torch.Tensor = args[self._position]
        return counter if _reads_wait(counter.device) and not counter.is_inference() else None


def _reads_wait(device: torch.device) -> bool:
    """Whether reading a tensor's value waits for the device."""
    return device.type != "cpu"


def start_reader(start: Start, gm: GraphModule, count: Reader) -> StartReader:
    """The reader of `start` for `gm`, the graph as captured. count: computes how many tokens a call writes.

    Raises `UnknownSize` for a size that appears in no argument.
    """
    captured = gm.graph.find_nodes(op="placeholder")
    if start.node is None:
        assert start.size is not None
        return _Size(size_reader(start.size, captured))
    node = next(node for node in gm.graph.nodes if node.name == start.node.name)  # the passes work on a copy
    evaluate = _evaluator(gm, node, captured)
    if not start.scalar:
        return _Positions(evaluate, count)
    return _Counter(evaluate, captured.index(node) if node in captured else None, _moves(node, captured))


def _moves(counter: Node, captured: Sequence[Node]) -> Reader | None:
    """By how much the graph moves a counter on in place, if that is all it does to it."""
    writers = Writers(counter.graph).all_of([counter])
    if len(writers) != 1:
        return None
    (writer,) = writers
    if writer.op != "call_method" or writer.target != "add_" or writer.args[0] is not counter or writer.kwargs:
        return None
    amount = writer.args[1]
    if isinstance(amount, Node):
        amount = amount.meta.get("example_value")
    return size_reader(amount, captured) if isinstance(amount, (int, torch.SymInt)) else None


def _evaluator(gm: GraphModule, node: Node, captured: Sequence[Node]) -> Callable[[Sequence[Any]], torch.Tensor]:
    """A function that computes a node of the graph from its arguments, running no more of it than that takes."""
    position = {placeholder: i for i, placeholder in enumerate(captured)}
    if node in position:
        at = position[node]
        return lambda args: args[at]
    nodes = ancestors(node)
    run = extracted(gm, nodes, node)
    inputs = [position[item] for item in nodes if item.op == "placeholder"]
    return lambda args: run(*(args[i] for i in inputs))
