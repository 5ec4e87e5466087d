"""flex_attention on a paged cache: its functions become masks and biases, and the pages are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import paged_inductor
from paged_inductor import PagedTensor

SLOPES = torch.linspace(0.1, 1.0, 4)
DISTANCES = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
STARTS = torch.tensor([2, 0])

ScoreMod = Callable[..., Tensor]


def none(offset: int) -> None:
    return None


def alibi(offset: int) -> ScoreMod:
    return lambda score, b, h, i, j: score + SLOPES[h] * (j - i - offset)


def looked_up_and_capped(offset: int) -> ScoreMod:
    return lambda score, b, h, i, j: 2 * torch.tanh(score / 2) + DISTANCES[h, (i + offset - j).abs()]


def windowed(offset: int) -> ScoreMod:
    return lambda score, b, h, i, j: torch.where(i + offset - j < 9, score, -float("inf"))


def squared(offset: int) -> ScoreMod:
    return lambda score, b, h, i, j: score * score


def step(score_mod: Any, block_size: int, reads_lse: bool, x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = x[:, ::2] * 0.5, x[:, 1::2] * 2
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    offset = k.shape[2] - x.shape[2]
    block_mask = None
    if block_size:

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i + offset) & (j >= STARTS[b])

        block_mask = create_block_mask(visible, 2, None, x.shape[2], k.shape[2], "cpu", BLOCK_SIZE=block_size)
    options: dict[str, Any] = {"score_mod": score_mod(offset), "block_mask": block_mask, "enable_gqa": True}
    if reads_lse:
        out, lse = flex_attention(x, k, v, **options, return_lse=True)
        return out * lse[..., None], (k, v)
    return flex_attention(x, k, v, scale=0.25, **options), (k, v)


def loop(run: Callable[..., Any], sizes: tuple[int, ...]) -> tuple[list[Tensor], Any]:
    generator = torch.Generator().manual_seed(0)
    outputs, past = [], None
    with torch.no_grad():
        for size in sizes:
            y, past = run(torch.randn(2, 4, size, 16, generator=generator), past)
            outputs.append(y)
    return outputs, past


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("score_mod", "block_size", "reads_lse", "reason"),
    [
        (none, 0, False, ""),
        (none, 8, False, ""),
        (alibi, 8, False, ""),
        (looked_up_and_capped, 128, False, ""),
        (windowed, 0, False, ""),
        (squared, 0, False, "combines the scores with themselves"),
        (none, 0, True, "its log-sum-exp or its maximum is read, too"),
    ],
)
def test_flex_attention(score_mod: Any, block_size: int, reads_lse: bool, reason: str) -> None:
    def run(x: Tensor, past: Any) -> tuple[Tensor, Any]:
        return step(score_mod, block_size, reads_lse, x, past)

    sizes = (18, 3, 2) if block_size else (18, 3)
    label = f"flex {score_mod.__name__} {block_size} {reads_lse}"
    options = {"inner": "eager", "label": label}
    got, past = loop(torch.compile(run, backend="paged_inductor", options=options), sizes)
    expected, _ = loop(run, sizes)
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    sites = [site for report in paged_inductor.reports.published(label) for site in report.sites if site.attention]
    assert len(sites) == len(sizes)
    for site in sites:
        assert site.attention.startswith("flex_attention")
        assert site.paged == (not reason)
        assert reason in site.reason if reason else site.reason == ""
    assert isinstance(past[0], PagedTensor)
