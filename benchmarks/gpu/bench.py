"""A device, a clock and a budget of time: how every case is checked, timed or left out, and why."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from torch import Tensor

from paged_inductor.kernels.roofline import GPUS, Gpu

Cell = dict[str, Any]


class NotMeasured(Exception):
    """A case that cannot be measured here, and why."""


class Bench:
    """Runs cases until the time is up. On a CPU ("tiny") everything runs once and nothing is timed."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self._end = time.monotonic() + seconds
        self.copy_bandwidth: float | None = None

    @property
    def tiny(self) -> bool:
        return self.device.type == "cpu"

    @property
    def left(self) -> float:
        """Seconds until the budget is used up."""
        return self._end - time.monotonic()

    @property
    def gpu(self) -> Gpu | None:
        """The data sheet of this device, if it is known."""
        name = "" if self.tiny else torch.cuda.get_device_name(self.device)
        return next((gpu for key, gpu in GPUS.items() if key in name), None)

    def seconds(self, call: Callable[[], Any]) -> float | None:
        """Median time of a call on the device, with cold caches; on a CPU None, after one call.

        The call's kernels are replayed as one CUDA graph: launched one by one, short ones would wait for the host.
        """
        if self.tiny:
            call()
            return None
        call()  # what is made at a first call is not recorded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
            return self.launched_seconds(graph.replay)
        finally:
            graph.reset()

    def launched_seconds(self, call: Callable[[], Any]) -> float | None:
        """As `seconds`, with the host's time to launch what the device waits for; the call is not run on a CPU."""
        if self.tiny:
            return None
        from triton.testing import do_bench

        return do_bench(call, warmup=10, rep=60, return_mode="median") / 1e3

    def need(self, num_bytes: int) -> None:
        """Raise `NotMeasured` unless that much memory can be allocated."""
        if self.tiny:
            return
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        if num_bytes > 0.9 * free:
            raise NotMeasured(f"needs {num_bytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")

    def section(self, name: str, run: Callable[[Any, Bench], Cell], cases: Iterable[Any], reserve: float) -> list[Cell]:
        """A cell for every case. reserve: seconds to leave for what comes later."""
        cells = []
        for case in cases:
            facts = asdict(case) if is_dataclass(case) and not isinstance(case, type) else {}
            cell: Cell = {"section": name, **facts}
            if self.left < reserve:
                cell |= {"status": "not measured", "why": "out of time"}
            else:
                cell |= self._guarded(run, case)
            print(*(f"{key}={_short(value)}" for key, value in cell.items()), flush=True)
            cells.append(cell)
        return cells

    def _guarded(self, run: Callable[[Any, Bench], Cell], case: Any) -> Cell:
        try:
            found = run(case, self)
        except (NotMeasured, ImportError) as why:
            return {"status": "not measured", "why": str(why)}
        except Exception as error:  # one case must not cost the others their time on the device
            if self.tiny:
                raise
            traceback.print_exc(limit=-4)
            return {"status": "failed", "why": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        if self.tiny:
            return {**found, "status": "not measured", "why": "no GPU"}
        return {**found, "status": "measured"}


def require_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Raise `NotMeasured` for results that are wrong: what is wrong has no speed."""
    error = ((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-20)).item()
    if not error <= tolerance:
        raise AssertionError(f"wrong by {error:.2g} of its norm, {tolerance:.2g} is allowed")


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, if both are known."""
    return None if a is None or b is None else round(a / b, 4)


def rate(amount: float, seconds: float | None, unit: float) -> float | None:
    """Amount per second in `unit`s, if the time is known."""
    return None if seconds is None else round(amount / seconds / unit, 3)


def microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 2)


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
