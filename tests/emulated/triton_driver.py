"""Triton's driver of the emulated GPU: kernels are compiled for sm_90 as on a GPU, and launches are interpreted."""

from __future__ import annotations

import threading
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter, jit

__all__ = ["EmulatedDriver", "install"]

_language = threading.RLock()  # the interpreter puts its own functions in the place of the language's


@cache
def _interpreted(function: Any) -> interpreter.InterpretedFunction:
    return interpreter.InterpretedFunction(function)


def _alone(function: Any, *args: Any, **options: Any) -> Any:
    with _language:
        return function(*args, **options)


class Launcher:
    """What Triton calls with a launch's arguments. operators: the extension module."""

    operators: Any = None

    def __init__(self, source: Any, metadata: Any) -> None:
        self._function = source.fn.fn

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        """rest: the compiled function, four things of Triton's, and the kernel's arguments, constants included."""
        assert stream == torch.cuda.current_stream().cuda_stream
        arguments = [self._on_host(argument) for argument in rest[5:]]
        kernel = _interpreted(self._function)
        run = partial(_alone, kernel.run, *arguments, grid=(x, y, z), warmup=False)
        self.operators.enqueue(torch.compiler.disable(run))  # whoever waits for it may be compiling

    def _on_host(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            assert argument.is_cuda, "a kernel was given a tensor that is not on its device"
            return self.operators.on_host(argument)
        if isinstance(argument, jit.TensorWrapper):
            return jit.TensorWrapper(self._on_host(argument.base), argument.dtype)
        return argument


class Utilities:
    """What Triton asks of a device before it loads a kernel."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers, spills, and threads a block may have."""
        return None, name, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}


class EmulatedDriver:
    launcher_cls = Launcher
    utils = Utilities()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def get_current_stream(self, device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        return triton.testing.do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(256, dtype=torch.int, device="cuda")

    def clear_cache(self, memory: torch.Tensor) -> None:
        memory.zero_()


def _call_of_a_function(self: jit.JITFunction[Any], *args: Any, **options: Any) -> Any:
    """A kernel's call of another function, while it is interpreted. Afterwards the language is as it was: other kernels
    may have to be compiled."""
    scope = interpreter._patch_lang(self.fn)
    try:
        return _interpreted(self.fn).rewrite()(*args, **options)
    finally:
        scope.restore()


def _dot(self: Any, a: Any, b: Any, total: Any, *precision: Any) -> Any:
    """The interpreter keeps bfloat16 as integers, which it multiplies as such."""

    def wide(operand: Any) -> np.ndarray:
        if operand.dtype.scalar == tl.bfloat16:
            return (operand.data.astype(np.uint32) << 16).view(np.float32)
        if operand.dtype.primitive_bitwidth == 8:
            return interpreter._convert_float(operand.data, operand.dtype, tl.float16, None).view(np.float16)
        return operand.data

    out = np.matmul(wide(a), wide(b), dtype=total.data.dtype) + total.data
    return interpreter.TensorHandle(out, total.dtype.scalar)


def install(operators: Any) -> None:
    """Let Triton launch kernels on the emulated GPU."""
    Launcher.operators = operators
    jit.JITFunction.__call__ = _call_of_a_function
    compiled = jit.JITFunction._do_compile
    jit.JITFunction._do_compile = lambda self, *args: _alone(compiled, self, *args)
    interpreter.InterpreterBuilder.create_dot = _dot
    triton.runtime.driver._default = EmulatedDriver()
    triton.runtime.driver.set_active(triton.runtime.driver._default)
