"""Choice of a launch configuration: the first candidate, or the fastest one where tuning is on.

`PAGED_INDUCTOR_AUTOTUNE=0` turns tuning off. The interpreter and CUDA graph capture never tune.
"""

import os
from collections.abc import Callable, Hashable, Sequence

import torch
from triton import OutOfResources, testing

from .launch import INTERPRETED, LaunchConfig

_fastest: dict[Hashable, LaunchConfig] = {}


def enabled() -> bool:
    """Whether a new key is timed on the device."""
    if INTERPRETED or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return False
    return os.environ.get("PAGED_INDUCTOR_AUTOTUNE", "1") != "0"


def choose(
    key: Hashable,
    candidates: Sequence[LaunchConfig],
    run: Callable[[LaunchConfig], None],
    bench: Callable[[Callable[[], None]], float] | None = None,
) -> LaunchConfig:
    """Return the configuration for `key`; `candidates[0]` is the static choice.

    `run` must be repeatable: it may overwrite its outputs but must not change its inputs. `bench` returns the
    time of one call; by default the device timer of Triton.
    """
    if key in _fastest:
        return _fastest[key]
    if len(candidates) == 1 or (bench is None and not enabled()):
        return candidates[0]
    times = [_time(run, candidate, bench or _device_time) for candidate in candidates]
    return _fastest.setdefault(key, candidates[times.index(min(times))])


def _time(
    run: Callable[[LaunchConfig], None],
    candidate: LaunchConfig,
    bench: Callable[[Callable[[], None]], float],
) -> float:
    try:
        return bench(lambda: run(candidate))
    except OutOfResources:
        return float("inf")


def _device_time(call: Callable[[], None]) -> float:
    return testing.do_bench(call, warmup=5, rep=20, return_mode="median")


def bucket(value: int, low: int, high: int) -> int:
    """The power of two at or above `value`, kept within [low, high]: how a length enters a key."""
    return min(max(1 << (value - 1).bit_length(), low), high)
