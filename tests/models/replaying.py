"""What tests of replayed steps share: kernels' twins that serve in their place, CUDA graphs that are none, and what a
step's inputs were.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Set
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paged_inductor.kernels import reference
from paged_inductor.ops import dispatch, library

MODE = {"inner": "eager", "mode": "reduce-overhead"}
READS = ("_local_scalar_dense", "nonzero", "item", "unique")


class Twins:
    """The kernels' twins in the kernels' place: fifty steps in the interpreter would take too long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    @staticmethod
    def attention(*args: Any, deterministic: bool, **options: Any) -> Tensor:
        return reference.attention(*args, **options)


def let_twins_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels serve, their twins do."""
    for module in (library, dispatch):
        monkeypatch.setattr(module, "kernels", Twins())


class ForbidReads(TorchDispatchMode):
    """Raises at every operation that would wait for a device's results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in READS):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Every operation that is executed, with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        fresh = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given]
        self.calls.append((func, args, kwargs or {}, fresh))
        return out


class Recording:
    """The launches of one call, to be repeated with the arguments that they had: numbers, and places in memory."""

    def __init__(self, run: Callable[..., Any], inputs: Sequence[Any], static: Set[int]) -> None:
        self._inputs = [x.clone() if isinstance(x, Tensor) and i not in static else x for i, x in enumerate(inputs)]
        self._copied = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and i not in static]
        versions = [self._inputs[i]._version for i in self._copied]
        with Launches() as launches:
            self._outputs = run(*self._inputs)
        self._launches = launches.calls
        assert versions == [self._inputs[i]._version for i in self._copied], "Inductor would not record this step"

    def outputs(self) -> Any:
        """The results of the latest run."""
        return tree_map_only(Tensor, torch.clone, self._outputs)

    def replay(self, inputs: Sequence[Any]) -> Any:
        """Repeat the launches; returns their results."""
        for i in self._copied:
            self._inputs[i].copy_(inputs[i])
        for func, args, kwargs, results in self._launches:
            out = func(*args, **kwargs)
            again = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            for old, new in zip(results, again if results else (), strict=True):
                old.copy_(new)
        return self.outputs()


class Recordings:
    """In the place of a compiled graph that CUDA graphs replay: no Python of it runs again.

    As Inductor's CUDA graph trees, it makes a recording for each set of numbers, of sizes, and of addresses of what is
    said to stay where it is; other tensors are copied into the recording's own before it is replayed.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._run = graph.forward
        self._static = {
            i
            for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))
            if isinstance(node.meta.get("example_value"), torch.nn.Parameter)
            or node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None
        }
        self.made: dict[tuple[Any, ...], Recording] = {}

    def __call__(self, *inputs: Any) -> Any:
        key = tuple(
            (x.data_ptr() if i in self._static else None, x.shape, x.stride()) if isinstance(x, Tensor) else x
            for i, x in enumerate(inputs)
        )
        if key in self.made:
            return self.made[key].replay(inputs)
        self.made[key] = Recording(self._run, inputs, self._static)
        return self.made[key].outputs()


def addresses(inputs: tuple[Any, ...], kind: Callable[[Tensor], bool]) -> tuple[int, ...]:
    return tuple(value.data_ptr() for value in inputs if isinstance(value, Tensor) and kind(value))


def changes(values: Sequence[object]) -> int:
    return sum(a != b for a, b in itertools.pairwise(values))
