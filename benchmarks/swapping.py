"""What swapping costs against copying the same bytes, and what quotas and priorities add to a step.

    OMP_NUM_THREADS=1 python -m benchmarks.swapping [--quick]

Bytes: a cache of SmolLM2-135M (30 layers, 3 x 64, float32). Memory against `Tensor.copy_`, disk against one `pwrite`
and one `preadv` of the same bytes to a file in the same folder, in turn: both until the bytes are on the disk
(fdatasync) and from a file that is not in memory; and both within the page cache. Neither side's file is emptied or
closed on the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import paged_inductor
from paged_inductor import configure, tenant
from paged_inductor.runtime import CacheGroup, SiteSpec, manager
from paged_inductor.runtime.tiers import memory_of

from .harness import save

TIERS = ("host", "disk", "page cache")
LAYERS, HEADS, HEAD_DIM, BLOCK = 30, 3, 64, 16


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def swap_group() -> CacheGroup:
    cpu = torch.device("cpu")
    sites = tuple(SiteSpec(HEADS, HEAD_DIM, torch.float32, cpu, key) for _ in range(LAYERS) for key in (True, False))
    return manager().group(sites, BLOCK)


def swapping(tier: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Out and back in turn with plain copies of as many bytes. tier: see `TIERS`."""
    option = "swap_host" if tier == "host" else "swap_disk"
    configure(**{"swap_host": 0, "swap_disk": 0, option: "8GiB"})
    runtime, group = manager(), swap_group()
    view = runtime.create(group, 1, tokens, "benchmark").view
    for arena in group.arenas:
        arena.normal_()
    with runtime.using(view):
        pass
    blocks = len(view.rows[0].blocks)
    size = blocks * group.block_bytes
    source, target = torch.empty(size, dtype=torch.uint8).fill_(1), torch.empty(size, dtype=torch.uint8).fill_(2)
    flushed = tier == "disk"

    def out() -> None:
        with runtime.locked():
            assert runtime.swap.out(group, blocks, ()) == blocks
        if flushed:
            os.fdatasync(swap_file())

    def back() -> None:
        with runtime.using(view):
            pass

    def swap_file() -> int:
        (extent,) = runtime.swap.storage._blocks
        return extent._file.fileno()  # type: ignore[attr-defined]

    def settle() -> None:
        """Wait until the swap file that was read is closed: what follows shall not be slower for it."""
        runtime.swap.storage._disk._closer.submit(lambda: None).result()

    def forget(file: int) -> None:
        """Let the next reads come from the disk."""
        if flushed:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    times: dict[str, list[float]] = {name: [] for name in ("out", "back", "write", "read")}
    with tempfile.TemporaryFile(buffering=0) as file:
        plain = file.fileno()

        def write() -> None:
            _write(plain, memory_of(source))
            if flushed:
                os.fdatasync(plain)

        for _ in range(rounds + 1):
            if tier == "host":
                times["write"].append(timed(lambda: target.copy_(source)))
                times["out"].append(timed(out))
                times["read"].append(timed(lambda: source.copy_(target)))
            else:
                os.ftruncate(plain, 0)
                times["write"].append(timed(write))
                times["out"].append(timed(out))
                forget(plain)
                times["read"].append(timed(lambda: _read(plain, memory_of(target))))
                forget(swap_file())
            times["back"].append(timed(back))
            settle()
    speed = {name: size / statistics.median(values[1:]) / 2**30 for name, values in times.items()}
    ratios = {
        way: statistics.median(plain / swap for plain, swap in zip(times[other][1:], times[way][1:]))
        for way, other in (("out", "write"), ("back", "read"))
    }
    configure(swap_host=None, swap_disk=0)
    return {
        "tier": tier,
        "MiB": size >> 20,
        **{f"{name}_GiB_s": round(value, 2) for name, value in speed.items()},
        **{f"{name}_share": round(value, 2) for name, value in ratios.items()},
    }


def _write(file: int, data: memoryview) -> None:
    at = 0
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def _read(file: int, data: memoryview) -> None:
    at = 0
    while data:
        count = os.preadv(file, [data], at)
        data, at = data[count:], at + count


def quotas(steps: int) -> dict[str, Any]:
    """A step's allocation with and without a quota and a priority, in turn."""
    runtime, group = manager(), swap_group()
    views = {name: runtime.create(group, 4, 40, name).view for name in ("plain", "tenant")}
    times: dict[str, list[float]] = {"plain": [], "tenant": []}
    for _ in range(steps):
        times["plain"].append(timed(lambda: views.update(plain=runtime.append(views["plain"], 1).view)))
        with tenant("t", quota="4GiB", priority=3):
            times["tenant"].append(timed(lambda: views.update(tenant=runtime.append(views["tenant"], 1).view)))
    plain, with_quota = (statistics.median(times[name]) * 1e6 for name in ("plain", "tenant"))
    return {
        "append_us": round(plain, 2),
        "append_with_quota_us": round(with_quota, 2),
        "added_us": round(with_quota - plain, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="little data, nothing saved")
    options = parser.parse_args()
    tokens, rounds = (512, 3) if options.quick else (8192, 9)
    cells = []
    for tier in TIERS:
        cells.append(swapping(tier, tokens, rounds))
        print(*(f"{key}={value}" for key, value in cells[-1].items()), flush=True)
        paged_inductor.trim()
    cells.append(quotas(200 if options.quick else 3000))
    print(*(f"{key}={value}" for key, value in cells[-1].items()), flush=True)
    if not options.quick:
        print(save("swapping", cells))


if __name__ == "__main__":
    main()
