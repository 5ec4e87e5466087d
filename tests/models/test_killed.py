"""A process that is killed leaves no files that are of no use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import paged_inductor

START = """
import sys, torch, paged_inductor
from paged_inductor.runtime import manager
from tests.tensor.factory import paged_like
folder = sys.argv[1]
paged_inductor.configure(swap_disk="1GiB", swap_dir=folder)
values = torch.arange(2 * 3 * 4096 * 16, dtype=torch.float32).view(2, 3, 4096, 16)
cache = paged_like(values, values + 1)
print("ready", flush=True)
"""
SWAP = """
while True:
    runtime = manager()
    with runtime.locked():
        assert sum(runtime.swap.out(group, 10**6, ()) for group in runtime.groups) == 512
    with runtime.using(cache[0]._view):
        pass
"""
SAVE = """
while True:
    paged_inductor.save(cache, folder + "/saved")
"""


def killed(script: str, folder: Path, after: float) -> None:
    """Run a script, and kill it some time after it is ready."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(after)
    process.kill()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("after", [0.05, 0.2])
def test_in_mid_swap(after: float, tmp_path: Any) -> None:
    killed(START + SWAP, tmp_path, after)
    assert os.listdir(tmp_path) == []


def test_in_mid_save(tmp_path: Any) -> None:
    values = torch.arange(2 * 3 * 4096 * 16, dtype=torch.float32).view(2, 3, 4096, 16)
    for after in (0.05, 0.2):
        killed(START + SAVE, tmp_path, after)
        assert set(os.listdir(tmp_path)) <= {"saved"}
    assert os.listdir(tmp_path) == ["saved"]
    keys, more = paged_inductor.load(tmp_path / "saved")
    assert torch.equal(keys.dense(), values)
    assert torch.equal(more.dense(), values + 1)
    del keys, more
    paged_inductor.check_integrity()


def test_where_files_need_names(tmp_path: Any, monkeypatch: Any) -> None:
    """On a file system without O_TMPFILE."""
    monkeypatch.delattr(os, "O_TMPFILE")
    keys = torch.zeros(1, 2, 5, 4)
    paged_inductor.save([keys], tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    assert torch.equal(paged_inductor.load(tmp_path / "saved")[0], keys)
