"""A row's attention depends on that row alone: on the CPU with one query, on GPUs in deterministic mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_inductor
from paged_inductor import kernels, ops
from paged_inductor.ops import library

from .pages import Pages, random_pages


def row(pages: Pages, i: int) -> Pages:
    """One row of a batch as a batch of its own."""
    length = pages.seq_lens[i : i + 1]
    return Pages(pages.k_arena, pages.v_arena, pages.block_table[i : i + 1], length, int(length), pages.block_size)


@pytest.mark.parametrize("lengths", [[300, 5000, 17], [2049, 100, 1, 4000]])
def test_one_query_on_the_cpu_is_the_same_alone_and_in_a_batch(lengths: list[int]) -> None:
    """Work is cut into chunks of a row's own tokens, which are combined in order of the row's own chunks."""
    pages = random_pages(lengths, 2, 16, 16)
    q = torch.randn(len(lengths), 2, 1, 16)
    together = ops.attention(q, pages.k_arena, pages.v_arena, pages.plan(), scale=0.25)
    for i in range(len(lengths)):
        alone = ops.attention(q[i : i + 1], pages.k_arena, pages.v_arena, row(pages, i).plan(), scale=0.25)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("wanted", [False, True])
def test_the_option_reaches_the_kernels(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def attention(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.update(options)
        return q.clone()

    monkeypatch.setattr(kernels, "attention", attention)
    monkeypatch.setattr(library, "uses_kernels", lambda device: True)
    paged_inductor.configure(deterministic=wanted)
    try:
        pages = random_pages([20], 2, 16, 16)
        ops.attention(torch.randn(1, 2, 1, 16), pages.k_arena, pages.v_arena, pages.plan(), scale=0.25)
    finally:
        paged_inductor.configure(deterministic=False)
    assert seen["deterministic"] is wanted
