"""A step of several tokens begins while its swapped cache still comes back: each layer waits for its own tokens."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import paged_inductor
from paged_inductor import SwapError, configure
from paged_inductor.ops import formulas
from paged_inductor.passes import rewrite
from paged_inductor.runtime import SiteSpec, manager
from paged_inductor.runtime.arrival import Arrival
from paged_inductor.runtime.disk import _DiskExtent

from .zoo import Decoder, Form

pytestmark = pytest.mark.usefixtures("idle", "own_options")
LAYERS = 3
PATIENCE = 60  # seconds after which a test fails rather than to wait on
TIERS = [{"swap_host": "1GiB"}, {"swap_disk": "1GiB"}]


def models(inner: str = "eager", form: Form | None = None) -> tuple[Decoder, Decoder]:
    """A dense model and its paged twin, whose graphs are compiled."""
    torch.manual_seed(0)
    dense, paged = (Decoder(form or Form(), layers=LAYERS) for _ in range(2))
    paged.load_state_dict(dense.state_dict())
    paged_inductor.page(paged, inner=inner)
    conversation(paged, lambda: None)
    return dense, paged


def text(seed: int, length: int, batch: int = 1) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def swap_out() -> int:
    runtime = manager()
    with runtime.locked():
        return sum(runtime.swap.out(group, 10**6, ()) for group in runtime.groups)


def decoded(model: Any, past: Any, logits: Tensor, steps: int = 4) -> Tensor:
    tokens = [logits[:, -1:].argmax(-1)]
    for _ in range(steps):
        logits, past = model(tokens[-1], past)
        tokens.append(logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)


def conversation(model: Any, between: Callable[[], object], lengths: tuple[int, ...] = (40, 9, 23)) -> Tensor:
    """The tokens of a conversation of several turns; `between` is called before all but the first."""
    answers, past = [], None
    with torch.no_grad():
        for turn, length in enumerate(lengths):
            if turn:
                between()
            logits, past = model(text(turn, length), past)
            answers.append(decoded(model, past, logits))
    return torch.cat(answers, 1)


def streamed() -> Any:
    """Counts the arrivals that a block of code begins."""
    return mock.patch.object(Arrival, "start", autospec=True, side_effect=Arrival.start)


@pytest.mark.parametrize("tier", TIERS, ids=str)
@pytest.mark.parametrize("form", [Form(), Form(layout="BSHD", mask="float"), Form(gqa="expand", store="list")], ids=str)
def test_turns_behind_a_swapped_cache(tier: dict, form: Form) -> None:
    """The last block is partly filled, and the step writes to it."""
    dense, paged = models(form=form)
    configure(**tier)
    with streamed() as begun:
        tokens = conversation(paged, swap_out)
    assert torch.equal(tokens, conversation(dense, lambda: None))
    assert begun.call_count == 2
    stats, size = paged_inductor.stats(), LAYERS * 2 * 16 * 2 * 8 * 4
    assert stats.swaps_in == stats.swaps_out == 7
    assert stats.swap_bytes_in == 7 * size and stats.swap_seconds_in > 0


def resident(model: Any, seed: int = 1, length: int = 40, count: int = 9) -> Tensor:
    """What a step gives behind a cache that was never swapped out."""
    with torch.no_grad():
        return model(text(seed, count), model(text(0, length), None)[1])[0]


def behind(model: Any, length: int = 40) -> Any:
    """A cache that was swapped out."""
    with torch.no_grad():
        _, past = model(text(0, length), None)
    assert swap_out() >= -(-length // 16)
    return past


@contextmanager
def gated(first: int, gate: threading.Event) -> Iterator[None]:
    """The contents of sites from `first` on do not arrive before `gate` is open."""
    check, put, count = _DiskExtent._check, SiteSpec.put, itertools.count()

    def wait(site: int) -> None:
        if site >= first and not gate.wait(PATIENCE):
            raise SwapError("nobody opened the gate")

    def slow_check(self: _DiskExtent, site: int, spans: Any) -> None:
        wait(site)
        check(self, site, spans)

    def slow_put(*args: Any) -> None:
        wait(next(count))
        put(*args)

    with mock.patch.object(_DiskExtent, "_check", slow_check), mock.patch.object(SiteSpec, "put", slow_put):
        yield


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_a_layer_is_computed_while_the_next_is_on_its_way(tier: dict) -> None:
    """The second layer's contents come after the first one's attention was computed, or never."""
    _, paged = models()
    configure(**tier)
    past = behind(paged)
    computed = threading.Event()
    attention = formulas.gathered_attention

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        result = attention(*args, **kwargs)
        computed.set()
        return result

    with (
        torch.no_grad(),
        gated(2, computed),
        mock.patch.object(formulas, "gathered_attention", attend),
    ):
        logits, _ = paged(text(1, 9), past)
    expected = resident(paged)
    assert torch.equal(logits, expected)


def test_compiled_code_waits_for_a_layer_when_it_has_computed_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []
    from torch._inductor import graph

    monkeypatch.setattr(graph.GraphLowering, "save_output_code", staticmethod(sources.append))
    dense, paged = models(inner="inductor")
    configure(swap_disk="1GiB")
    with streamed() as begun:
        tokens = conversation(paged, swap_out)
    assert torch.equal(tokens, conversation(dense, lambda: None))
    assert begun.call_count == 2
    waiting = [source for source in sources if "paged_inductor.arrived.default(" in source]
    assert waiting
    for source in waiting:
        calls = re.findall(
            r"= torch\.ops\.(?:paged_inductor\.(arrived)|aten\.(_scaled_dot_product\w+))\.default\(", source
        )
        assert [wait or "attention" for wait, _ in calls] == ["arrived", "attention"] * LAYERS


def test_copies_are_made_of_what_has_arrived() -> None:
    """Two continuations of one cache: the second one copies the tail, which both see."""
    _, paged = models()
    configure(swap_disk="1GiB")
    past = behind(paged)
    expected = resident(paged)
    with torch.no_grad():
        kept = [paged(text(1, 9), past)]
        assert swap_out() == 4
        before = manager().counters.copies_on_write
        kept.append(paged(text(1, 9), past))
        assert manager().counters.copies_on_write == before + 1
    for logits, _ in kept:
        assert torch.equal(logits, expected)
    assert swap_out() > 0
    answers = [decoded(paged, cache, logits) for logits, cache in kept]
    assert torch.equal(answers[0], answers[1])


def test_two_threads_that_need_the_same_blocks() -> None:
    """The second one waits for all that the first one waits for."""
    _, paged = models()
    configure(swap_disk="1GiB")
    past = behind(paged)
    gate = threading.Event()
    got: dict[int, Tensor] = {}

    def work(seed: int) -> None:
        with torch.no_grad():
            got[seed] = paged(text(seed, 9), past)[0]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    with gated(2, gate), streamed() as begun:
        for thread in threads:
            thread.start()
        threads[1].join(0.3)
        assert not got
        paged_inductor.check_integrity()  # the books are nobody's meanwhile, and balance
        gate.set()
        for thread in threads:
            thread.join()
    assert begun.call_count == 1
    for seed, logits in got.items():
        expected = resident(paged, seed)
        assert torch.equal(logits, expected)


def test_sixteen_threads_in_turns_under_a_budget_for_four() -> None:
    dense, paged = models()
    paged_inductor.trim()
    reserved = sum((group.pool.capacity - 1) * group.block_bytes for group in manager().groups)
    configure(kv_budget=reserved + 28 * LAYERS * 2 * 16 * 2 * 8 * 4, swap_disk="1GiB")
    got: list[Tensor | None] = [None] * 16
    meet = threading.Barrier(16, timeout=PATIENCE)  # so that all caches are there between turns
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            got[i] = conversation(paged, meet.wait)
        except BaseException as failure:
            failures.append(failure)

    with streamed() as begun:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures
    assert begun.call_count > 0
    expected = conversation(dense, lambda: None)
    assert all(tokens is not None and torch.equal(tokens, expected) for tokens in got)


def test_decoding_begins_when_all_is_back() -> None:
    _, paged = models()
    configure(swap_disk="1GiB")
    past = behind(paged)
    with torch.no_grad(), streamed() as begun:
        logits, _ = paged(text(1, 1), past)
    assert begun.call_count == 0
    expected = resident(paged, count=1)
    assert torch.equal(logits, expected)


def test_a_graph_that_would_not_wait_is_refused() -> None:
    torch.manual_seed(0)
    model = Decoder(Form(), layers=LAYERS)
    paged_inductor.page(model, inner="eager")
    with (
        torch.no_grad(),
        mock.patch.object(rewrite, "wait_for_layers"),
        pytest.raises(BackendCompilerFailed, match="does not wait for the tokens of paged_arena_0_0"),
    ):
        conversation(model, lambda: None)


def test_in_debug_mode_every_step_begins_when_all_is_back() -> None:
    dense, paged = models()
    configure(swap_disk="1GiB", sanitize=True)
    with streamed() as begun:
        tokens = conversation(paged, swap_out)
    assert torch.equal(tokens, conversation(dense, lambda: None))
    assert begun.call_count == 0
