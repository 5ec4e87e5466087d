"""Attention kernels against the float64 twin, on ragged batches in poisoned pages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_cases import (
    DTYPES,
    PagedBatch,
    assert_close,
    build,
    examples,
    masks,
    paged_batches,
    poisoned,
    score_options,
    visibilities,
)
from paged_inductor import kernels
from paged_inductor.kernels import decode, reference
from paged_inductor.kernels.launch import LaunchConfig
from paged_inductor.kernels.problem import attention_problem


def truth(q: Tensor, batch: PagedBatch, **variant: object) -> Tensor:
    return reference.attention(q, *batch.pages, **variant, compute_dtype=torch.float64)


def draw_variant(data: st.DataObject, q: Tensor, batch: PagedBatch) -> dict[str, object]:
    causal_offset, window = data.draw(visibilities(batch.kv_len, q.shape[2]))
    mask = data.draw(masks((*q.shape[:3], batch.kv_len)))
    limits = {"scale": 0.3, "causal_offset": causal_offset, "window": window, "mask": mask}
    return limits | data.draw(score_options(q.shape[1]))


@examples(40)
@given(batch=paged_batches(), group=st.integers(1, 5), q_len=st.integers(1, 7), data=st.data())
def test_decode_matches_the_twin(batch: PagedBatch, group: int, q_len: int, data: st.DataObject) -> None:
    q = batch.queries(group, q_len)
    variant = draw_variant(data, q, batch)
    assert_close(kernels.attention(q, *batch.pages, **variant, allocate=poisoned), truth(q, batch, **variant))


@examples(25)
@given(
    batch=paged_batches(longest=70),
    group=st.integers(1, 3),
    q_len=st.integers(1, 16),
    num_splits=st.sampled_from([2, 4]),
    data=st.data(),
)
def test_split_decode_matches_the_twin(
    batch: PagedBatch, group: int, q_len: int, num_splits: int, data: st.DataObject
) -> None:
    q = batch.queries(group, q_len)
    variant = draw_variant(data, q, batch)
    problem = attention_problem(q, *batch.pages, **variant)
    out = poisoned(problem.out_shape, dtype=q.dtype, device=q.device)
    for launch in decode.plan(problem, out, LaunchConfig(16, 16, 4, 1), num_splits, poisoned):
        launch.run()
    assert_close(out, truth(q, batch, **variant))


@examples(15)
@given(batch=paged_batches(), group=st.integers(1, 3), q_len=st.integers(17, 26), data=st.data())
def test_prefill_matches_the_twin(batch: PagedBatch, group: int, q_len: int, data: st.DataObject) -> None:
    q = batch.queries(group, q_len)
    variant = draw_variant(data, q, batch)
    assert_close(kernels.attention(q, *batch.pages, **variant, allocate=poisoned), truth(q, batch, **variant))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 96, 112, 128, 192, 256])
def test_every_head_dim(dim: int, dtype: torch.dtype) -> None:
    batch = build([19, 5], heads=1, dim=dim, v_dim=dim, dtype=dtype)
    q = batch.queries(group=2, q_len=2)
    variant = {"scale": dim**-0.5, "causal_offset": batch.kv_len - 2}
    assert_close(kernels.attention(q, *batch.pages, **variant, allocate=poisoned), truth(q, batch, **variant))


@pytest.mark.parametrize("q_len", [1, 18])
def test_blocks_outside_the_window_are_not_read(q_len: int) -> None:
    batch = build([64], block_size=8)
    q = batch.queries(group=2, q_len=q_len)
    variant = {"scale": 0.3, "causal_offset": batch.kv_len - q_len, "window": 9}
    want = truth(q, batch, **variant)
    first_key = batch.kv_len - q_len + 1 - 9
    for arena in (batch.k_arena, batch.v_arena):
        arena[batch.block_table[0, : first_key // 8].long()] = float("nan")
    assert_close(kernels.attention(q, *batch.pages, **variant, allocate=poisoned), want)


def test_keys_after_the_diagonal_are_not_read() -> None:
    batch = build([40], block_size=8)
    q = batch.queries(group=1, q_len=18)
    want = truth(q, batch, scale=0.3, causal_offset=-2)
    for arena in (batch.k_arena, batch.v_arena):
        arena[batch.block_table[0, 2:].long()] = float("nan")
    assert_close(kernels.attention(q, *batch.pages, scale=0.3, causal_offset=-2, allocate=poisoned), want)


@pytest.mark.parametrize("q_len", [2, 17])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-50.0, 0.0, 50.0, float("-inf")])], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_fully_masked_query_gives_zeros(q_len: int, sinks: Tensor | None, dtype: torch.dtype) -> None:
    batch = build([20, 3])
    q = batch.queries(group=2, q_len=q_len)
    seen = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    mask = seen if dtype == torch.bool else torch.full((1, 1, 1, 1), float("-inf"))
    out = kernels.attention(q, *batch.pages, scale=0.3, mask=mask, sinks=sinks, allocate=poisoned)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_row_of_finfo_min_averages_like_dense_softmax() -> None:
    batch = build([20, 3])
    q = batch.queries(group=2, q_len=1)
    mask = torch.full((1, 1, 1, 1), torch.finfo(torch.float32).min)
    out = kernels.attention(q, *batch.pages, scale=0.3, mask=mask, allocate=poisoned)
    assert_close(out, batch.v.mean(2, keepdim=True).repeat_interleave(2, 1))


def test_no_query_and_no_row_give_empty_outputs() -> None:
    batch = build([9])
    assert kernels.attention(batch.queries(2, 0), *batch.pages, scale=1.0).shape == (1, 4, 0, 16)
    empty = (batch.k_arena, batch.v_arena, batch.block_table[:0], batch.seq_lens[:0], 9)
    assert kernels.attention(batch.queries(2, 1)[:0], *empty, scale=1.0).shape == (0, 4, 1, 16)
