"""Compiles the emulated GPU, with the headers of CUDA's wheels, for the PyTorch that is installed."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUNTIME, DRIVER = "libcudart.so.13", "libcuda.so.1"


def packages() -> Path:
    """Where PyTorch and CUDA's wheels are installed."""
    spec = importlib.util.find_spec("torch")  # without importing it: that would load CUDA's own runtime
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def build_libraries(folder: Path) -> list[Path]:
    """The runtime and the driver, for LD_PRELOAD."""
    folder.mkdir(parents=True, exist_ok=True)
    refused = folder / "refused.o"
    _run("gcc", "-w", "-fPIC", "-c", HERE / "refused.c", "-o", refused)
    shared = ("-O1", "-g", "-shared", "-fPIC", "-std=c++17")
    runtime, driver = folder / RUNTIME, folder / DRIVER
    exports = f"-Wl,--version-script={HERE / 'exports.map'}"
    include = f"-I{packages() / 'nvidia/cu13/include'}"
    _run("g++", *shared, include, HERE / "cudart.cpp", refused, "-o", runtime, f"-Wl,-soname,{RUNTIME}", exports)
    _run("gcc", "-shared", refused, "-o", driver, f"-Wl,-soname,{DRIVER}")
    return [runtime, driver]


def load_operators(folder: Path) -> Any:
    """The extension module of operators.cpp; the libraries must be loaded."""
    from torch.utils.cpp_extension import load

    return load(
        "emulated_operators",
        [str(HERE / "operators.cpp")],
        extra_cflags=["-O1"],
        extra_include_paths=[str(packages() / "nvidia/cu13/include")],
        extra_ldflags=[f"-L{packages() / 'torch/lib'}", "-lc10_cuda", "-ltorch_cuda"],
        build_directory=str(folder),
    )


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)
