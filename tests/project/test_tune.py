"""`python -m paged_inductor tune`: what it times, where that goes, and what it says where there is no GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from paged_inductor.__main__ import main
from paged_inductor._tune import Shape, add_options, shapes_of, tune_shapes
from paged_inductor.kernels import autotune, configs
from paged_inductor.kernels.launch import LaunchConfig

SHAPES = [Shape(4, 2, 16, torch.float32, 16, batch=1, context=40, queries=queries) for queries in (1, 20, 20)]
CPU = torch.device("cpu")


def test_without_a_device_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["tune", "--heads", "8"]) == 2
    assert "Run this command there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mask", "bool", "--window", "64"], "--mask and --window"),
        (["--shared-prefix", "100"], "multiples of --block-size 16"),
        (["--heads", "9", "--kv-heads", "2"], "--heads 9 is not a multiple of --kv-heads 2"),
        (["--kv-heads", "0"], "--kv-heads is 0: it must be at least 1"),
    ],
)
def test_impossible_models_are_refused(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["tune", *options]) == 2
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("rich", [True, False], ids=["bar", "lines"])
def test_each_key_is_timed_once_and_kept(
    rich: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGED_INDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(configs, "INTERPRETED", False)  # all candidates; they run in the interpreter
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    autotune.tuning_cache.cache_clear()
    timed: list[tuple[object, int]] = []

    def tune(key: autotune.Key, candidates: Sequence[LaunchConfig], run: autotune.Run) -> LaunchConfig:
        timed.append((key[0], len(candidates)))

        def bench(call: Callable[[], None]) -> float:
            return float(-len(timed))

        return autotune.tune(key, candidates[-1:] + candidates[:-1], run, bench)

    tune_shapes(SHAPES, CPU, tune)
    assert [name for name, _ in timed] == ["decode", "prefill"]
    assert all(count > 1 for _, count in timed)
    problem = SHAPES[0].problem(CPU)
    candidates = configs.decode_candidates(problem, configs.DeviceLimits("", 80, 108, 163 * 1024))
    assert autotune.choose(("decode", *problem.tuning_key()), candidates, pytest.fail) == candidates[-1]
    assert "prefill 4/2 x 16 float32: 1 x 40 tokens" in capsys.readouterr().out
    autotune.tuning_cache.cache_clear()


VARIANTS = [
    Shape(4, 2, 32, torch.bfloat16, 16, 2, 70, queries=1, stored=torch.int8),
    Shape(4, 2, 16, torch.float32, 16, 2, 70, queries=1, window=20),
    Shape(4, 2, 16, torch.float32, 16, 2, 70, queries=20, mask=torch.bool),
    Shape(4, 2, 16, torch.float32, 16, 2, 70, queries=1, mask=torch.float32),
    Shape(4, 2, 16, torch.float32, 16, 2, 70, queries=1, shared=32),
]


def test_each_variant_is_timed_for_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "INTERPRETED", False)
    timed: dict[autotune.Key, int] = {}

    def tune(key: autotune.Key, candidates: Sequence[LaunchConfig], run: autotune.Run) -> LaunchConfig:
        timed[key] = len(candidates)
        run(candidates[-1])
        return candidates[-1]

    tune_shapes(VARIANTS, CPU, tune)
    assert [key[0] for key in timed] == ["decode", "decode", "prefill", "decode", "decode_prefix", "decode_suffix"]
    assert all(count > 1 for count in timed.values())
    assert "shared 32" in str(VARIANTS[-1]) and "pages of int8" in str(VARIANTS[0])


def test_the_options_make_the_variants() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    arguments = [
        "--kv-dtype",
        "int8",
        "--window",
        "64",
        "--batch",
        "1",
        "2",
        "--context",
        "256",
        "--shared-prefix",
        "128",
    ]
    shapes = list(shapes_of(parser.parse_args(arguments)))
    assert [(shape.batch, shape.queries, shape.shared) for shape in shapes] == [
        (1, 1, 0),
        (1, 256, 0),
        (2, 1, 0),
        (2, 256, 0),
        (2, 1, 128),
    ]
    assert all((shape.stored, shape.window) == (torch.int8, 64) for shape in shapes)


def test_what_does_not_fit_in_memory_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = Shape(32, 8, 128, torch.bfloat16, 16, batch=1024, context=2**20, queries=1)
    tune_shapes([huge], CPU, pytest.fail)
    assert "skipped, its 4096.0 GiB are more than half" in capsys.readouterr().out.replace("\n", "")
