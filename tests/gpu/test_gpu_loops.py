"""Generation loops on a device: tokens as without paging, with compiled models, and with steps that are replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import paged_inductor
from paged_inductor import PagedTensor, kernels, stats
from paged_inductor.ops import library
from paged_inductor.runtime import schedule
from paged_inductor.runtime.shared_prefix import PrefixSharing

from ..models.zoo import Decoder, Form, decode, generate

PLAIN = Form(heads_q=4, heads_kv=2, mask="none_or_is_causal")
SMALL = Form(heads_q=2, heads_kv=1, mask="none_or_is_causal")


def decoder(device: torch.device) -> tuple[Decoder, torch.Tensor, int]:
    """A model, a prompt and a number of steps: few where kernels are interpreted."""
    torch.manual_seed(1)
    if device.type == "cpu":
        return Decoder(SMALL, layers=1), torch.randint(0, 61, (2, 7)), 4
    return Decoder(PLAIN, layers=2).to(device), torch.randint(0, 61, (2, 30)).to(device), 60


@pytest.fixture
def counters(device: torch.device) -> None:
    """What Inductor counts, from 0 on."""
    from torch._dynamo.utils import counters

    if device.type == "cpu":
        pytest.skip("CPUs have no CUDA graphs")
    counters.clear()


@pytest.fixture
def always_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows have in common is read once, however little that saves."""
    monkeypatch.setattr(schedule, "sharing", PrefixSharing(pass_bytes=1))


class StaticDecoder(torch.nn.Module):
    """One layer, whose buffers and counter of tokens are its own, written in place."""

    def __init__(self, heads: int, device: torch.device) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(61, heads * 32), torch.nn.Linear(heads * 32, 61)
        self.heads = heads
        self.to(device)
        self.begin(device)

    def begin(self, device: torch.device) -> None:
        self.k, self.v = (torch.zeros(2, self.heads, 128, 32, device=device) for _ in range(2))
        self.seen = torch.zeros((), dtype=torch.int64, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).view(*tokens.shape, self.heads, 32).transpose(1, 2)
        at = torch.arange(tokens.shape[1], device=tokens.device) + self.seen
        self.seen.add_(tokens.shape[1])
        turned = x * (at[:, None] * 0.1 + 1.0).cos()
        self.k.index_copy_(2, at, turned)
        self.v.index_copy_(2, at, x)
        mask = torch.arange(128, device=tokens.device) <= at[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(turned, self.k, self.v, mask)
        return self.head((out + x).transpose(1, 2).flatten(2))


def static_steps(forward: Any, prompt: torch.Tensor, steps: int) -> torch.Tensor:
    """The tokens of greedy decoding [B, steps]."""
    tokens = [prompt]
    with torch.no_grad():
        for _ in range(steps):
            tokens.append(forward(tokens[-1])[:, -1:].argmax(-1))
    return torch.cat(tokens[1:], 1)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_same_tokens(inner: str, device: torch.device) -> None:
    if inner == "inductor" and device.type == "cpu":
        pytest.skip("Inductor calls compiled kernels, not interpreted ones")
    model, prompt, steps = decoder(device)
    expected, _ = generate(model, prompt, steps)
    step = torch.compile(model, backend="paged_inductor", options={"inner": inner})
    tokens, past = generate(step, prompt, steps)
    assert torch.equal(tokens, expected)
    assert isinstance(past[0][0], PagedTensor)
    assert stats().dense_fallbacks == 0


def test_forks_and_crops(device: torch.device) -> None:
    """Beams that share blocks, then a shorter cache: copies on write on the device."""
    model, prompt, _ = decoder(device)
    step = torch.compile(model, backend="paged_inductor", options={"inner": "eager"})
    rows = torch.tensor([1, 0, 1], device=device)

    def loop(forward: Any) -> torch.Tensor:
        logits, past = forward(prompt, None)
        past = tuple((k.index_select(0, rows), v.index_select(0, rows)) for k, v in past)
        token = torch.tensor([[3], [4], [5]], device=device)
        logits, past = forward(token, past)
        past = tuple((k[:, :, :-1], v[:, :, :-1]) for k, v in past)
        return torch.cat([logits, forward(token.flip(0), past)[0]], 1)

    with torch.no_grad():
        torch.testing.assert_close(loop(step), loop(model), rtol=1e-4, atol=1e-4)
    assert stats().copies_on_write > 0


def test_replayed_steps_give_the_same_tokens(device: torch.device) -> None:
    inner = "inductor" if device.type == "cuda" else "eager"
    model, prompt, steps = decoder(device)
    expected, _ = generate(model, prompt, steps)
    options = {"inner": inner, "mode": "reduce-overhead"}
    step = torch.compile(model, backend="paged_inductor", options=options)
    for _ in range(2):  # another cache, in the same recordings or new ones
        tokens, _ = generate(step, prompt, steps)
        assert torch.equal(tokens, expected)
    assert 1 <= stats().graph_recordings <= 2 * (1 + stats().arena_growths)


def test_replayed_steps_write_static_caches(device: torch.device) -> None:
    """Buffers and a counter that a recording must find where they were, and other ones in a second round."""
    on_cpu = device.type == "cpu"
    torch.manual_seed(1)
    model = StaticDecoder(1 if on_cpu else 4, device)
    prompt = torch.randint(0, 61, (2, 9), device=device)
    options = {"inner": "eager" if on_cpu else "inductor", "mode": "reduce-overhead"}
    step = torch.compile(model, backend="paged_inductor", options=options)
    for _ in range(2):
        model.begin(device)
        expected = static_steps(model, prompt, 3 if on_cpu else 60)
        model.begin(device)
        assert torch.equal(static_steps(step, prompt, expected.shape[1]), expected)
        assert isinstance(model.k, PagedTensor)
    assert 1 <= stats().graph_recordings <= 2 * (1 + stats().arena_growths)


def assert_replays(step: Callable[[], object]) -> None:
    """Five steps that were recorded: one graph launch each, and the host never waits for the device."""
    from torch._dynamo.utils import counters
    from torch.profiler import ProfilerActivity, profile

    recorded = stats().graph_recordings
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        torch.cuda.set_sync_debug_mode("error")  # raises where the host waits for the device
        try:
            for _ in range(5):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert stats().graph_recordings == recorded
    launches = sum(event.count for event in seen.key_averages() if "GraphLaunch" in event.key)
    assert launches == 5


def test_replayed_steps_read_a_shared_prefix_once(
    device: torch.device, always_shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three samples of one prompt, of which 5 blocks are full: a recording shares 4."""
    paged_inductor.configure(block_size=8)
    seen: set[int] = set()
    attention = kernels.attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        seen.add(options["shared_prefix"])
        return attention(*args, **options)

    monkeypatch.setattr(library.kernels, "attention", noted)
    model, _, steps = decoder(device)
    prompt = torch.randint(0, 61, (1, 44), device=device)

    def samples(forward: Any) -> torch.Tensor:
        with torch.no_grad():
            _, past = forward(prompt, None)
            past = [tuple(tensor.repeat_interleave(3, 0) for tensor in pair) for pair in past]
            tokens = [torch.tensor([[1], [2], [3]], device=device)]
            for _ in range(steps):
                logits, past = forward(tokens[-1], past)
                tokens.append(logits[:, -1:].argmax(-1))
        return torch.cat(tokens, 1)

    options = {"inner": "eager" if device.type == "cpu" else "inductor", "mode": "reduce-overhead"}
    step = torch.compile(model, backend="paged_inductor", options=options)
    assert torch.equal(samples(step), samples(model))
    assert 32 in seen and seen <= {0, 32, 40}  # the first step, of one length, may share all
    assert stats().graph_recordings <= 1 + stats().arena_growths


def test_a_replayed_step_is_one_graph_launch_without_waiting(device: torch.device, counters: None) -> None:
    model, prompt, _ = decoder(device)
    step = torch.compile(model, backend="paged_inductor", options={"mode": "reduce-overhead"})
    token = prompt[:, :1].clone()

    def advance() -> None:
        latest[0] = step(token, latest[0][1])

    with torch.no_grad():
        latest = [step(prompt, None)]
        for _ in range(6):  # captured for one length, compiled for all, warmed up, recorded, replayed
            advance()
        assert_replays(advance)
        expected, past = model(prompt, None)
        for _ in range(11):
            expected, past = model(token, past)
    torch.testing.assert_close(latest[0][0], expected, rtol=1e-4, atol=1e-4)


def test_a_replayed_static_step_is_one_graph_launch_without_waiting(device: torch.device, counters: None) -> None:
    model = StaticDecoder(4, device)
    step = torch.compile(model, backend="paged_inductor", options={"mode": "reduce-overhead"})
    static_steps(step, torch.randint(0, 61, (2, 17), device=device), 6)  # until 32 tokens no row begins another block
    token = torch.zeros(2, 1, dtype=torch.int64, device=device)
    with torch.no_grad():
        assert_replays(lambda: step(token))


def test_streams_that_use_one_anothers_blocks(device: torch.device) -> None:
    model, prompt, steps = decoder(device)
    prompts = [(prompt + turn) % 61 for turn in range(6)]
    step = torch.compile(model, backend="paged_inductor", options={"inner": "eager"})
    streams: list[AbstractContextManager[Any]] = [nullcontext() for _ in range(2)]
    if device.type == "cuda":
        streams = [torch.cuda.stream(torch.cuda.Stream()) for _ in range(2)]
        torch.cuda.synchronize()  # the prompts and weights are there
    with torch.no_grad():
        expected = [generate(model, prompt, steps)[0] for prompt in prompts]
        found = []
        for turn, prompt in enumerate(prompts):  # the blocks of each are the next one's, whose stream is another
            with streams[turn % 2]:
                if device.type == "cuda":
                    torch.cuda._sleep(50_000_000)  # the device lags behind: nothing is done before it is launched
                found.append(generate(step, prompt, steps)[0])
    if device.type == "cuda":
        torch.cuda.synchronize()
    for tokens, wanted in zip(found, expected):
        assert torch.equal(tokens, wanted)
    assert stats().blocks_used == 0


@pytest.mark.parametrize("budget", [None, 36_000])
def test_threads_with_a_stream_each(budget: int | None, device: torch.device) -> None:
    """Also where memory is short: one thread's caches leave, and come back, while others step."""
    if device.type == "cpu":
        pytest.skip("Triton's interpreter takes one thread, and CPUs have no streams")
    paged_inductor.configure(block_size=8)
    model, prompt, _ = decoder(device)
    step = torch.compile(model, backend="paged_inductor", options={"inner": "eager"})
    prompts = [(prompt + turn) % 61 for turn in range(6)]
    expected = [generate(model, prompt, 10)[0] for prompt in prompts]
    generate(step, prompt, 3)  # compiled
    torch.cuda.synchronize()
    paged_inductor.configure(kv_budget=budget and stats().bytes_used + budget, swap_host=2**30)
    found: dict[int, torch.Tensor] = {}
    all_began = threading.Barrier(len(prompts), timeout=300)

    def work(turn: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            logits, past = step(prompts[turn], None)
            all_began.wait()
            found[turn] = decode(step, prompts[turn], logits, past, 10)[0].cpu()

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for turn, tokens in enumerate(expected):
        assert torch.equal(found[turn], tokens.cpu())
    assert stats().swaps_out > 0 or not budget
    paged_inductor.check_integrity()


def test_budget_of_device_memory(device: torch.device) -> None:
    model, prompt, _ = decoder(device)
    step = torch.compile(model, backend="paged_inductor", options={"inner": "eager"})
    with torch.no_grad():
        _, past = step(prompt, None)
        paged_inductor.configure(kv_budget=stats().bytes_reserved)
        for _ in range(400):
            try:
                _, past = step(prompt, past)
            except paged_inductor.KVBudgetExceeded:
                break
        else:
            pytest.fail("the budget was not kept")
        paged_inductor.configure(kv_budget=None)
        step(prompt[:, :1], past)
