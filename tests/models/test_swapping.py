"""More caches than the budget holds: those not in use are swapped out and come back, and every token is right."""

from __future__ import annotations

import copy
import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import paged_inductor
from paged_inductor import KVBudgetExceeded, QuotaExceeded, SwapError, configure, tenant
from paged_inductor.runtime import CacheGroup, SiteSpec, manager
from paged_inductor.runtime.disk import _DiskExtent
from paged_inductor.runtime.pool import BlockPool
from paged_inductor.runtime.storage import Storage
from paged_inductor.runtime.swap import SwapSpace

from .zoo import Decoder, Form, generate

pytestmark = pytest.mark.usefixtures("own_options")
PROMPT = 40
BLOCK_BYTES = 16 * 2 * 2 * 2 * 8 * 4  # tokens x layers x (K, V) x heads x head_dim x bytes


def paged_model(**options: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(Form())
    paged_inductor.page(model, inner="eager", **options)
    generate(model, prompts(1)[0], 3)  # compiled once, by one thread
    paged_inductor.trim()
    return model


def prompts(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 61, (1, PROMPT), generator=generator) for _ in range(count)]


def budget_of(blocks: int) -> int:
    """A budget for `blocks` more blocks of the model's than are reserved now (zero pages are not counted)."""
    reserved = sum((group.pool.capacity - 1) * group.block_bytes for group in manager().groups)
    return reserved + blocks * BLOCK_BYTES


def continued(model: Any, past: Any, last: Tensor, steps: int) -> tuple[Tensor, Any, Tensor]:
    """`steps` more tokens of a conversation."""
    tokens = []
    with torch.no_grad():
        for _ in range(steps):
            logits, past = model(last, past)
            last = logits[:, -1:].argmax(-1)
            tokens.append(last)
    return torch.cat(tokens, 1), past, last


def conversations(model: Any, count: int, rounds: int) -> list[Tensor]:
    """Several conversations in turn, a few tokens of each at a time."""
    state = []
    with torch.no_grad():
        for prompt in prompts(count):
            logits, past = model(prompt, None)
            state.append([past, logits[:, -1:].argmax(-1), []])
        for _ in range(rounds):
            for entry in state:
                tokens, entry[0], entry[1] = continued(model, entry[0], entry[1], 5)
                entry[2].append(tokens)
    return [torch.cat(entry[2], 1) for entry in state]


@pytest.mark.parametrize(
    "tiers", [{"swap_host": "1GiB"}, {"swap_disk": "1GiB"}, {"swap_host": 40_000, "swap_disk": 2**30}]
)
def test_conversations_in_turn_under_a_budget_for_some_of_them(tiers: dict) -> None:
    model = paged_model()
    expected = conversations(model, 6, 3)
    paged_inductor.trim()
    configure(kv_budget=budget_of(12), **tiers)
    before = manager().counters.swaps_out
    assert all(torch.equal(a, b) for a, b in zip(conversations(model, 6, 3), expected, strict=True))
    assert manager().counters.swaps_out > before + 12
    paged_inductor.check_integrity()


def test_without_tiers_the_budget_is_the_end() -> None:
    model = paged_model()
    configure(kv_budget=budget_of(12))
    with pytest.raises(KVBudgetExceeded, match=r"swap_disk"):
        conversations(model, 6, 3)


def test_a_full_disk_is_the_end_of_the_budget_and_loses_nothing() -> None:
    model = paged_model()
    paged_inductor.trim()
    configure(kv_budget=budget_of(7), swap_disk="1GiB")
    with torch.no_grad():
        _, first = model(prompts(2)[0], None)
        kept = [tensor.dense() for pair in first for tensor in pair]
        with (
            mock.patch.object(os, "pwrite", side_effect=OSError(errno.ENOSPC, "full")),
            pytest.raises(KVBudgetExceeded),
        ):
            generate(model, prompts(2)[1], 60)
        generate(model, prompts(2)[1], 60)  # there is room on the disk again
        assert all(torch.equal(tensor.dense(), values) for tensor, values in zip([t for p in first for t in p], kept))


def swap_everything_out() -> int:
    runtime = manager()
    with runtime.locked():
        return sum(runtime.swap.out(group, 10**6, ()) for group in runtime.groups)


def test_a_swap_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "swap"
    folder.mkdir()
    model = paged_model()
    expected = conversations(copy.deepcopy(model), 3, 2)
    gc.collect()
    paged_inductor.trim()
    configure(kv_budget=budget_of(7), swap_disk="1GiB", swap_dir=str(folder))
    folder.rmdir()
    with pytest.raises(KVBudgetExceeded) as raised:
        conversations(model, 3, 2)
    assert "mend what keeps caches that are not in use from being swapped out (disk: " in str(raised.value)
    assert f"No such file or directory: '{folder}" in str(raised.value)
    del raised
    gc.collect()
    folder.mkdir()
    assert all(map(torch.equal, conversations(model, 3, 2), expected))
    assert manager()._budget._swap.storage.refusals() == ""  # it is forgotten when there is room again


def test_a_tenant_over_its_quota_is_told_of_a_swap_folder_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "swap"
    folder.mkdir()
    model = paged_model()
    configure(swap_disk="1GiB", swap_dir=str(folder))
    folder.rmdir()
    with tenant("small", quota=budget_of(7)), pytest.raises(QuotaExceeded) as raised:
        conversations(model, 3, 2)
    assert "the batch, raise the quota with paged_inductor.tenant('small', quota=\"…GiB\"), or mend" in str(
        raised.value
    )
    assert f"No such file or directory: '{folder}" in str(raised.value)


@pytest.mark.parametrize("fault", ["changed", "cut off", "gone"])
def test_a_faulty_swap_file_is_an_error_of_its_cache_alone(fault: str) -> None:
    model = paged_model()
    configure(swap_disk="1GiB")
    first, second = prompts(2)
    with torch.no_grad():
        expected, _, _ = continued(model, model(second, None)[1], second[:, -1:], 4)
        _, past = model(first, None)
        assert swap_everything_out()
        extent = next(iter(manager().swap.storage._blocks))
        number = extent._file.fileno()  # type: ignore[attr-defined]
        if fault == "changed":
            os.pwrite(number, b"\x55", 100)
        elif fault == "cut off":
            os.ftruncate(number, 200)
        else:
            os.close(number)
        _, other = model(second, None)
        assert swap_everything_out()
        for _ in range(2):  # it stays lost, and nothing else changes
            with pytest.raises(SwapError, match="could not be brought back.*all others are intact"):
                model(second[:, -1:], past)
        tokens, _, _ = continued(model, other, second[:, -1:], 4)
        assert torch.equal(tokens, expected)
        paged_inductor.check_integrity()
        if fault == "gone":
            os.open(os.devnull, os.O_RDONLY)  # so that closing the file finds one
    del past
    paged_inductor.check_integrity()


OUT = [
    (SwapSpace, "_store"),
    (SwapSpace, "_move"),
    (Storage, "add"),
    (CacheGroup, "rename"),
    (BlockPool, "swap_out"),
]
BACK = [
    (BlockPool, "reserve"),
    (BlockPool, "allocate"),
    (SiteSpec, "put"),
    (_DiskExtent, "_read"),
    (_DiskExtent, "_check"),
    (CacheGroup, "rename"),
    (BlockPool, "swap_in"),
]


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(("where", "name"), OUT, ids=lambda x: getattr(x, "__name__", x))
def test_interrupted_on_the_way_out(where: type, name: str, done: bool) -> None:
    check_interruption(where, name, done, swapped=False)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(("where", "name"), BACK, ids=lambda x: getattr(x, "__name__", x))
def test_interrupted_on_the_way_back(where: type, name: str, done: bool) -> None:
    check_interruption(where, name, done, swapped=True)


def check_interruption(where: type, name: str, done: bool, swapped: bool) -> None:
    """Whatever is being done to the books: afterwards they balance, and no token is lost."""
    model = paged_model()
    configure(swap_host="1GiB" if where is SiteSpec else 0, swap_disk="1GiB")  # only from there contents are `put`
    with torch.no_grad():
        _, past = model(prompts(1)[0], None)
        tensors = [tensor for pair in past for tensor in pair]
        values = [tensor.dense() for tensor in tensors]
        if swapped:
            assert swap_everything_out() == 3
        original, calls = getattr(where, name), []

        def struck(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == 2 or where is not BlockPool or name == "reserve":  # of several calls, the second
                if done:
                    original(*args, **kwargs)
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        with mock.patch.object(where, name, struck), pytest.raises(KeyboardInterrupt):
            past[0][0].dense() if swapped else swap_everything_out()
        paged_inductor.check_integrity()
        assert all(torch.equal(tensor.dense(), value) for tensor, value in zip(tensors, values, strict=True))
        assert swap_everything_out() == 3
        assert all(torch.equal(tensor.dense(), value) for tensor, value in zip(tensors, values, strict=True))
    del past, tensors
    assert manager().swap.storage.used() == {"host": 0, "disk": 0}


def test_sixteen_threads_under_a_budget_for_four() -> None:
    model = paged_model()
    texts = prompts(16)
    expected = [generate(model, prompt, 24)[0] for prompt in texts]
    paged_inductor.trim()
    configure(kv_budget=budget_of(16), swap_disk="1GiB")  # a conversation takes four blocks
    got: list[Tensor | None] = [None] * 16
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            got[i] = generate(model, texts[i], 24)[0]
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert all(torch.equal(tokens, wanted) for tokens, wanted in zip(got, expected, strict=True))
    paged_inductor.check_integrity()


def test_over_its_quota_a_tenants_own_cold_caches_go() -> None:
    model = paged_model()
    configure(swap_disk="1GiB")
    with torch.no_grad():
        with tenant("other"):
            _, others = model(prompts(3)[0], None)
        with tenant("small", quota=5 * BLOCK_BYTES) as small:
            _, cold = model(prompts(3)[1], None)
            _, warm = model(prompts(3)[2], None)
            assert small.used == 3 * BLOCK_BYTES
            assert all(block < 0 for block in cold[0][0]._view.rows[0].blocks)
            assert all(block > 0 for block in others[0][0]._view.rows[0].blocks)
            tokens, cold, _ = continued(model, cold, prompts(3)[1][:, -1:], 4)  # now the other one goes
            assert all(block < 0 for block in warm[0][0]._view.rows[0].blocks)
            with pytest.raises(QuotaExceeded):
                model(torch.randint(0, 61, (1, 100)), None)
        unlimited, _, _ = continued(model, model(prompts(3)[1], None)[1], prompts(3)[1][:, -1:], 4)
        assert torch.equal(tokens, unlimited)


def test_low_priority_goes_first() -> None:
    model = paged_model()
    configure(swap_disk="1GiB")
    with torch.no_grad():
        with tenant("low", priority=-1):
            _, low = model(prompts(3)[0], None)
        with tenant("high", priority=1):
            _, high = model(prompts(3)[1], None)
        _, usual = model(prompts(3)[2], None)
        runtime = manager()
        swapped = []
        for _ in range(3):
            with runtime.locked():
                runtime.swap.out(low[0][0]._view.group, 1, ())
            swapped.append([past[0][0]._view.rows[0].blocks[0] < 0 for past in (low, usual, high)])
    assert swapped == [[True, False, False], [True, True, False], [True, True, True]]
    with tenant("low", priority=0), tenant("high", priority=0):
        pass


def test_killing_the_process_leaves_no_files(tmp_path: Any) -> None:
    configure(swap_disk="1GiB", swap_dir=str(tmp_path))
    model = paged_model()
    configure(swap_disk="1GiB", swap_dir=str(tmp_path))
    with torch.no_grad():
        _, past = model(prompts(1)[0], None)
    assert swap_everything_out()
    assert manager().swap.storage.used()["disk"] > 0
    assert os.listdir(tmp_path) == []
    del past


def test_prefetch() -> None:
    model = paged_model()
    configure(swap_host="1GiB")
    with torch.no_grad():
        _, past = model(prompts(1)[0], None)
        expected = [tensor.dense() for pair in past for tensor in pair]
        assert swap_everything_out() == 3
        paged_inductor.prefetch({"cache": past})
        manager()._ahead._executor.submit(lambda: None).result()
        assert paged_inductor.stats().swapped_blocks == 0
        assert paged_inductor.stats().swaps_ahead == 3
        assert all(torch.equal(a.dense(), b) for a, b in zip([t for pair in past for t in pair], expected))
    with pytest.raises(paged_inductor.UnsupportedInputError, match=r"got list.*pass what a paged model returned"):
        paged_inductor.prefetch([torch.zeros(2)])


@pytest.mark.parametrize(
    "options", [{"swap_dir": "/no/such/folder"}, {"swap_disk": "much"}, {"swap_host": -1}], ids=str
)
def test_bad_options(options: dict) -> None:
    with pytest.raises(paged_inductor.ConfigurationError, match=next(iter(options))):
        configure(**options)


@pytest.mark.parametrize("done", [False, True])
def test_a_failed_swap_keeps_nothing_alive(done: bool) -> None:
    """Also not until garbage is collected."""
    model = paged_model()
    configure(swap_disk="1GiB")
    gc.disable()
    try:
        with torch.no_grad():
            _, past = model(prompts(1)[0], None)
        if done:
            assert swap_everything_out() == 3
            with mock.patch.object(os, "preadv", side_effect=OSError), pytest.raises(SwapError):
                past[0][0].dense()
        else:
            with mock.patch.object(os, "pwrite", side_effect=OSError):
                assert swap_everything_out() == 0
        del past
        assert paged_inductor.stats().sequences == 0
    finally:
        gc.enable()
