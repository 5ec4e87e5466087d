"""Choices of configurations: tuned ones come from the cache, and keys depend on exactly what they should."""

import itertools
from collections.abc import Callable

import pytest
import torch
from triton import OutOfResources

from paged_cases import build
from paged_inductor.kernels import autotune, configs, occupancy
from paged_inductor.kernels.aot import TARGETS
from paged_inductor.kernels.launch import DeviceLimits, LaunchConfig
from paged_inductor.kernels.problem import AttentionProblem, attention_problem

CANDIDATES = [LaunchConfig(16, tile_n, 4, 3) for tile_n in (32, 64, 128)]
unique_names = itertools.count()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PAGED_INDUCTOR_CACHE_DIR", str(tmp_path))
    autotune.tuning_cache.cache_clear()


def new_key() -> autotune.Key:
    return ("decode", f"device {next(unique_names)}", torch.bfloat16, 128, False)


def untimed(config: LaunchConfig) -> None:
    raise AssertionError(f"{config} must not run")


def test_what_was_tuned_is_chosen_from_then_on_without_running() -> None:
    runs: list[LaunchConfig] = []

    def bench(call: Callable[[], None]) -> float:
        call()
        return abs(runs[-1].tile_n - 64)

    key = new_key()
    assert autotune.choose(key, CANDIDATES, untimed) == CANDIDATES[0]
    assert autotune.tune(key, CANDIDATES, runs.append, bench) == CANDIDATES[1]
    assert runs == CANDIDATES
    assert autotune.choose(key, CANDIDATES, untimed) == CANDIDATES[1]
    assert autotune.static(key, CANDIDATES, untimed) == CANDIDATES[0]
    autotune.tuning_cache.cache_clear()  # as in the next process
    assert autotune.choose(key, CANDIDATES, untimed) == CANDIDATES[1]
    assert autotune.choose((*key[:-1], True), CANDIDATES, untimed) == CANDIDATES[0]


def test_a_choice_that_is_no_candidate_any_more_is_not_taken() -> None:
    key = new_key()
    autotune.tune(key, CANDIDATES[2:], lambda config: None, lambda call: 1.0)
    assert autotune.choose(key, CANDIDATES[:2], untimed) == CANDIDATES[0]


def test_a_candidate_that_does_not_fit_loses() -> None:
    def run(config: LaunchConfig) -> None:
        if config.tile_n < 128:
            raise OutOfResources(2, 1, "shared memory")

    def bench(call: Callable[[], None]) -> float:
        call()
        return 1.0

    assert autotune.tune(new_key(), CANDIDATES, run, bench) == CANDIDATES[2]


def test_calls_do_not_tune_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_INDUCTOR_AUTOTUNE", "1")
    assert not autotune.enabled()
    assert autotune.choose(new_key(), CANDIDATES, untimed) == CANDIDATES[0]


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


WIDE = build([8], dim=128, v_dim=128, dtype=torch.bfloat16)
WIDE_PROBLEM = attention_problem(WIDE.queries(4, 32), *WIDE.pages, 1.0, None, None, None)
SM_90, GFX942 = TARGETS["sm_90"][1], TARGETS["gfx942"][1]


def test_what_a_configuration_takes_of_a_processor() -> None:
    entry = (128, 64, 8, 2)
    assert occupancy.shared_bytes(WIDE_PROBLEM, entry) == (128 * 128 + 2 * 64 * 256) * 2  # Q, and K and V twice
    assert occupancy.registers(WIDE_PROBLEM, entry, SM_90) == 56 + (128 * 128 + 128 * 64) // 256
    assert occupancy.resident_warps(WIDE_PROBLEM, entry, SM_90) == 8  # one program of 256 threads has registers
    assert occupancy.resident_warps(WIDE_PROBLEM, (16, 64, 4, 2), SM_90) == 12  # three have shared memory
    assert occupancy.resident_warps(WIDE_PROBLEM, (16, 16, 4, 1), SM_90) == 24  # six have registers


def test_candidates_that_do_not_fit_are_never_timed() -> None:
    kept = (64, 32, 4, 1)
    large, hungry, lonely = (128, 256, 8, 3), (128, 128, 4, 1), (128, 64, 4, 3)
    assert occupancy.fitting(WIDE_PROBLEM, SM_90, [large, hungry, lonely, kept]) == [kept]
    assert occupancy.fitting(WIDE_PROBLEM, SM_90, [large]) == [large]
    assert occupancy.fitting(WIDE_PROBLEM, GFX942, [(128, 64, 8, 2), kept]) == [kept]  # 64 KiB of shared memory
