"""Ahead-of-time compilation of a launch for a named GPU, without a device: resources and errors in advance.

Needs a process whose kernels are compiled, not interpreted (no TRITON_INTERPRET).
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .errors import KernelInputError
from .launch import INTERPRETED, ROCM_REGISTERS, DeviceLimits, Launch

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), DeviceLimits("sm_80", 80, 108, 163 * 1024)),
    "sm_90": (GPUTarget("cuda", 90, 32), DeviceLimits("sm_90", 90, 132, 227 * 1024)),
    "sm_100": (GPUTarget("cuda", 100, 32), DeviceLimits("sm_100", 100, 148, 227 * 1024)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), DeviceLimits("gfx942", 0, 304, 64 * 1024, **ROCM_REGISTERS)),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTER_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes; None where the target does not report it.

    `local_accesses` counts the loads and stores of local memory in the machine code: spills, mostly.
    """

    shared_bytes: int
    registers: int | None = None
    stack_bytes: int | None = None
    local_accesses: int | None = None


def compile_launch(launch: Launch, target: str) -> Resources:
    """Compile one launch for a name in TARGETS, specialised as its first run would be."""
    if INTERPRETED:
        raise KernelInputError(
            "TRITON_INTERPRET is set, kernels are interpreted; allowed: unset; use a process without it"
        )
    if target not in TARGETS:
        raise KernelInputError(f"target is {target!r}; allowed: {', '.join(TARGETS)}; add it to TARGETS")
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(_source(launch), target=TARGETS[target][0], options=options)
    shared = compiled.metadata.shared
    if "cubin" not in compiled.asm:
        return Resources(shared)
    return _cuda_resources(compiled.asm["cubin"], shared)


def _source(launch: Launch) -> ASTSource:
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        is_one = specialised and isinstance(value, int) and value == 1
        if parameter.is_constexpr or value is None or is_one:
            signature[name] = "constexpr"
            constants[name] = value
            continue
        signature[name] = _type_name(value)
        number = value.data_ptr() if isinstance(value, Tensor) else value
        if specialised and isinstance(number, int) and number % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _type_name(value: object) -> str:
    if isinstance(value, Tensor):
        return POINTER_TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _cuda_resources(cubin: bytes, shared: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        sass = _cuobjdump("--dump-sass", file.name)
    fields = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    local_accesses = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    return Resources(shared, fields["REG"], fields["STACK"] + fields["LOCAL"], local_accesses)


def _cuobjdump(*arguments: str) -> str:
    return subprocess.run([CUOBJDUMP, *arguments], check=True, capture_output=True, text=True).stdout
