"""`python -m paged_inductor`: the doctor's verdict, and errors that say what to do."""

from __future__ import annotations

import pytest

from paged_inductor import _doctor
from paged_inductor.__main__ import main


def test_doctor_finds_a_healthy_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "paged loop, inner='eager': right" in printed
    assert "paged loop, inner='inductor': right" in printed
    assert "books              balanced" in printed


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
