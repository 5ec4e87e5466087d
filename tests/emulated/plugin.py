"""A pytest plugin: CUDA tensors, streams, graphs and kernels on the emulated GPU. See docs/testing.md."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.profiler

from ..kernel_sanitizer import KernelSanitizer, Span
from . import triton_driver
from .build import load_operators

operators = load_operators(Path(os.environ["EMULATED_GPU"]))
operators.install()
triton_driver.install(operators)

# Inductor's kernels are not interpreted: its graphs call PyTorch's operators one by one.
inductor.fallback_by_default = True
inductor.use_static_cuda_launcher = False
inductor.compile_threads = 1
inductor.force_disable_caches = True


class Profile:
    """`torch.profiler.profile`, as far as graph launches go."""

    def __init__(self, **options: Any) -> None:
        pass

    def __enter__(self) -> Profile:
        self._before = operators.graph_launches()
        return self

    def __exit__(self, *raised: object) -> None:
        self._count = operators.graph_launches() - self._before

    def key_averages(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(key="cudaGraphLaunch", count=self._count)]


def _every_arena(self: KernelSanitizer, plan: Any, arenas: Any, *ids: torch.Tensor) -> Any:
    """Copies are planned before others are launched: the arenas of all of them are remembered."""
    self._raw = [*self._raw, *(Span.of(f"arena {index}", arena) for index, arena in enumerate(arenas))]
    return plan(arenas, *ids)


@pytest.fixture(autouse=True, scope="session")
def emulated_gpu() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.profiler, "profile", Profile)
        patch.setattr(torch.cuda, "_sleep", lambda cycles: None)  # all work is late as it is
        patch.setattr(KernelSanitizer, "_plan_copy", _every_arena)
        yield
