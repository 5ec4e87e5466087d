"""Ahead-of-time compilation of a launch for a named GPU, without a device: resources and errors in advance.

Needs a process whose kernels are compiled, not interpreted (no TRITON_INTERPRET).
"""

import re
import subprocess
import tempfile
from collections import Counter
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
BLOCK_RESERVE = 1024  # bytes of shared memory that CUDA keeps of each block
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTER_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    `local_accesses` counts the loads and stores of local memory in the machine code: spills, mostly (on ROCm, the
    vector registers that were spilled). `loads` counts
    the instructions that read global memory by the bytes that each reads for one thread, `products` those that
    multiply tiles by their kind (`mma`, `wgmma`, `tcgen05`, `mfma`).
    """

    num_warps: int
    shared_bytes: int
    registers: int
    stack_bytes: int
    local_accesses: int
    loads: dict[int, int]
    products: dict[str, int]

    def resident_blocks(self, limits: DeviceLimits) -> int:
        """Thread blocks that one multiprocessor holds at a time, by registers, shared memory and warps."""
        threads = self.num_warps * limits.warp_threads
        by_registers = limits.registers // (-(-self.registers // 8) * 8 * threads)  # allocated in eights a thread
        by_shared = (limits.shared_bytes + BLOCK_RESERVE) // (self.shared_bytes + BLOCK_RESERVE)
        return min(by_registers, by_shared, limits.warps // self.num_warps)


def compile_launch(launch: Launch, target: str) -> Resources:
    """Compile one launch for a name in TARGETS, specialised as its first run would be."""
    if INTERPRETED:
        raise KernelInputError(
            "TRITON_INTERPRET is set, kernels are interpreted; allowed: unset; use a process without it"
        )
    if target not in TARGETS:
        raise KernelInputError(f"target is {target!r}; allowed: {', '.join(TARGETS)}; add it to TARGETS")
    gpu = TARGETS[target][0]
    compiled = triton.compile(_source(launch), target=gpu, options=launch.options(gpu.backend == "cuda"))
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        return Resources(launch.num_warps, shared, *_amd_facts(compiled.asm["amdgcn"]))
    machine = _machine_facts(compiled.asm["cubin"])
    loads, products = _instructions(compiled.asm["ptx"])
    return Resources(launch.num_warps, shared, *machine, loads, products)


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


def _machine_facts(cubin: bytes) -> tuple[int, int, int]:
    """Registers of a thread, bytes of its stack, and accesses to local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        sass = _cuobjdump("--dump-sass", file.name)
    fields = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return fields["REG"], fields["STACK"] + fields["LOCAL"], len(re.findall(r"\b(?:LDL|STL)\b", sass))


def _amd_facts(assembly: str) -> tuple[int, int, int, dict[int, int], dict[str, int]]:
    """The fields of `Resources` behind the shared memory, from the text of a ROCm kernel."""
    fields = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size|vgpr_spill_count): +(\d+)", assembly))
    words = re.findall(r"global_load_dword(?:x(\d))?\b", assembly)
    products = re.findall(r"v_(mfma)_", assembly)
    registers, stack_bytes, spilled = (
        int(fields[name]) for name in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
    )
    return registers, stack_bytes, spilled, dict(Counter(int(word or 1) * 4 for word in words)), dict(Counter(products))


def _instructions(ptx: str) -> tuple[dict[int, int], dict[str, int]]:
    """Global loads by their width in bytes, and tile products by their kind."""
    widths = [int(width, 0) for width in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], *(\w+)", ptx)]
    for count, bits in re.findall(r"ld\.global[a-z:_.\d]*?(?:\.v(\d))?\.b(\d+)", ptx):
        widths.append(int(count or 1) * int(bits) // 8)
    kinds = re.findall(r"\b(wgmma|tcgen05|mma)\.(?:mma|sync\.aligned\.m)", ptx)
    return dict(Counter(widths)), dict(Counter(kinds))


def _cuobjdump(*arguments: str) -> str:
    return subprocess.run([CUOBJDUMP, *arguments], check=True, capture_output=True, text=True).stdout
