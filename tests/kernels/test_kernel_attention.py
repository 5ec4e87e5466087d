"""Attention kernels against the float64 twin, on ragged batches in poisoned pages."""

from dataclasses import replace

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
    paged_batches,
    poisoned,
    variants,
)
from paged_inductor import kernels
from paged_inductor.kernels import decode, reference, shared
from paged_inductor.kernels.launch import LaunchConfig
from paged_inductor.kernels.problem import attention_problem


def truth(q: Tensor, batch: PagedBatch, **variant: object) -> Tensor:
    variant = {"kv_len": batch.kv_len, **batch.scales, **variant}
    return reference.attention(q, *batch.tensors, **variant, compute_dtype=torch.float64)


def attend(q: Tensor, batch: PagedBatch, **variant: object) -> Tensor:
    variant = {"kv_len": batch.kv_len, **batch.scales, **variant}
    return kernels.attention(q, *batch.tensors, **variant, allocate=poisoned)


@examples(40)
@given(batch=paged_batches(), group=st.integers(1, 5), q_len=st.integers(1, 7), data=st.data())
def test_decode_matches_the_twin(batch: PagedBatch, group: int, q_len: int, data: st.DataObject) -> None:
    q = batch.queries(group, q_len)
    variant = data.draw(variants(q, batch))
    assert_close(attend(q, batch, **variant), truth(q, batch, **variant))


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
    variant = data.draw(variants(q, batch))
    problem = attention_problem(q, *batch.tensors, **variant)
    out = poisoned(problem.out_shape, dtype=q.dtype, device=q.device)
    for launch in decode.plan(problem, out, LaunchConfig(16, 16, 4, 1), num_splits, poisoned):
        launch.run()
    assert_close(out, truth(q, batch, **variant))


@examples(25)
@given(
    batch=paged_batches(longest=40),
    prefix_blocks=st.integers(0, 3),
    group=st.integers(1, 5),
    q_len=st.integers(1, 9),
    splits=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    data=st.data(),
)
def test_decode_of_a_shared_prefix_matches_the_twin(
    batch: PagedBatch,
    prefix_blocks: int,
    group: int,
    q_len: int,
    splits: tuple[int, int],
    data: st.DataObject,
) -> None:
    batch, prefix_len = share_prefix(batch, prefix_blocks)
    q = batch.queries(group, q_len)
    variant = data.draw(variants(q, batch))
    want = truth(q, batch, **variant)
    problem = attention_problem(q, *batch.tensors, **variant, shared_prefix=prefix_len)
    out = poisoned(problem.out_shape, dtype=q.dtype, device=q.device)
    config = LaunchConfig(16, 16, 4, 1)
    if prefix_len:
        for launch in shared.plan(problem, out, (config, splits[0]), (config, splits[1]), poisoned):
            launch.run()
        assert_close(out, want)
    assert_close(attend(q, batch, **variant, shared_prefix=prefix_len), want)


def test_a_buffer_read_in_part_is_not_read_beyond_by_a_shared_prefix() -> None:
    batch, prefix_len = share_prefix(build([8, 8]), 1)
    q = batch.queries(1, 1)
    variant = {"scale": 0.3, "kv_len": 5, "row_start": 0}
    assert prefix_len == 8
    assert_close(attend(q, batch, **variant, shared_prefix=prefix_len), truth(q, batch, **variant))


@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize("v_dim", [32, 64])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_values_in_pairs(stored: torch.dtype, v_dim: int, q_len: int) -> None:
    batch = build([13, 37, 5], dim=32, v_dim=v_dim, stored=stored)
    q = batch.queries(2, q_len)
    problem = attention_problem(q, *batch.pages, 0.3, **batch.scales)
    assert problem.v_in_pairs
    narrow = replace(batch, v_arena=batch.v_arena[..., ::2][..., : v_dim // 4])
    assert not attention_problem(q, *narrow.pages, 0.3, **narrow.scales).v_in_pairs
    assert_close(attend(q, batch, scale=0.3), truth(q, batch, scale=0.3))


def share_prefix(batch: PagedBatch, blocks: int) -> tuple[PagedBatch, int]:
    """The batch with the first `blocks` of each row, as far as all have them full, replaced by those of the shortest,
    of which a window hides the least."""
    block_size = batch.k_arena.shape[2]
    source = int(batch.seq_lens.argmin())
    blocks = min(blocks, int(batch.seq_lens[source]) // block_size)
    table = batch.block_table.clone()
    table[:, :blocks] = batch.block_table[source, :blocks]
    for arena in (batch.k_arena, batch.v_arena):
        for block in set(range(1, arena.shape[0])) - set(table.flatten().tolist()):
            arena[block] = float("nan") if arena.is_floating_point() else 127
    return replace(batch, block_table=table), blocks * block_size


@examples(15)
@given(batch=paged_batches(), group=st.integers(1, 3), q_len=st.integers(17, 26), data=st.data())
def test_prefill_matches_the_twin(batch: PagedBatch, group: int, q_len: int, data: st.DataObject) -> None:
    q = batch.queries(group, q_len)
    variant = data.draw(variants(q, batch))
    assert_close(attend(q, batch, **variant), truth(q, batch, **variant))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_every_head_dim(dim: int, dtype: torch.dtype) -> None:
    batch = build([19, 5], heads=1, dim=dim, v_dim=dim, dtype=dtype)
    q = batch.queries(group=2, q_len=2)
    variant = {"scale": dim**-0.5, "causal_offset": batch.kv_len - 2}
    assert_close(attend(q, batch, **variant), truth(q, batch, **variant))


@examples(12)
@given(dim=st.integers(32, 256), v_dim=st.integers(32, 256), dtype=st.sampled_from(DTYPES))
def test_any_head_dim(dim: int, v_dim: int, dtype: torch.dtype) -> None:
    batch = build([19, 5], heads=1, dim=dim, v_dim=v_dim, dtype=dtype)
    q = batch.queries(group=2, q_len=2)
    variant = {"scale": dim**-0.5, "causal_offset": batch.kv_len - 2}
    assert_close(attend(q, batch, **variant), truth(q, batch, **variant))


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("q_len", [1, 17])
def test_values_that_are_the_first_dims_of_the_keys(q_len: int, stored: torch.dtype | None) -> None:
    """Multi-head latent attention: one arena of 576 dims, of which the first 512 are the values."""
    pages = build([37, 12], heads=1, dim=576, dtype=torch.bfloat16, stored=stored)
    batch = replace(pages, v_arena=pages.k_arena[..., :512], v_scales=pages.k_scales)
    q = batch.queries(group=16, q_len=q_len)
    variant = {"scale": 576**-0.5, "causal_offset": batch.kv_len - q_len}
    problem = attention_problem(q, *batch.pages, **variant, **batch.scales)
    assert problem.v_is_k and problem.head_tiles == (512, 64)
    assert_close(attend(q, batch, **variant), truth(q, batch, **variant))


@pytest.mark.parametrize(
    ("q_len", "limit", "first_key"),
    [(1, {"window": 9}, 55), (18, {"window": 9}, 38), (1, {"chunk": 24}, 48), (18, {"chunk": 24}, 24)],
    ids=str,
)
def test_blocks_outside_the_window_or_chunk_are_not_read(q_len: int, limit: dict[str, int], first_key: int) -> None:
    batch = build([64], block_size=8)
    q = batch.queries(group=2, q_len=q_len)
    variant = {"scale": 0.3, "causal_offset": batch.kv_len - q_len, **limit}
    want = truth(q, batch, **variant)
    for arena in (batch.k_arena, batch.v_arena):
        arena[batch.block_table[0, : first_key // 8].long()] = float("nan")
    assert_close(attend(q, batch, **variant), want)


def test_keys_after_the_diagonal_are_not_read() -> None:
    batch = build([40], block_size=8)
    q = batch.queries(group=1, q_len=18)
    want = truth(q, batch, scale=0.3, causal_offset=-2)
    for arena in (batch.k_arena, batch.v_arena):
        arena[batch.block_table[0, 2:].long()] = float("nan")
    assert_close(attend(q, batch, scale=0.3, causal_offset=-2), want)


@pytest.mark.parametrize("q_len", [2, 17])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-50.0, 0.0, 50.0, float("-inf")])], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_fully_masked_query_gives_zeros(q_len: int, sinks: Tensor | None, dtype: torch.dtype) -> None:
    batch = build([20, 3])
    q = batch.queries(group=2, q_len=q_len)
    seen = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    mask = seen if dtype == torch.bool else torch.full((1, 1, 1, 1), float("-inf"))
    out = attend(q, batch, scale=0.3, mask=mask, sinks=sinks)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_row_of_finfo_min_averages_like_dense_softmax() -> None:
    batch = build([20, 3])
    q = batch.queries(group=2, q_len=1)
    mask = torch.full((1, 1, 1, 1), torch.finfo(torch.float32).min)
    out = attend(q, batch, scale=0.3, mask=mask)
    assert_close(out, batch.v.mean(2, keepdim=True).repeat_interleave(2, 1))


def test_no_query_and_no_row_give_empty_outputs() -> None:
    batch = build([9])
    assert kernels.attention(batch.queries(2, 0), *batch.pages, scale=1.0).shape == (1, 4, 0, 16)
    empty = (batch.k_arena, batch.v_arena, batch.block_table[:0], batch.seq_lens[:0], 9)
    assert kernels.attention(batch.queries(2, 1)[:0], *empty, scale=1.0).shape == (0, 4, 1, 16)
