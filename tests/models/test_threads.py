"""Two models, several caches and several threads on one pool: every loop gets its own tokens."""

from __future__ import annotations

import threading

import pytest
import torch

import paged_inductor
from paged_inductor.runtime import manager

from .zoo import Decoder, Form, generate


@pytest.fixture
def formula() -> None:
    """Compiled code, which threads compile at the same time."""


def test_threads_and_models_share_one_pool() -> None:
    torch.manual_seed(11)
    models = [Decoder(Form()), Decoder(Form(layout="BSHD", gqa="expand"))]
    prompts = [torch.randint(0, 61, (batch, length)) for batch, length in ((1, 5), (2, 40), (3, 17), (2, 33))]
    expected = {(m, p): generate(models[m], prompts[p], 25)[0] for m in range(2) for p in range(len(prompts))}
    for model in models:
        paged_inductor.page(model, inner="eager")
        generate(model, prompts[0], 3)
    got: dict[tuple[int, int], list[torch.Tensor]] = {key: [] for key in expected}
    failures: list[BaseException] = []

    def work(m: int, p: int) -> None:
        try:
            for _ in range(2):
                got[m, p].append(generate(models[m], prompts[p], 25)[0])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=key) for key in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for key, tokens in expected.items():
        assert all(torch.equal(result, tokens) for result in got[key]), key
    got.clear()
    paged_inductor.check_integrity()
    assert paged_inductor.stats().dense_fallbacks == 0


@pytest.mark.parametrize("seed", range(3))
def test_growth_waits_for_running_steps(seed: int) -> None:
    """Arenas are replaced while other threads step: no token may be written into the old arena and lost."""
    torch.manual_seed(seed)
    model = Decoder(Form())
    prompt = torch.randint(0, 61, (2, 9))
    expected = generate(model, prompt, 60)[0]
    paged_inductor.page(model, inner="eager")
    generate(model, prompt, 3)
    paged_inductor.trim()
    growths = manager().counters.arena_growths
    results: list[torch.Tensor] = []
    kept: list[object] = []

    def work() -> None:
        tokens, past = generate(model, prompt, 60)
        results.append(tokens)
        kept.append(past)  # keeping the caches makes the arenas grow again and again

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert all(torch.equal(tokens, expected) for tokens in results)
    assert manager().counters.arena_growths > growths
