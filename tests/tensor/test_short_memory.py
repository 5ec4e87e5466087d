"""Operations on handles while memory is short."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import paged_inductor
from paged_inductor import configure
from paged_inductor._config import reset_config
from paged_inductor.runtime import manager
from paged_inductor.tensor import derive

from .factory import paged_like, view_of


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    paged_inductor.reset()
    paged_inductor.trim()
    yield
    reset_config()
    paged_inductor.check_integrity()


@pytest.mark.parametrize("what", ["write", "append"])
def test_it_waits_without_what_others_need_to_end(what: str) -> None:
    """A running step has all memory that is left, and changes handles before it ends."""
    values = torch.randn(1, 2, 60, 8)
    (kept,) = paged_like(values)
    fork = kept.clone()
    held: list[Any] = paged_like(torch.zeros(1, 2, 64, 8))
    configure(kv_budget=sum((group.pool.capacity - 1) * group.block_bytes for group in manager().groups))
    running, waiting, done = threading.Event(), threading.Event(), []

    def step() -> None:
        with manager().using(view_of(held[0])):
            running.set()
            waiting.wait(10)
            derive.written(view_of(held[0]))
        held.clear()

    def other() -> None:
        try:
            with torch.no_grad():
                done.append(fork.mul_(2) if what == "write" else torch.cat([fork, values], dim=2))
        except BaseException as error:
            done.append(error)

    threads = [threading.Thread(target=target, daemon=True) for target in (step, other)]
    threads[0].start()
    running.wait(10)
    threads[1].start()
    while not len(manager()._budget.waiters) and threads[1].is_alive():
        pass
    assert not done
    waiting.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    expected = values * 2 if what == "write" else torch.cat([values, values], dim=2)
    assert torch.equal(done[0].dense(), expected)
    assert torch.equal(kept.dense(), values)
