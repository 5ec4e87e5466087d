"""`python -m paged_inductor`: the doctor's verdict, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paged_inductor import _ab, _doctor
from paged_inductor.__main__ import main


def test_doctor_finds_a_healthy_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "paged loop, inner='eager': right" in printed
    assert "paged loop, inner='inductor': right" in printed
    assert "books              balanced" in printed


def test_doctor_checks_more_than_dynamo_compiles_of_one_function() -> None:
    """A machine with a GPU has four checks, one with eight GPUs eighteen."""
    with torch._dynamo.config.patch(recompile_limit=3):
        for inner in ("eager", "aot_eager", "inductor"):
            _doctor._check_loop(inner, torch.device("cpu"))


def test_doctor_shows_what_failed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(_doctor, "_check_loop", broken)
    assert main(["doctor"]) == 1
    assert "no compiler here" in capsys.readouterr().out


def test_unknown_commands_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["dance"])
    assert "doctor" in capsys.readouterr().err


def test_ab_says_which_models_it_cannot_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def said(*options: str) -> str:
        assert main(["ab", "--prompt", "Why?", *options]) == 2
        return capsys.readouterr().err

    assert said("--model", str(tmp_path / "none")).endswith("there is no such folder\n")
    assert "cannot be loaded: give the folder of a causal language model" in said("--model", str(tmp_path))
    (tmp_path / "tiny.gguf").touch()
    assert said("--model", str(tmp_path)).endswith("are in GGUF: add --gguf tiny.gguf\n")
    assert said("--model", str(tmp_path), "--gguf", "big.gguf").endswith("its GGUF files are: tiny.gguf\n")
    assert "cannot be loaded" in said("--model", str(tmp_path), "--gguf", "tiny.gguf")


def test_ab_says_what_its_figures_mean() -> None:
    assert _ab._meaning(4096, 1024, 4).startswith("pages hold 3.0 KiB less (75%)")
    assert _ab._meaning(4096, 4096, 1).startswith("one sequence alone saves nothing")
    assert _ab._meaning(4096, 4096, 2).startswith("nothing is saved here")
