"""Tuned choices on disk: shared by processes, worth nothing to others' devices and versions, harmless when broken."""

import json
import linecache
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from paged_inductor.kernels.launch import LaunchConfig
from paged_inductor.kernels.tuning_cache import Stamp, TuningCache, cache_dir, fingerprint

STAMP = Stamp("NVIDIA H200 / MIG", "2.13.0+cpu", "3.7.1", "ab" * 32)
FIRST, SECOND = LaunchConfig(16, 64, 4, 5), LaunchConfig(32, 32, 8, 3)


def test_a_choice_survives_its_process(tmp_path: Path) -> None:
    TuningCache(STAMP, tmp_path).store("key", FIRST)
    again = TuningCache(STAMP, tmp_path)
    assert again.get("key") == FIRST
    assert again.get("other") is None
    assert again.path.name == "NVIDIA_H200_MIG-torch2.13.0+cpu-triton3.7.1-abababababab.json"
    assert json.loads(again.path.read_text())["stamp"]["device"] == "NVIDIA H200 / MIG"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".lock"]


@pytest.mark.parametrize("field", ["device", "torch", "triton", "kernels"])
def test_choices_of_another_stamp_are_not_read(tmp_path: Path, field: str) -> None:
    TuningCache(STAMP, tmp_path).store("key", FIRST)
    other = TuningCache(replace(STAMP, **{field: "other"}), tmp_path)
    assert other.get("key") is None


def test_two_processes_keep_each_others_choices(tmp_path: Path) -> None:
    one, two = TuningCache(STAMP, tmp_path), TuningCache(STAMP, tmp_path)
    assert one.get("a") is None and two.get("b") is None  # both have read the file that is not there
    one.store("a", FIRST)
    two.store("b", SECOND)
    assert two.get("a") == FIRST
    assert TuningCache(STAMP, tmp_path).get("b") == SECOND


def test_storing_at_once_loses_nothing(tmp_path: Path) -> None:
    """Threads, because a file lock keeps them apart as it does processes: each store opens the file."""

    def store(name: str) -> None:
        cache = TuningCache(STAMP, tmp_path)
        for i in range(20):
            cache.store(f"{name}/{i}", LaunchConfig(16, 16, 4, i))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(store, "wxyz"))
    cache = TuningCache(STAMP, tmp_path)
    assert len(cache) == 80
    assert cache.get("y/7") == LaunchConfig(16, 16, 4, 7)


HEADER = {"format": 1, "stamp": vars(STAMP)}
BROKEN = {
    "not JSON": '{"format": 1, "cho',
    "no object": "[1, 2]",
    "another format": json.dumps({**HEADER, "format": 2, "choices": {}}),
    "another stamp": json.dumps({**HEADER, "stamp": {}, "choices": {}}),
    "unknown field": json.dumps({**HEADER, "choices": {"key": {"tile_m": 16, "colour": 3}}}),
    "text for a number": json.dumps({**HEADER, "choices": {"key": {**vars(FIRST), "tile_m": "16"}}}),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_ignored_with_one_warning_and_replaced(tmp_path: Path, content: str) -> None:
    cache = TuningCache(STAMP, tmp_path)
    cache.path.write_text(content)
    with pytest.warns(UserWarning, match="ignoring .*static choices are used until tuned") as caught:
        cache.get("key")
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get("key") is None
        cache.store("new", FIRST)
        assert TuningCache(STAMP, tmp_path).get("new") == FIRST


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TuningCache(STAMP, tmp_path / "file" / "folder")
    with pytest.warns(UserWarning, match="last as long as this process") as caught:
        cache.store("a", FIRST)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.store("b", SECOND)
    assert cache.get("a") == FIRST and cache.get("b") == SECOND


def test_a_warning_shows_the_line_that_called_compiled_code(tmp_path: Path) -> None:
    cache = TuningCache(STAMP, tmp_path)
    cache.path.write_text("[")
    compiled = ModuleType("torch._inductor.runtime.compile_tasks.c0de")
    source = "def call(cache):\n    return cache.get('key')\n"
    exec(compile(source, str(tmp_path / "c0de.py"), "exec"), vars(compiled))
    with pytest.warns(UserWarning, match="ignoring") as caught:
        compiled.call(cache)
    assert caught[0].filename == __file__
    assert "compiled.call(cache)" in linecache.getline(__file__, caught[0].lineno)


def test_a_store_that_fails_half_way_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TuningCache(STAMP, tmp_path)
    cache.store("a", FIRST)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="no space left"):
        cache.store("b", SECOND)
    assert TuningCache(STAMP, tmp_path).get("a") == FIRST
    assert not list(tmp_path.glob("*.tmp"))


def test_where_choices_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables = ("PAGED_INDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    assert cache_dir() == Path.home() / ".cache" / "paged_inductor"
    for variable in reversed(variables[1:]):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert cache_dir() == tmp_path / variable / "paged_inductor"
    monkeypatch.setenv("PAGED_INDUCTOR_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path


def test_the_fingerprint_is_of_the_kernels_sources() -> None:
    assert len(fingerprint()) == 64
    assert Stamp.of("d").kernels == fingerprint()
