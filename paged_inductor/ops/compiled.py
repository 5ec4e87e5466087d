"""A torch formula compiled once by Inductor, for any sizes of its dynamic dimensions, and called without Dynamo.

A model's graph calls its decode attention once per layer. Inlined, the formula would be compiled once per layer, too:
minutes for a deep model. As one compiled function behind a custom operator it is compiled once per kind of layer, and
serves compiled graphs, eager graphs and eager tensors alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

__all__ = ["CompiledFormula"]


class CompiledFormula:
    """`function(*tensors, *constants)` as compiled code per kind of arguments.

    dynamic: names of dynamic sizes, by argument and dimension: `dynamic[i][d]` is a name or None. Dimensions of one
    name have one size. options: Inductor's. Tensors must be dense, in some order of their dimensions, or have no
    dynamic dimension but the outermost. None may stand for a tensor.

    The caller names the kind: everything about the arguments that is not a dynamic size (dtypes, static sizes, orders
    of dimensions, which are None, the constants) must be equal for calls of one kind.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        dynamic: Sequence[Sequence[str | None]],
        options: dict[str, Any],
    ) -> None:
        self._function = function
        self._dynamic = dynamic
        self._options = options
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, kind: Hashable, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> Tensor:
        run = self._compiled.get(kind)
        if run is None:
            with self._lock:
                run = self._compiled.get(kind)
                if run is None:
                    run = self._compiled[kind] = self._compile(tensors, constants)
        return run([tensor for tensor in tensors if tensor is not None])[0]

    def _compile(self, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        sizes: dict[str, Any] = {}

        def fake(tensor: Tensor, dynamic: Sequence[str | None]) -> Tensor:
            shape = list(tensor.shape)
            for dim, name in enumerate(dynamic):
                if name is None:
                    continue
                if name not in sizes:
                    source = ConstantSource(f"size_{name}")
                    hint = 11 + 2 * len(sizes)  # distinct, and not 0 or 1, which compilers treat apart
                    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
                    sizes[name] = env.create_symintnode(symbol, hint=hint, source=source)
                shape[dim] = sizes[name]
            with mode:
                return torch.empty_strided(shape, _strides(tensor, shape), dtype=tensor.dtype, device=tensor.device)

        kept: list[Callable[..., Any]] = []

        def keep(*args: Any, **kwargs: Any) -> Any:
            """Keep Inductor's code itself: AOTAutograd's wrappers around it do nothing here but take time."""
            kept.append(compile_fx_inner(*args, **kwargs))
            return kept[-1]

        present = [i for i, tensor in enumerate(tensors) if tensor is not None]
        fakes = [fake(tensors[i], self._dynamic[i]) for i in present]  # type: ignore[arg-type]

        def call(*given: Tensor) -> tuple[Tensor]:
            arguments: list[Tensor | None] = [None] * len(tensors)
            for i, tensor in zip(present, given):
                arguments[i] = tensor
            return (self._function(*arguments, *constants),)

        with torch.inference_mode(False), torch.no_grad():  # the code must serve callers in every mode
            with mode:
                graph = make_fx(call)(*fakes)
            with torch._functorch.config.patch(enable_autograd_cache=False):  # it would skip `keep`
                compile_fx(graph, fakes, inner_compile=keep, config_patches=self._options)
        (code,) = kept
        return getattr(code, "current_callable", code)  # the generated function itself, without its bookkeeping


def _strides(tensor: Tensor, shape: Sequence[Any]) -> list[Any]:
    """The tensor's order of dimensions, laid out densely for `shape`. Strides of dimensions of size 1 say nothing."""
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return list(tensor.stride())
    long = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != 1]
    outer_first = iter(sorted(long, key=tensor.stride, reverse=True))
    order = [next(outer_first) if dim in long else dim for dim in range(tensor.dim())]
    strides: list[Any] = [0] * tensor.dim()
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim]
    return strides
