"""What goes wrong while a step runs and its cache still comes back: the step is undone, and nothing else changes."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import paged_inductor
from paged_inductor import SwapError, configure
from paged_inductor.ops import formulas
from paged_inductor.runtime import CacheGroup, Schedule, manager
from paged_inductor.runtime.arrival import Arrival
from paged_inductor.runtime.disk import _DiskExtent
from paged_inductor.runtime.pool import BlockPool
from paged_inductor.runtime.swap import SwapSpace

from .test_streaming import LAYERS, TIERS, behind, gated, models, resident, text
from .zoo import Decoder

pytestmark = pytest.mark.usefixtures("idle", "own_options")


@pytest.mark.parametrize("site", range(2 * LAYERS))
def test_contents_that_changed_are_never_computed_with(site: int) -> None:
    """Whatever the layer: the step is undone, the cache is lost, and everything else is as it was."""
    _, paged = models()
    configure(swap_disk="1GiB")
    other = behind(paged, 20)
    past = behind(paged)
    extent = manager().swap.storage.piece(past[0][0]._view.rows[0].blocks[1]).extent
    number, offset = extent._file.fileno(), extent._offsets[site] + 100  # type: ignore[attr-defined]
    right = os.pread(number, 1, offset)
    os.pwrite(number, bytes([right[0] ^ 1]), offset)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(SwapError, match="could not be brought back.*all others are intact"):
                paged(text(1, 9), past)
            paged_inductor.check_integrity()
            assert all(block < 0 for block in past[0][0]._view.rows[0].blocks)
        logits, _ = paged(text(1, 9), other)
        expected = resident(paged, length=20)
        assert torch.equal(logits, expected)
        os.pwrite(number, right, offset)
        check_is_intact(paged, past)


def check_is_intact(paged: Decoder, past: Any) -> None:
    """A cache that `behind` made still holds the tokens of its prompt."""
    with torch.no_grad():
        logits, _ = paged(text(1, 9), past)
        expected = resident(paged)
    assert torch.equal(logits, expected)
    paged_inductor.check_integrity()


def test_a_file_that_was_cut_off() -> None:
    _, paged = models()
    configure(swap_disk="1GiB")
    past = behind(paged)
    (extent,) = manager().swap.storage._blocks
    number = extent._file.fileno()  # type: ignore[attr-defined]
    contents = os.pread(number, 10**6, 0)
    os.ftruncate(number, extent._offsets[-1] - 50)  # type: ignore[attr-defined]
    with torch.no_grad(), pytest.raises(SwapError, match="cut off"):
        paged(text(1, 9), past)
    os.pwrite(number, contents, 0)
    check_is_intact(paged, past)


@pytest.mark.parametrize("tier", TIERS, ids=str)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_while_layers_are_on_their_way(tier: dict, error: type[BaseException]) -> None:
    """Nobody writes into its blocks when it has ended."""
    _, paged = models()
    configure(**tier)
    past = behind(paged)
    attention, gate = formulas.gathered_attention, threading.Event()
    threads: list[threading.Thread] = []

    def fail(*args: Any, **kwargs: Any) -> Tensor:
        attention(*args, **kwargs)
        threads.extend(t for t in threading.enumerate() if t.name.startswith("paged_inductor_arrival"))
        threading.Timer(0.05, gate.set).start()  # the reader is waited for
        raise error("in the first layer")

    with (
        torch.no_grad(),
        gated(2, gate),
        mock.patch.object(formulas, "gathered_attention", fail),
        pytest.raises(error, match="in the first layer"),
    ):
        paged(text(1, 9), past)
    assert threads and gate.is_set()
    assert not any(thread.is_alive() for thread in threads)
    assert not any(group.pool.transfers for group in manager().groups)
    paged_inductor.check_integrity()
    check_is_intact(paged, past)


def test_interrupted_while_it_waits() -> None:
    """The reader has begun a layer: it ends that, and no other."""
    _, paged = models()
    configure(swap_disk="1GiB")
    past = behind(paged)
    read: list[int] = []
    stopped = threading.Event()
    original, stop = _DiskExtent._check, Arrival.stop

    def check(self: _DiskExtent, site: int, spans: Any) -> None:
        read.append(site)
        assert stopped.wait(60)
        original(self, site, spans)

    def stop_first(self: Arrival) -> None:
        self._stopped = True
        stopped.set()
        stop(self)

    with (
        torch.no_grad(),
        mock.patch.object(_DiskExtent, "_check", check),
        mock.patch.object(Arrival, "stop", stop_first),
        mock.patch.object(Arrival, "wait", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        paged(text(1, 9), past)
    assert 1 <= len(read) <= 2  # two threads may check
    assert not any(group.pool.transfers for group in manager().groups)
    check_is_intact(paged, past)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Arrival, "__init__"),
        (Arrival, "start"),
        (Arrival, "join"),
        (Arrival, "accept"),
        (SwapSpace, "begin_back"),
        (SwapSpace, "end_back"),
        (BlockPool, "reserve"),
        (BlockPool, "swap_in"),
        (CacheGroup, "rename"),
        (Schedule, "__init__"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_interrupted_anywhere(where: type, name: str, done: bool) -> None:
    _, paged = models()
    configure(swap_disk="1GiB")
    past = behind(paged)
    original, struck = getattr(where, name), []

    def strike(*args: Any, **kwargs: Any) -> Any:
        if struck:
            return original(*args, **kwargs)
        struck.append(name)
        if done:
            original(*args, **kwargs)
        raise KeyboardInterrupt

    with torch.no_grad(), mock.patch.object(where, name, strike), pytest.raises(KeyboardInterrupt):
        paged(text(1, 9), past)
    assert not any(group.pool.transfers or group.active for group in manager().groups)
    paged_inductor.check_integrity()
    check_is_intact(paged, past)


def test_a_failed_arrival_keeps_nothing_alive() -> None:
    """Also not until garbage is collected."""
    _, paged = models()
    configure(swap_disk="1GiB")
    gc.disable()
    try:
        past = behind(paged)
        with torch.no_grad(), mock.patch.object(os, "preadv", side_effect=OSError), pytest.raises(SwapError):
            paged(text(1, 9), past)
        del past
        assert paged_inductor.stats().sequences == 0
    finally:
        gc.enable()
