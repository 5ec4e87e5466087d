"""A kernel launch as a value: wrappers run it, the tuner times it, ahead-of-time compilation reads it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

Allocator = Callable[..., Tensor]
MAX_REGISTERS, REGISTER_FILE = 255, 65536  # of a thread, and of a multiprocessor
INTERPRETED: bool = triton.knobs.runtime.interpret
# CDNA: four units of 512 registers for each lane of a wavefront
ROCM_REGISTERS = {"registers": 4 * 512 * 64, "warps": 32, "warp_threads": 64, "thread_registers": 512}


@dataclass(frozen=True)
class LaunchConfig:
    """Tile extents and compiler options of an attention kernel."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Launch:
    """One kernel with its grid and its arguments by parameter name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, object]
    num_warps: int = 4
    num_stages: int = 2

    def options(self, on_cuda: bool) -> dict[str, int]:
        """The compiler's options. Left to itself, ptxas spills a few registers to fit one more resident block."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if on_cuda:
            options["maxnreg"] = min(MAX_REGISTERS, REGISTER_FILE // (self.num_warps * 32))
        return options

    def run(self) -> None:
        """Enqueue on the current stream of the arguments' device; an empty grid enqueues nothing."""
        if 0 in self.grid:
            return
        first = next(value for value in self.arguments.values() if isinstance(value, Tensor))
        with torch.cuda.device_of(first):
            self.kernel[self.grid](**self.arguments, **self.options(first.is_cuda and not torch.version.hip))


@dataclass(frozen=True)
class DeviceLimits:
    """What the choice of a configuration depends on; `arch` is a CUDA capability such as 90, 0 on ROCm.

    Of one processor: bytes of shared memory, 32-bit registers, warps at a time. `thread_registers`: the most that a
    thread may have.
    """

    name: str
    arch: int
    processors: int
    shared_bytes: int
    registers: int = 65536
    warps: int = 64
    warp_threads: int = 32
    thread_registers: int = 255


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of a CUDA or ROCm device; the interpreter sees those of an sm_80 part."""
    if device.type != "cuda":
        return DeviceLimits("interpreter", 80, 108, 163 * 1024)
    properties = torch.cuda.get_device_properties(device)
    arch = 0 if torch.version.hip else properties.major * 10 + properties.minor
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    register_file = ROCM_REGISTERS if torch.version.hip else {}
    return DeviceLimits(properties.name, arch, properties.multi_processor_count, shared, **register_file)
