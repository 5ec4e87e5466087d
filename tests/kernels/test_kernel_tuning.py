"""The tuner picks the fastest candidate once per key, and choices depend on exactly what they should."""

import itertools
from collections.abc import Callable

import pytest
import torch
from triton import OutOfResources

from paged_cases import build
from paged_inductor.kernels import autotune, configs
from paged_inductor.kernels.launch import DeviceLimits, LaunchConfig
from paged_inductor.kernels.problem import AttentionProblem, attention_problem

CANDIDATES = [LaunchConfig(16, tile_n, 4, 3) for tile_n in (32, 64, 128)]
unique_keys = itertools.count()


def test_the_fastest_candidate_is_timed_once() -> None:
    runs: list[LaunchConfig] = []

    def bench(call: Callable[[], None]) -> float:
        call()
        return abs(runs[-1].tile_n - 64)

    key = ("test", next(unique_keys))
    assert autotune.choose(key, CANDIDATES, runs.append, bench) == CANDIDATES[1]
    assert autotune.choose(key, CANDIDATES, runs.append, bench) == CANDIDATES[1]
    assert runs == CANDIDATES


def test_a_candidate_that_does_not_fit_loses() -> None:
    def run(config: LaunchConfig) -> None:
        if config.tile_n < 128:
            raise OutOfResources(2, 1, "shared memory")

    def bench(call: Callable[[], None]) -> float:
        call()
        return 1.0

    assert autotune.choose(("test", next(unique_keys)), CANDIDATES, run, bench) == CANDIDATES[2]


def test_without_a_device_the_static_choice_is_taken() -> None:
    assert not autotune.enabled()
    assert autotune.choose(("test", next(unique_keys)), CANDIDATES, pytest.fail) == CANDIDATES[0]


@pytest.mark.parametrize(("value", "want"), [(1, 16), (16, 16), (17, 32), (64, 64), (1000, 64)])
def test_bucket(value: int, want: int) -> None:
    assert autotune.bucket(value, 16, 64) == want


def problem(kv_len: int, batch: int = 1, window: int | None = None) -> AttentionProblem:
    pages = build([8] * batch)
    table = torch.zeros(batch, kv_len // 8, dtype=torch.int32)
    arenas = (pages.k_arena, pages.v_arena)
    return attention_problem(pages.queries(1, 1), *arenas, table, pages.seq_lens, kv_len, 1.0, kv_len - 1, window, None)


LIMITS = DeviceLimits("test", 90, 132, 227 * 1024)


@pytest.mark.parametrize(
    ("case", "want"),
    [
        (problem(128), 1),
        (problem(1024), 4),
        (problem(65536), 64),
        (problem(65536, batch=32), 4),
        (problem(65536, batch=200), 1),
        (problem(65536, window=1024), 4),
    ],
)
def test_splits_follow_the_keys_read_and_the_programs_there_are(case: AttentionProblem, want: int) -> None:
    assert configs.choose_num_splits(case, LIMITS, tile_m=16) == want


def test_a_limit_that_hides_nothing_is_dropped() -> None:
    assert problem(128).causal_offset is None
    assert problem(128, window=128).window is None
    assert problem(128, window=127).window == 127


def test_neighbouring_lengths_share_a_tuning_key() -> None:
    assert problem(1032).tuning_key() == problem(2048).tuning_key()
    assert problem(1024).tuning_key() != problem(2048).tuning_key()
