"""`python -m paged_inductor doctor`: what is installed, and whether a small paged loop compiles and is right."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import traceback
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from . import __version__, check_integrity
from .runtime.memory import free_bytes
from .tensor import PagedTensor

__all__ = ["doctor"]

_PACKAGES = ("torch", "triton", "sympy", "transformers", "accelerate", "gguf", "prometheus-client")


def doctor() -> int:
    """Print the facts, one a line. Returns 1 if a check failed, else 0."""
    print(f"paged_inductor {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in _PACKAGES:
        print(f"  {package:18} {_version(package)}")
    print(f"  {'C++ compiler':18} {shutil.which('g++') or shutil.which('clang++') or 'none: Inductor needs one'}")
    entry_points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    registered = any(point.name == "paged_inductor" for point in entry_points)
    print(f"  {'entry point':18} {'installed' if registered else 'none: import paged_inductor before torch.compile'}")
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    for device in devices:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        print(f"  {device!s:18} {name}, {free_bytes(device) / 2**30:.1f} GiB free")
    healthy = True
    for device in devices:
        for inner in ("eager", "inductor"):
            fault = _fault(partial(_check_loop, inner, device))
            print(f"  {device!s:18} paged loop, inner={inner!r}: {fault or 'right'}")
            healthy = healthy and not fault
    fault = _fault(check_integrity)
    print(f"  {'books':18} {fault or 'balanced'}")
    return 0 if healthy and not fault else 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _fault(check: Callable[[], object]) -> str:
    """Why `check` failed, or '' if it did not."""
    try:
        check()
    except Exception as error:  # whatever it is, it is what the user wants to see
        return "FAILED\n" + "".join(traceback.format_exception(error, limit=-3))
    return ""


@torch.no_grad()
def _check_loop(inner: str, device: torch.device) -> None:
    """A cache that grows by `cat`, dense and compiled with this backend: equal results, and really in pages."""

    def step(key: Tensor, value: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key, value = torch.cat((key, x), 2), torch.cat((value, x + 1), 2)
        return F.scaled_dot_product_attention(x, key, value), key, value

    torch._dynamo.reset()  # of one function, Dynamo compiles few graphs: this device's are not the first
    compiled = torch.compile(step, backend="paged_inductor", options={"inner": inner, "label": "doctor"})
    torch.manual_seed(0)
    key = value = paged_key = paged_value = torch.empty(1, 2, 0, 16, device=device)
    for _ in range(4):
        x = torch.randn(1, 2, 1, 16, device=device)
        out, key, value = step(key, value, x)
        paged_out, paged_key, paged_value = compiled(paged_key, paged_value, x)
        torch.testing.assert_close(paged_out, out)
    if not isinstance(paged_key, PagedTensor):
        raise AssertionError("the cache was not paged")
