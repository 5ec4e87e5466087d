"""Generation loops on a device: tokens as without paging, with compiled models, and with steps that are replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_inductor
from paged_inductor import PagedTensor, stats

from ..models.zoo import Decoder, Form, generate

PLAIN = Form(heads_q=4, heads_kv=2, mask="none_or_is_causal")
SMALL = Form(heads_q=2, heads_kv=1, mask="none_or_is_causal")


def decoder(device: torch.device) -> tuple[Decoder, torch.Tensor, int]:
    """A model, a prompt and a number of steps: few where kernels are interpreted."""
    torch.manual_seed(1)
    if device.type == "cpu":
        return Decoder(SMALL, layers=1), torch.randint(0, 61, (2, 7)), 4
    return Decoder(PLAIN, layers=2).to(device), torch.randint(0, 61, (2, 30)).to(device), 60


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


def test_a_replayed_step_is_one_graph_launch_without_waiting(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("CPUs have no CUDA graphs")
    from torch._dynamo.utils import counters
    from torch.profiler import ProfilerActivity, profile

    counters.clear()
    model, prompt, _ = decoder(device)
    step = torch.compile(model, backend="paged_inductor", options={"mode": "reduce-overhead"})
    token = prompt[:, :1].clone()
    with torch.no_grad():
        logits, past = step(prompt, None)
        for _ in range(6):  # captured for one length, compiled for all, warmed up, recorded, replayed
            logits, past = step(token, past)
        recorded = stats().graph_recordings
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            torch.cuda.set_sync_debug_mode("error")  # raises where the host waits for the device
            try:
                for _ in range(5):
                    logits, past = step(token, past)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert stats().graph_recordings == recorded
    launches = sum(event.count for event in seen.key_averages() if "GraphLaunch" in event.key)
    assert launches == 5
    expected, past = model(prompt, None)
    for _ in range(11):
        expected, past = model(token, past)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


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
