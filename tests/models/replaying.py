"""What tests of replayed steps share: kernels' twins that serve in their place, and what a step's inputs were."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paged_inductor.kernels import reference

MODE = {"inner": "eager", "mode": "reduce-overhead"}
READS = ("_local_scalar_dense", "nonzero", "item", "unique")


class Twins:
    """The kernels' twins in the kernels' place: fifty steps in the interpreter would take too long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    @staticmethod
    def attention(*args: Any, deterministic: bool, **options: Any) -> Tensor:
        return reference.attention(*args, **options)


class ForbidReads(TorchDispatchMode):
    """Raises at every operation that would wait for a device's results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in READS):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def addresses(inputs: tuple[Any, ...], kind: Callable[[Tensor], bool]) -> tuple[int, ...]:
    return tuple(value.data_ptr() for value in inputs if isinstance(value, Tensor) and kind(value))


def changes(values: Sequence[object]) -> int:
    return sum(a != b for a, b in itertools.pairwise(values))
