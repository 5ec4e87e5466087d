"""Host time of what a layer of a step calls on a GPU: K and V written, attention; measured without one.

    OMP_NUM_THREADS=1 python -m benchmarks.host_launch [--quick]

Everything runs as on a GPU, on CPU tensors: the operators, their checks, the choice of a configuration, Triton's own
launcher up to the compiled kernel, in whose place is nothing. What a driver takes to enqueue a kernel is not in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: kernels are compiled ones

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import paged_inductor
from paged_inductor.kernels import checks, decode, launch, prefill, problem, shared

from .harness import save

LIMITS = launch.DeviceLimits("NVIDIA H200", 90, 132, 227 * 1024)
HEADS, KV_HEADS, DIM, BLOCK, WIDTH = 32, 8, 128, 16, 256


class Nothing:
    """A driver, and the kernels that it has compiled."""

    function = packed_metadata = None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        """Enqueue nothing."""


def limits(device: torch.device) -> launch.DeviceLimits:
    """In the place of `device_limits`."""
    return LIMITS


def compiled(self: JITFunction, key: str, signature: Any, device: int, *rest: Any) -> Nothing:
    """In the place of `JITFunction._do_compile`."""
    self.device_caches[device][0][key] = kernel = Nothing()
    return kernel


def microseconds(call: Callable[[int], Any], calls: int) -> float:
    """Median of a call's time; it is given a length that grows."""
    times = []
    for length in range(1000, 1000 + calls):
        start = time.perf_counter_ns()
        call(length)
        times.append(time.perf_counter_ns() - start)
    return round(statistics.median(times[calls // 4 :]) / 1e3, 1)


def measure(batch: int, dtype: torch.dtype, calls: int) -> dict[str, Any]:
    """A decode step of one layer."""
    arenas = [torch.empty(batch * WIDTH + 1, KV_HEADS, BLOCK, DIM, dtype=dtype) for _ in range(2)]
    table = torch.zeros(batch, WIDTH, dtype=torch.int32)
    lens = torch.full((batch,), 1000, dtype=torch.int32)
    q, new = (torch.empty(batch, heads, 1, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS))
    operators = torch.ops.paged_inductor
    pages = (*arenas, table, lens)
    return {
        "rows": batch,
        "dtype": str(dtype).removeprefix("torch."),
        "write_us": microseconds(lambda length: operators.cache_write_kv(*arenas, new, new, table, lens), calls),
        "attention_us": microseconds(lambda length: operators.attention(q, *pages, length, DIM**-0.5), calls),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="host time of a layer's operators on a GPU")
    parser.add_argument("--quick", action="store_true", help="few calls, nothing saved")
    quick = parser.parse_args().quick
    paged_inductor.configure(triton_on_cpu=True)
    triton.runtime.driver.set_active(Nothing())
    patches = [mock.patch.object(module, "device_limits", limits) for module in (decode, prefill, problem, shared)]
    patches += [mock.patch.object(JITFunction, "_do_compile", compiled), mock.patch.object(checks, "launchable")]
    for patch in patches:
        patch.start()
    with torch.no_grad():
        cells = [measure(batch, torch.bfloat16, 200 if quick else 2000) for batch in (1, 8, 64)]
    for cell in cells:
        print(cell)
    if not quick:
        save("host_launch", cells, triton=triton.__version__)


if __name__ == "__main__":
    main()
