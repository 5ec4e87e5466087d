"""Static caches where things go wrong, or not as they mostly do: nothing is lost, nothing leaks."""

from __future__ import annotations

import copy
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paged_inductor
from paged_inductor import ops, positions
from paged_inductor.tensor.adopt import refusal

from .static_zoo import FORMS, generate


@pytest.fixture
def formula() -> None:
    """Compiled code, whose sums are closer to the dense model's."""


LENGTH = 64
GPT_FAST = FORMS[0]


def paged(model: Any) -> Any:
    return paged_inductor.page(model, inner="eager")


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def caches(model: Any) -> list[Tensor]:
    return [x.dense() if isinstance(x, paged_inductor.PagedTensor) else x.clone() for x in model.caches()]


def prepared() -> tuple[Any, Any]:
    """A model and its twin after a prompt of 7 and one step: paged, and compiled for steps; and dense."""
    torch.manual_seed(0)
    model = GPT_FAST.make()
    model.start(2, LENGTH)
    twin = copy.deepcopy(model)
    paged(model)
    with torch.no_grad():
        for positions in (torch.arange(7), torch.tensor([7]), torch.tensor([8])):
            tokens = torch.ones(2, len(positions), dtype=torch.long)
            close(model(tokens, positions), twin(tokens, positions))
    return model, twin


@torch.no_grad()
def test_a_step_that_fails_leaves_the_positions_unwritten() -> None:
    model, twin = prepared()
    before, used = caches(model), paged_inductor.stats().blocks_used
    token = torch.ones(2, 1, dtype=torch.long)
    fault = mock.patch.object(ops.dispatch.formulas, "cache_write", side_effect=KeyboardInterrupt)
    with fault, pytest.raises(KeyboardInterrupt):
        model(token, torch.tensor([16]))
    assert all(map(torch.equal, caches(model), before))
    assert paged_inductor.stats().blocks_used == used
    paged_inductor.check_integrity()
    close(model(token, torch.tensor([9])), twin(token, torch.tensor([9])))


@torch.no_grad()
@pytest.mark.parametrize("positions", [[3, 4], [30, 31], [20, 9], [5, 5], [62, 63]])
def test_positions_behind_a_gap_before_the_end_and_scattered(positions: list[int]) -> None:
    model, twin = prepared()
    tokens = torch.tensor([[1, 2], [3, 4]])
    where = torch.tensor(positions)
    close(model(tokens, where), twin(tokens, where))
    for ours, theirs in zip(caches(model), twin.caches()):
        close(ours, theirs)
    after = torch.tensor([40])
    close(model(tokens[:, :1], after), twin(tokens[:, :1], after))
    paged_inductor.check_integrity()


@torch.no_grad()
def test_a_position_beyond_the_buffer_raises_as_torch_does() -> None:
    model, twin = prepared()
    before = caches(model)
    with pytest.raises(IndexError):
        model(torch.ones(2, 1, dtype=torch.long), torch.tensor([LENGTH]))
    assert all(map(torch.equal, caches(model), before))
    close(
        model(torch.ones(2, 1, dtype=torch.long), torch.tensor([9])),
        twin(torch.ones(2, 1, dtype=torch.long), torch.tensor([9])),
    )


@torch.no_grad()
def test_one_layer_ahead_of_the_others_runs_on_its_own_positions() -> None:
    """torchtune counts in every layer: where the counters differ, so do the positions."""
    form = next(form for form in FORMS if form.name == "torchtune")
    torch.manual_seed(0)
    model = form.make()
    model.start(2, LENGTH)
    twin = copy.deepcopy(model)
    paged(model)
    outs = []
    for each in (model, twin):
        feed = form.feed(each, each)
        feed(torch.ones(2, 5, dtype=torch.long), 0)
        feed(torch.ones(2, 1, dtype=torch.long), 5)
        for name, buffer in each.layers[1].named_buffers():
            if "pos" in name:
                buffer.add_(2)
        outs.append(feed(torch.ones(2, 1, dtype=torch.long), 6))
    close(*outs)
    for ours, theirs in zip(caches(model), twin.caches()):
        close(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("change", ["in place", "another", "and back"])
def test_a_mask_buffer_that_changes_is_obeyed(change: str) -> None:
    """The proof that gpt-fast's mask is causal relies on the buffer's content."""
    model, twin = prepared()
    assert {site.mask for site in paged_inductor.explain(model).sites} == {"causal, offset start_0"}
    tokens = torch.tensor([[1], [3]])
    for each in (model, twin):
        mask = each.causal_mask.clone() if change == "another" else each.causal_mask
        mask[:, 2:5] = False
        each.causal_mask = mask
    close(model(tokens, torch.tensor([9])), twin(tokens, torch.tensor([9])))
    if change == "and back":
        for each in (model, twin):
            each.causal_mask.fill_(1).tril_()
    close(model(tokens, torch.tensor([10])), twin(tokens, torch.tensor([10])))


class Scratch(nn.Module):
    """A buffer that nobody keeps, one that is only partly returned, and attention on both."""

    def forward(self, q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        buffer, kept = (torch.zeros(2, 2, 16, 8).index_copy_(2, at, k) for _ in range(2))
        out = F.scaled_dot_product_attention(q, buffer, buffer)
        return out + F.scaled_dot_product_attention(q, kept, kept), kept[:, :, :4]


@torch.no_grad()
def test_buffers_that_nobody_keeps_are_left_alone() -> None:
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    module = Scratch()
    step = torch.compile(module, backend="paged_inductor", options={"inner": "eager"})
    for ours, theirs in zip(step(q, k, torch.arange(3)), module(q, k, torch.arange(3))):
        close(ours + 0, theirs)


def test_calls_that_need_gradients_still_write_to_the_pages() -> None:
    model, twin = prepared()
    tokens, position = torch.ones(2, 1, dtype=torch.long), torch.tensor([9])
    for each in (model, twin):
        each.head.weight.requires_grad_(True)
    ours, theirs = model(tokens, position), twin(tokens, position)
    close(ours, theirs)
    ours.sum().backward()
    theirs.sum().backward()
    close(model.head.weight.grad, twin.head.weight.grad)
    for mine, other in zip(caches(model), twin.caches()):
        close(mine, other.detach())


def test_memory_that_others_share_is_not_taken() -> None:
    buffer = torch.zeros(2, 2, 8, 4)
    assert refusal(buffer) == ""
    array = buffer.numpy()
    assert "numpy" in refusal(buffer)
    assert array.sum() == 0
    whole = torch.zeros(2, 2, 8, 4)
    part = whole[:1]
    assert "view" in refusal(part)
    assert "shares its memory" in refusal(whole)


@torch.no_grad()
def test_an_adopted_model_can_be_unpaged_and_goes_on() -> None:
    torch.manual_seed(0)
    model = GPT_FAST.make()
    model.start(2, LENGTH)
    expected = generate(GPT_FAST, model, model, [torch.ones(2, 5, dtype=torch.long)], 12)
    model.start(2, LENGTH)
    feed = GPT_FAST.feed(model, paged(model))
    logits = feed(torch.ones(2, 5, dtype=torch.long), 0)
    found = []
    for i in range(12):
        if i == 4:
            paged_inductor.unpage(model)
        found.append(logits[:, -1].argmax(-1, keepdim=True))
        logits = feed(found[-1], 5 + i)
    assert torch.equal(torch.cat(found, 1), expected[:, 5:])


class Ring(nn.Module):
    """The oldest token is overwritten at `position % length`; attention reads the whole buffer."""

    length = 8

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 2, self.length, 8))
        self.register_buffer("v", torch.zeros(1, 2, self.length, 8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        self.k[:, :, at] = k
        self.v[:, :, at] = v
        return F.scaled_dot_product_attention(q, self.k, self.v, mask), self.k.sum()


@torch.no_grad()
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_tokens_behind_the_one_that_is_written_are_seen(
    masked: bool, kernels: bool, request: pytest.FixtureRequest
) -> None:
    if kernels:
        request.getfixturevalue("kernels_serve")
    torch.manual_seed(0)
    module = Ring()
    twin = copy.deepcopy(module)
    step = torch.compile(module, backend="paged_inductor", options={"inner": "eager"})
    for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 0, 17):
        q, k, v = torch.randn(3, 1, 2, 1, 8).unbind()
        at = torch.tensor([i % Ring.length])
        mask = (torch.arange(Ring.length) <= i)[None] if masked else None
        for ours, theirs in zip(step(q, k, v, at, mask), twin(q, k, v, at, mask)):
            close(ours, theirs)


class Broadcast(nn.Module):
    """One token is written to several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 2, 40, 8))
        self.register_buffer("v", torch.zeros(1, 2, 40, 8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, a: int, b: int) -> Tensor:
        self.k[:, :, a:b] = k
        self.v[:, :, a:b] = v
        return F.scaled_dot_product_attention(q, self.k[:, :, :b], self.v[:, :, :b])


@torch.no_grad()
def test_a_token_that_is_broadcast_over_a_slice() -> None:
    torch.manual_seed(0)
    module = Broadcast()
    twin = copy.deepcopy(module)
    step = torch.compile(module, backend="paged_inductor", options={"inner": "eager"})
    for a, b in ((0, 3), (3, 6), (6, 9), (9, 10), (10, 11), (11, 12)):
        q, k, v = torch.randn(3, 1, 2, 1, 8).unbind()
        close(step(q, k, v, a, b), twin(q, k, v, a, b))
    close(module.k + 0, twin.k)


class Counted(nn.Module):
    """Caches and their counter are arguments."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, count: Tensor) -> Tensor:
        at = torch.arange(k.shape[2]) + count
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        count.add_(k.shape[2])
        return F.scaled_dot_product_attention(q, keys, values, torch.arange(LENGTH) <= at[:, None])


def counted_loop(step: Any, seed: int) -> list[Tensor]:
    with torch.no_grad():
        keys, values, count = torch.zeros(1, 2, LENGTH, 8), torch.zeros(1, 2, LENGTH, 8), torch.zeros(1).long()
        generator = torch.Generator().manual_seed(seed)
        outs = []
        for i in range(30):
            q, k, v = torch.randn(3, 1, 2, 3 + seed if i == 0 else 1, 8, generator=generator).unbind()
            outs.append(step(q, k, v, keys, values, count))
    return outs


def test_threads_with_counters_of_their_own() -> None:
    module = Counted()
    step = torch.compile(module, backend="paged_inductor", options={"inner": "eager"})
    counted_loop(step, 9)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda seed: counted_loop(step, seed), range(3)))
    finally:
        sys.setswitchinterval(interval)
    for seed, outs in enumerate(found):
        for ours, theirs in zip(outs, counted_loop(module, seed)):
            close(ours, theirs)


class Aliased(nn.Module):
    """`alias` is the counter's memory: only the caller knows."""

    def forward(self, q: Tensor, k: Tensor, keys: Tensor, count: Tensor, alias: Tensor) -> Tensor:
        length = k.shape[2]
        at = torch.arange(length) + count
        alias.add_(length)
        seen = torch.arange(length) + count - length
        keys.index_copy_(2, at, k)
        return F.scaled_dot_product_attention(q, keys, keys, torch.arange(LENGTH) <= seen[:, None])


@torch.no_grad()
def test_inputs_that_share_memory() -> None:
    module = Aliased()
    step = torch.compile(module, backend="paged_inductor", options={"inner": "eager"})
    state = [(torch.zeros(1, 2, LENGTH, 8), torch.zeros((), dtype=torch.long)) for _ in range(2)]
    for length in (7, 1, 1, 1):
        q, k = torch.randn(2, 1, 2, length, 8).unbind()
        outs = [call(q, k, keys, n, n.view(1)) for call, (keys, n) in zip((step, module), state)]
        close(*outs)


@torch.no_grad()
def test_a_counter_that_the_graph_moves_on_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose reads wait; here the counter's reads are counted."""
    monkeypatch.setattr(positions, "_reads_wait", lambda device: True)
    reads: list[int] = []
    evaluator = positions._evaluator

    def counting(*args: Any) -> Any:
        evaluate = evaluator(*args)
        return lambda values: (reads.append(1), evaluate(values))[1]

    monkeypatch.setattr(positions, "_evaluator", counting)
    module, twin = Counted(), Counted()
    step = torch.compile(module, backend="paged_inductor", options={"inner": "eager"})
    state = [(*torch.zeros(2, 1, 2, LENGTH, 8).unbind(), torch.zeros(1).long()) for _ in range(2)]
    state = [tuple(x.clone() for x in one) for one in state]
    counts = []
    for i in range(12):
        if i == 8:  # the loop rewinds
            for _, _, count in state:
                count.sub_(2)
        q, k, v = torch.randn(3, 1, 2, 5 if i == 0 else 1, 8).unbind()
        close(*(call(q, k, v, *one) for call, one in zip((step, twin), state)))
        counts.append(len(reads))
    assert counts[7] - counts[2] == 0
    assert counts[8] - counts[7] == 1
    assert counts[11] - counts[8] == 0


@torch.no_grad()
def test_buffers_that_became_handles_die_with_their_last_holder() -> None:
    """What was compiled for their first call does not hold them."""
    torch.manual_seed(0)
    model = GPT_FAST.make()
    paged(model)
    for _ in range(2):
        model.start(2, LENGTH)
        for places in (torch.arange(7), torch.tensor([7])):
            model(torch.ones(2, len(places), dtype=torch.long), places)
        assert paged_inductor.stats().blocks_used > 0
    model.start(2, LENGTH)
    gc.collect()
    assert paged_inductor.stats().blocks_used == 0


@torch.no_grad()
def test_what_was_compiled_for_buffers_runs_on_the_handles_that_they_became() -> None:
    """Not all versions of Dynamo notice what they became."""
    calls: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        program = paged_inductor.backend.paged_inductor(gm, inputs, options={"inner": "eager"})

        def run(*args: Any) -> Any:
            calls.append((program, args))
            return program(*args)

        return run

    def step(q: Tensor, k: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, k)
        mask = torch.arange(keys.shape[2]) <= at[:, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    q, k = torch.randn(2, 1, 2, 3, 8)
    buffers, twins = ([torch.zeros(1, 2, 16, 8) for _ in range(2)] for _ in range(2))
    compiled = torch.compile(step, backend=backend)
    for first in (0, 3, 6):
        at = torch.arange(first, first + 3)
        expected = step(q, k, *twins, at)
        if not calls:
            close(compiled(q, k, *buffers, at), expected)
            continue
        assert all(isinstance(buffer, paged_inductor.PagedTensor) for buffer in buffers)
        program, args = calls[0]
        before = paged_inductor.stats().materializations
        (got,) = program(*(at if isinstance(arg, Tensor) and arg.dtype == torch.int64 else arg for arg in args))
        close(got, expected)
        assert paged_inductor.stats().materializations == before
    close(buffers[0].dense(), twins[0])
