"""Deterministic decode: a row alone and in any batch gives the same bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_cases import DTYPES, PagedBatch, assert_close, build, examples, poisoned, score_options, visibilities
from paged_inductor import kernels
from paged_inductor.kernels import ordered, reference


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of 16 keys, at most 8 of them: short rows are cut as long ones are."""
    monkeypatch.setattr(ordered, "SPLIT_TOKENS", 16)
    monkeypatch.setattr(ordered, "MAX_SPLITS", 8)


def alone(batch: PagedBatch, q: Tensor, row: int, **variant: object) -> Tensor:
    """The attention of one row in a batch of its own, whose logical length is the row's; variant: as in the batch."""
    length = int(batch.seq_lens[row])
    start = batch.kv_len - length
    table = batch.block_table[row : row + 1, : max(1, -(-length // batch.k_arena.shape[2]))]
    offset = variant.pop("causal_offset", None)
    pages = (batch.k_arena, batch.v_arena, table, batch.seq_lens[row : row + 1], length)
    own = {"causal_offset": None if offset is None else offset - start, **variant}
    return kernels.attention(q[row : row + 1], *pages, **own, deterministic=True, allocate=poisoned)


@examples(8)
@given(
    seq_lens=st.lists(st.integers(1, 100), min_size=2, max_size=3),
    group=st.integers(1, 3),
    q_len=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_row_is_the_same_alone_and_in_a_batch(
    seq_lens: list[int], group: int, q_len: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    batch = build(seq_lens, heads=1, dtype=dtype)
    q = batch.queries(group, q_len)
    variant = {"scale": 0.3, **data.draw(visibilities(batch.kv_len, q_len)), **data.draw(score_options(q.shape[1]))}
    together = kernels.attention(q, *batch.pages, **variant, deterministic=True, allocate=poisoned)
    assert_close(together, reference.attention(q, *batch.pages, **variant, compute_dtype=torch.float64))
    for row in range(len(seq_lens)):
        assert torch.equal(alone(batch, q, row, **variant)[0], together[row])


def test_without_it_a_row_depends_on_its_batch() -> None:
    """What the mode is for: the splits of the usual decode follow the batch's longest row."""
    batch = build([600, 4000], heads=1, block_size=32)
    q = batch.queries(1, 1)
    usual = {"scale": 0.3, "allocate": poisoned}
    together = kernels.attention(q, *batch.pages, **usual)[0]
    own = (batch.k_arena, batch.v_arena, batch.block_table[:1, :19], batch.seq_lens[:1], 600)
    assert not torch.equal(kernels.attention(q[:1], *own, **usual)[0], together)
    assert torch.equal(
        alone(batch, q, 0, scale=0.3)[0], kernels.attention(q, *batch.pages, **usual, deterministic=True)[0]
    )


def test_the_order_of_rows_and_rows_that_repeat_change_nothing() -> None:
    batch = build([100, 33, 7])
    q = batch.queries(2, 1)
    rows = torch.tensor([2, 0, 0, 1])
    pages = (batch.k_arena, batch.v_arena)
    options = {"scale": 0.3, "deterministic": True, "allocate": poisoned}
    out = kernels.attention(q, *pages, batch.block_table, batch.seq_lens, batch.kv_len, **options)
    again = kernels.attention(q[rows], *pages, batch.block_table[rows], batch.seq_lens[rows], batch.kv_len, **options)
    assert torch.equal(again, out[rows])


def test_the_number_of_splits_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = build([100, 33])
    q = batch.queries(2, 1)
    options = {"scale": 0.3, "deterministic": True, "allocate": poisoned}
    out = kernels.attention(q, *batch.pages, **options)
    for count in (16, 32):
        monkeypatch.setattr(ordered, "num_splits", lambda problem, count=count: count)
        assert torch.equal(kernels.attention(q, *batch.pages, **options), out)


def test_a_mask_is_obeyed() -> None:
    batch = build([40, 90])
    q = batch.queries(2, 2)
    mask = torch.rand(2, 1, 2, 90, generator=batch.generator) < 0.5
    out = kernels.attention(q, *batch.pages, scale=0.3, mask=mask, deterministic=True, allocate=poisoned)
    assert_close(out, reference.attention(q, *batch.pages, scale=0.3, mask=mask, compute_dtype=torch.float64))


@pytest.mark.parametrize(("kv_len", "want"), [(1, 1), (16, 1), (17, 2), (64, 4), (65, 8), (10_000, 8)])
def test_a_launch_has_a_split_for_every_share_of_the_longest_row(kv_len: int, want: int) -> None:
    batch = build([kv_len], heads=1)
    problem = kernels.problem.attention_problem(batch.queries(1, 1), *batch.pages, 1.0, None, None, None)
    assert ordered.num_splits(problem) == want
