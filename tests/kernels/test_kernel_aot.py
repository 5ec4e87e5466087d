"""Every kernel compiles for GPUs that are not here; on CUDA the static choices stay in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compile_cases(target: str, *options: str) -> dict[str, dict[str, int | None]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("aot_cases.py")), target, *options]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_static_choices_stay_in_registers(target: str) -> None:
    resources = compile_cases(target)
    spilled = {name: case for name, case in resources.items() if case["stack_bytes"] or case["local_accesses"]}
    assert resources
    assert not spilled


def test_kernels_compile_for_gfx942_within_its_shared_memory() -> None:
    assert max(case["shared_bytes"] or 0 for case in compile_cases("gfx942").values()) <= 64 * 1024


@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "fuzz", reason="takes minutes: make kernels")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_candidate_compiles(target: str) -> None:
    assert compile_cases(target, "every")
