"""What the kernels take of a GPU, compiled ahead of time without one: writes docs/kernels.md.

    python -m benchmarks.kernel_table

Needs a process without TRITON_INTERPRET. Cases and static configurations are those of tests/kernels/aot_cases.py.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
import triton

from paged_inductor.kernels import aot

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kernels.md"
HEAD = """# What the kernels take

Made by `make kernels` with torch {torch} and triton {triton}; compiled ahead of time, not run. Each line is a case of
`tests/kernels/aot_cases.py` in the configuration that the first call takes (`kernels/configs.py`): registers of a
thread, shared memory of a block, how many blocks x warps one multiprocessor holds at a time, and the loads of global
memory in the code (bytes a thread x instructions). No kernel uses local memory; the tests hold that for every
configuration that tuning may try.

Loads of 16 bytes are those of K and V; narrower ones read block ids, lengths, masks and scales. The values of 8-bit V
are read as 16-bit words of two, and taken apart in registers: for a product whose operands come from registers (`mma`),
Triton lays V's tile out in vectors of 8 elements, so that it would be read 8 bytes at a time. It still is where V's
head dim is no multiple of 16, so that rows are not aligned either. Pieces of K and V that have fewer bytes than 16 a
thread are read 8 at a time: the dims of K behind a power of two, of which 80 has 16, in tiles of few keys.
A write of one token takes one warp, whose threads have less than 16 bytes of its row each.
"""


def cases() -> ModuleType:
    """The module of the tests' cases, which is no part of a package."""
    path = ROOT / "tests" / "kernels" / "aot_cases.py"
    spec = importlib.util.spec_from_file_location("aot_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["aot_cases"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def table(target: str, module: ModuleType) -> str:
    """The section of one target."""
    limits = aot.TARGETS[target][1]
    lines = [
        f"\n## {target}\n",
        f"Shared memory of a block: at most {limits.shared_bytes // 1024} KiB.\n",
        "| case | kernel | tile | registers | shared KiB | resident | products | loads |",
        "|---|---|---|---:|---:|---:|---|---|",
    ]
    for name, taken in module.resources(target, "").items():
        shared = f"{taken['shared_bytes'] / 1024:.1f}"
        resident = f"{taken['resident_blocks']} x {taken['num_warps']}"
        products = ", ".join(sorted(taken["products"])) or "-"
        loads = ", ".join(f"{width} x {count}" for width, count in sorted(taken["loads"].items(), reverse=True))
        lines.append(f"| {name} | {taken['registers']} | {shared} | {resident} | {products} | {loads} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    module = cases()
    text = HEAD.format(torch=torch.__version__.split("+")[0], triton=triton.__version__)
    PAGE.write_text(text + "".join(table(target, module) for target in aot.TARGETS), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
