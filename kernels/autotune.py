"""Choice of a launch configuration: what was tuned for this key, else the first candidate.

No call tunes by itself, so that the first one of a process is as fast as the others: `python -m paged_inductor tune`
fills the cache on disk that calls look into (`tuning_cache`). `PAGED_INDUCTOR_AUTOTUNE=1` lets calls tune, too: each
times a key's candidates the first time it is met. The interpreter and CUDA graph capture never tune.
"""

import json
import os
from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch
from triton import OutOfResources, testing

from .launch import INTERPRETED, LaunchConfig
from .tuning_cache import Stamp, TuningCache

Key = tuple[Hashable, ...]
"""(kernel, device name, ...): exactly what changes the fastest configuration."""
Run = Callable[[LaunchConfig], None]
Bench = Callable[[Callable[[], None]], float]
Choose = Callable[[Key, Sequence[LaunchConfig], Run], LaunchConfig]
"""A strategy: picks one of the candidates for a key."""


def enabled() -> bool:
    """Whether a call times a key that was never tuned."""
    if INTERPRETED or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return False
    return os.environ.get("PAGED_INDUCTOR_AUTOTUNE", "0") not in ("0", "")


def choose(key: Key, candidates: Sequence[LaunchConfig], run: Run) -> LaunchConfig:
    """The tuned configuration of `key`, or the static choice `candidates[0]`."""
    if len(candidates) == 1:
        return candidates[0]
    known = tuning_cache(str(key[1])).get(_text(key))
    if known is not None and known in candidates:
        return known
    return tune(key, candidates, run) if enabled() else candidates[0]


def static(key: Key, candidates: Sequence[LaunchConfig], run: Run) -> LaunchConfig:
    """The static choice, whatever was tuned: keys know lengths and batch sizes, and results must not."""
    return candidates[0]


def tune(key: Key, candidates: Sequence[LaunchConfig], run: Run, bench: Bench | None = None) -> LaunchConfig:
    """Time all candidates and remember the fastest for `key`, on disk too.

    `run` must be repeatable: it may overwrite its outputs but must not change its inputs. `bench` returns the
    time of one call; by default the device timer of Triton.
    """
    times = [_time(run, candidate, bench or _device_time) for candidate in candidates]
    fastest = candidates[times.index(min(times))]
    tuning_cache(str(key[1])).store(_text(key), fastest)
    return fastest


@cache
def tuning_cache(device_name: str) -> TuningCache:
    """This process's cache of the choices for a device."""
    return TuningCache(Stamp.of(device_name))


@cache
def _text(key: Key) -> str:
    return json.dumps([part if isinstance(part, (str, int, bool)) else str(part) for part in key])


def _time(run: Run, candidate: LaunchConfig, bench: Bench) -> float:
    try:
        return bench(lambda: run(candidate))
    except OutOfResources:
        return float("inf")


def _device_time(call: Callable[[], None]) -> float:
    return testing.do_bench(call, warmup=5, rep=20, return_mode="median")


def bucket(value: int, low: int, high: int) -> int:
    """The power of two at or above `value`, kept within [low, high]: how a length enters a key."""
    return min(max(1 << (value - 1).bit_length(), low), high)
