"""Every kernel compiles for GPUs that are not here, stays in registers and shared memory, and reads wide."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paged_inductor.kernels import aot

ROOT = Path(__file__).parents[2]
MINUTES = pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "fuzz", reason="takes minutes: make kernels")
OLDEST = Path(sys.prefix) / "triton-oldest"  # the lower bound of pyproject.toml, beside the one in use
Compiled = dict[str, dict[str, Any]]


def compiling(triton: Path | None = None) -> dict[str, str]:
    """The environment of a process that compiles kernels; triton: a folder to import it from."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [*([str(triton)] if triton else []), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(folders)}


def compile_cases(target: str, option: str = "", triton: Path | None = None) -> Compiled:
    """What the launches of `aot_cases` take of a target."""
    command = [sys.executable, str(Path(__file__).with_name("aot_cases.py")), target, option]
    finished = subprocess.run(command, env=compiling(triton), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def assert_lean(compiled: Compiled, target: str) -> None:
    """No kernel spills, or takes more shared memory than there is."""
    assert compiled
    most = aot.TARGETS[target][1].shared_bytes
    for name, taken in compiled.items():
        assert (taken["stack_bytes"], taken["local_accesses"]) == (0, 0), name
        assert taken["shared_bytes"] <= most, name
        assert taken["resident_blocks"] >= 1, name


def assert_wide_loads(compiled: Compiled) -> None:
    """K and V come in loads of 16 bytes; what is narrower are block ids, mask rows and scales."""
    for name, taken in compiled.items():
        case, kernel, _ = name.split(" | ")
        if kernel not in ("decode", "prefix", "prefill"):
            continue
        widths = {int(width): int(width) * count for width, count in taken["loads"].items()}
        if "mask" in case or "bias" in case or "static" in case:
            continue
        assert widths.keys() <= {4, 8, 16}, name
        quantized = case.endswith(("_fp8", "_int8"))  # half the bytes of K and V, and scales besides
        assert widths[16] > (0.5 if quantized else 0.65) * sum(widths.values()), name


def test_static_choices_on_sm_90() -> None:
    compiled = compile_cases("sm_90")
    assert_lean(compiled, "sm_90")
    assert_wide_loads(compiled)
    prefill = {name: taken for name, taken in compiled.items() if "| prefill |" in name}
    small = ("fp32", "mla")  # float32 is multiplied exactly; the rows of a latent are too long for a tile of 64 queries
    assert {name for name in prefill if not name.startswith(small)} == {
        name for name, taken in prefill.items() if "wgmma" in taken["products"]
    }


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_some_static_choices(target: str) -> None:
    compiled = compile_cases(target, "few")
    assert_lean(compiled, target)
    if target != "gfx942":  # whose int8 pages come in words, for want of an instruction that turns bytes round
        assert_wide_loads(compiled)


@pytest.mark.skipif(not OLDEST.exists(), reason="make env installs it")
def test_some_static_choices_with_the_oldest_triton() -> None:
    version = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    found = subprocess.run(version, env=compiling(OLDEST), capture_output=True, text=True, check=True).stdout
    assert found.startswith("3.6.")
    assert_lean(compile_cases("sm_90", "few", OLDEST), "sm_90")


@MINUTES
@pytest.mark.parametrize("target", list(aot.TARGETS))
def test_every_candidate(target: str) -> None:
    assert_lean(compile_cases(target, "every"), target)


@MINUTES
@pytest.mark.parametrize("target", ["sm_80", "sm_100"])
def test_static_choices_read_wide(target: str) -> None:
    assert_wide_loads(compile_cases(target))
