"""Caches that die inside compiled functions: what the package does then is not traced into the user's graphs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import get_compilation_metrics

import paged_inductor
from paged_inductor import configure
from paged_inductor._config import reset_config
from paged_inductor.runtime import manager

from ..tensor.factory import paged_like

HELD: dict[str, Any] = {}
PARTS = ("runtime", "tensor", "ops")


def step(x: Tensor) -> Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    HELD.clear()
    return y * 2


@pytest.mark.parametrize("tier", ["swap_host", "swap_disk"])
def test_swapped_caches_die_between_two_graphs(tier: str, recwarn: pytest.WarningsRecorder) -> None:
    torch._dynamo.reset()
    paged_inductor.reset()
    configure(**{"swap_host": 0, "swap_disk": 0, tier: "1GiB"})
    compiled = torch.compile(step, backend="eager")
    for tokens in (40, 56, 72):
        HELD["cache"] = paged_like(torch.randn(1, 2, tokens, 8))
        runtime = manager()
        with runtime.locked():
            assert sum(runtime.swap.out(group, 100, ()) for group in runtime.groups) == -(-tokens // 16)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 4.0))
        assert runtime.swap.storage.used() == {"host": 0, "disk": 0}
    reset_config()
    paged_inductor.check_integrity()
    traced = {metrics.co_filename for metrics in get_compilation_metrics()}
    assert __file__ in traced
    folder = os.path.dirname(paged_inductor.__file__)
    assert not [name for name in traced if str(name).startswith(tuple(f"{folder}/{p}/" for p in PARTS))]
    assert not [warning for warning in recwarn if "Unraisable" in warning.category.__name__]
