"""Rows that share their first blocks: kernels read these once for all rows, and the tokens stay the dense ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import paged_inductor
from paged_inductor import kernels
from paged_inductor._config import reset_config
from paged_inductor.ops import library
from paged_inductor.runtime import schedule
from paged_inductor.runtime.shared_prefix import NoSharing, PrefixSharing

from .zoo import Decoder, Form

PROMPT, STEPS = 40, 4


@pytest.fixture(autouse=True)
def _kernels_serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    paged_inductor.configure(triton_on_cpu=True)
    yield
    reset_config()


def samples(model: Any) -> torch.Tensor:
    """Three continuations of one prompt, which part at their first token."""
    with torch.no_grad():
        prompt = torch.randint(0, 61, (1, PROMPT), generator=torch.Generator().manual_seed(1))
        _, past = model(prompt, None)
        past = [tuple(tensor.repeat_interleave(3, 0) for tensor in pair) for pair in past]
        last, tokens = torch.tensor([[1], [2], [3]]), []
        for _ in range(STEPS):
            logits, past = model(last, past)
            last = logits[:, -1:].argmax(-1)
            tokens.append(last)
    return torch.cat(tokens, 1)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(PrefixSharing(pass_bytes=1), 32), (PrefixSharing(), 0), (NoSharing(), 0)],
    ids=["always", "by cost", "never"],
)
def test_shared_blocks_are_read_once(monkeypatch: pytest.MonkeyPatch, rule: Any, expected: int) -> None:
    torch.manual_seed(3)
    model = Decoder(Form(), layers=1)
    wanted = samples(model)
    monkeypatch.setattr(schedule, "sharing", rule)
    attention, shared = kernels.attention, []

    def recorded(*args: Any, **options: Any) -> torch.Tensor:
        shared.append(options["shared_prefix"])
        return attention(*args, **options)

    monkeypatch.setattr(library.kernels, "attention", recorded)
    tokens = samples(paged_inductor.page(model, inner="eager"))
    assert torch.equal(tokens, wanted)
    assert shared == [expected] * STEPS
