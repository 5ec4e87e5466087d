"""What compute-sanitizer's memcheck and racecheck do on a GPU, for kernels that the interpreter runs.

The interpreter runs programs one after the other, reads zeros where a load is masked off, and any memory of the process
where a pointer has gone astray. A GPU does none of this, so that a kernel may be right here and wrong there. While
`watch` is entered, every launch is held to more:

- an access lies within the tensor that its pointer comes from, and is aligned to its element;
- a lane that is masked off, and for which the kernel names no value, holds all ones: NaN, or -1;
- no address is stored to twice in a launch, nor read where the launch also stores to it: neither programs nor the
  threads of one have an order;
- no 32-bit integer overflows;
- what `tl.multiple_of` promises is so.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from paged_inductor.kernels import copy

KEEPS_ORIGIN = ("addptr", "splat", "broadcast", "expand_dims", "reshape", "trans", "unsplat", "select", "bitcast")
INT32 = np.iinfo(np.int32)


class KernelHazard(AssertionError):
    """A kernel did what goes unnoticed in the interpreter and goes wrong on a GPU."""


class Span(NamedTuple):
    """The bytes [begin, end) that a tensor's elements lie in."""

    name: str
    begin: int
    end: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Span":
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extent = (last + 1) * tensor.element_size() if tensor.numel() else 0
        return cls(name, tensor.data_ptr(), tensor.data_ptr() + extent)


class Accesses:
    """Addresses of one launch or several, each access in the order in which programs made them."""

    def __init__(self) -> None:
        self._all: list[tuple[np.ndarray, int]] = []

    def add(self, addresses: np.ndarray, itemsize: int) -> None:
        self._all.append((addresses, itemsize))

    def extend(self, others: "Accesses") -> None:
        self._all += others._all

    def words(self, size: int) -> np.ndarray:
        """Addresses of words of `size` bytes that the accesses consist of, with repetitions."""
        parts = [(of[:, None] + np.arange(0, itemsize, size, dtype=np.uint64)).ravel() for of, itemsize in self._all]
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)

    def smallest(self) -> int:
        return min((itemsize for _, itemsize in self._all), default=8)


class Traffic(NamedTuple):
    """What launches load and store."""

    loaded: Accesses
    stored: Accesses

    @property
    def bytes(self) -> tuple[int, int]:
        """How many distinct bytes are loaded and stored."""
        return np.unique(self.loaded.words(1)).size, np.unique(self.stored.words(1)).size


class KernelSanitizer:
    """Watches launches; `hazards` keeps what it raised, for callers between it and a test that catch errors."""

    def __init__(self) -> None:
        self.hazards: list[str] = []
        self.launches = 0
        self._kernel = ""
        self._stored, self._loaded = Accesses(), Accesses()
        self._observed: list[Traffic] = []
        self._raw: list[Span] = []  # memory that kernels find by addresses which are data

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Check all launches in this context."""
        builder = interpreter.InterpreterBuilder
        with ExitStack() as patches:

            def patch(owner: Any, name: str, around: Callable[..., Any]) -> None:
                original = getattr(owner, name)
                patches.enter_context(mock.patch.object(owner, name, lambda *args, **kw: around(original, *args, **kw)))

            patch(interpreter.GridExecutor, "__call__", self._launch)
            patch(interpreter, "_implicit_cvt", self._argument)
            patch(copy, "plan_copy_blocks", self._plan_copy)
            patch(interpreter.TensorHandle, "set_attr", self._hint)
            patch(builder, "create_masked_load", self._load)
            patch(builder, "create_masked_store", self._store)
            for name in KEEPS_ORIGIN:
                patch(builder, f"create_{name}", _keep_origin)
            for name in ("add", "sub", "mul"):
                patch(builder, f"create_{name}", self._integers)
            yield

    @contextmanager
    def traffic(self) -> Iterator[Traffic]:
        """All that the launches in this context load and store. Obligation: `watch` is entered."""
        traffic = Traffic(Accesses(), Accesses())
        self._observed.append(traffic)
        try:
            yield traffic
        finally:
            self._observed.remove(traffic)

    def _fail(self, what: str) -> None:
        self.hazards.append(f"{self._kernel}: {what}")
        raise KernelHazard(self.hazards[-1])

    def _launch(self, run: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> None:
        self.launches += 1
        self._kernel, self._stored, self._loaded = executor.fn.__name__, Accesses(), Accesses()
        run(executor, *args, **kwargs)
        for traffic in self._observed:
            traffic.loaded.extend(self._loaded)
            traffic.stored.extend(self._stored)
        size = min(self._stored.smallest(), self._loaded.smallest())
        stored, times = np.unique(self._stored.words(size), return_counts=True)
        if (times > 1).any():
            self._fail(f"{int((times > 1).sum())} words of {size} bytes are stored to more than once in one launch")
        both = int(np.isin(stored, self._loaded.words(size), assume_unique=False).sum())
        if both:
            self._fail(f"{both} words of {size} bytes are read and stored to in one launch")

    def _argument(self, convert: Callable[..., Any], argument: Any) -> Any:
        value = convert(argument)
        if isinstance(argument, Tensor | triton.runtime.jit.TensorWrapper):
            base = getattr(argument, "base", argument)
            value.handle.origin = Span.of(f"a tensor {tuple(base.shape)} of {base.dtype}", base)
        return value

    def _hint(self, keep: Callable[..., Any], handle: Any, name: str, values: list[int]) -> None:
        if name == "tt.divisibility" and (handle.data % values[-1]).any():
            self._fail(f"{handle.data} is said to be a multiple of {values[-1]}")
        keep(handle, name, values)

    def _plan_copy(self, plan: Callable[..., Any], arenas: Any, *ids: Tensor) -> Any:
        self._raw = [Span.of(f"arena {index}", arena) for index, arena in enumerate(arenas)]
        return plan(arenas, *ids)

    def _checked(self, what: str, ptrs: Any, mask: Any) -> np.ndarray:
        """The addresses of the lanes that take part, in bounds and aligned."""
        addresses, lanes = np.broadcast_arrays(ptrs.data, mask.data)
        addresses = addresses[lanes.astype(bool)]
        itemsize = _itemsize(ptrs)
        spans = [ptrs.origin] if getattr(ptrs, "origin", None) else self._raw
        inside = np.zeros(addresses.shape, bool)
        for span in spans:
            inside |= (addresses >= span.begin) & (addresses + np.uint64(itemsize) <= span.end)
        if not inside.all():
            strays = addresses[~inside].astype(np.int64) - spans[0].begin if spans else addresses
            self._fail(f"{strays.size} lanes {what} {strays.min()} to {strays.max()} bytes behind the start of {spans}")
        if (addresses % np.uint64(itemsize)).any():
            self._fail(f"a {what} of {itemsize} bytes is not aligned to them")
        return addresses

    def _load(self, load: Callable[..., Any], builder: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        itemsize = _itemsize(ptrs)
        self._loaded.add(self._checked("load", ptrs, mask), itemsize)
        if other is None and not mask.data.all():
            dtype = interpreter._get_np_dtype(ptrs.get_element_ty())
            ones = np.full((*ptrs.data.shape, itemsize), 255, np.uint8).view(dtype)[..., 0]
            other = interpreter.TensorHandle(ones, ptrs.get_element_ty())
        return load(builder, ptrs, mask, other, *rest)

    def _store(self, store: Callable[..., Any], builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        itemsize = _itemsize(ptrs)
        self._stored.add(self._checked("store", ptrs, mask), itemsize)
        return store(builder, ptrs, value, mask, *rest)

    def _integers(self, operate: Callable[..., Any], builder: Any, lhs: Any, rhs: Any) -> Any:
        out = operate(builder, lhs, rhs)
        if lhs.dtype.scalar == tl.int32:
            wide = operate(builder, _as_int64(lhs), _as_int64(rhs))
            if (wide.data < INT32.min).any() or (wide.data > INT32.max).any():
                self._fail(f"a 32-bit integer overflows: {wide.data.min()} to {wide.data.max()}")
        return out


def _itemsize(ptrs: Any) -> int:
    return max(1, ptrs.get_element_ty().primitive_bitwidth // 8)


def _as_int64(handle: Any) -> Any:
    return interpreter.TensorHandle(handle.data.astype(np.int64), tl.int64)


def _keep_origin(operate: Callable[..., Any], builder: Any, *args: Any) -> Any:
    out = operate(builder, *args)
    origins = [arg.origin for arg in args if getattr(arg, "origin", None)]
    if origins and out.dtype.is_ptr():
        out.origin = origins[0]
    return out
