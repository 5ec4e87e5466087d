"""Packed pages (8-bit codes with their scales) mean the same as pages of the numbers that the codes stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_inductor import ops
from paged_inductor._layout import KV_DTYPES, arena_layout, head_dim, is_packed, unpack
from paged_inductor.kernels import reference

from .pages import Pages, random_pages
from .test_ops import MASKS, extras, masks

pytestmark = pytest.mark.usefixtures("eager_formula")


def packed(arena: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The packed arena of a plain one, and the plain one of the rounded numbers."""
    blocks, heads, block_size, dim = arena.shape
    transposed = arena.stride(2) < arena.stride(3)
    layout = arena_layout(heads, block_size, dim, dtype, transposed, packed=True)
    result = torch.empty_strided((blocks, *layout.sizes), layout.strides, dtype=dtype)
    codes, scales = unpack(result)
    values, factors = reference.quantize(arena, dtype)
    codes.copy_(values)
    scales.copy_(factors)
    plain = torch.empty_like(arena).copy_(values.to(arena.dtype) * factors[..., None])  # keeps the strides
    return result, plain


def both(pages: Pages, dtype: torch.dtype) -> tuple[Pages, Pages]:
    """Packed pages, and pages of the same numbers."""
    (k, plain_k), (v, plain_v) = (packed(arena, dtype) for arena in (pages.k_arena, pages.v_arena))
    return replace(pages, k_arena=k, v_arena=v), replace(pages, k_arena=plain_k, v_arena=plain_v)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_the_layout(dtype: torch.dtype, transposed: bool) -> None:
    layout = arena_layout(2, 16, 24, dtype, transposed, packed=True)
    arena = torch.empty_strided((3, *layout.sizes), layout.strides, dtype=dtype)
    arena.fill_(0)
    assert layout.packed and is_packed(arena) and head_dim(arena) == 24
    assert arena.nbytes == 3 * 2 * 16 * (24 + 4)
    codes, scales = unpack(arena)
    assert codes.shape == (3, 2, 16, 24) and scales.shape == (3, 2, 16)
    codes.fill_(1)
    scales.fill_(2.5)
    assert (codes.float() == 1).all() and (scales == 2.5).all()  # they do not overlap
    memory = arena.view(torch.uint8)
    first = codes.new_ones(()).view(torch.uint8)
    assert int((memory == first).sum()) == codes.numel()
    whole = unpack(arena[1:2])
    assert whole[0].data_ptr() == codes[1:].data_ptr() and whole[1].data_ptr() == scales[1:].data_ptr()


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    group=st.sampled_from([1, 3]),
    queries=st.sampled_from([1, 1, 4]),
    mask=st.sampled_from(MASKS),
    extra=st.sampled_from(["neither", "softcap and sinks"]),
    dtype=st.sampled_from(list(KV_DTYPES.values())),
    transposed=st.booleans(),
    bounds=st.none() | st.tuples(st.integers(1, 330), st.none() | st.integers(1, 330)),
)
def test_attention_over_packed_pages(
    lengths: list[int],
    group: int,
    queries: int,
    mask: str,
    extra: str,
    dtype: torch.dtype,
    transposed: bool,
    bounds: tuple[int, int | None] | None,
) -> None:
    pages, plain = both(random_pages(lengths, 2, 16, 16, transposed=transposed), dtype)
    q = torch.randn(len(lengths), 2 * group, queries, 16, generator=torch.Generator().manual_seed(3))
    given_mask = masks(mask, len(lengths), 2 * group, queries, pages.kv_len)
    offset, window = bounds or (None, None)
    results = []
    for given_pages in (pages, plain):
        plan = given_pages.plan()
        if queries == 1 and offset is not None:
            plan = ops.plan_window(plan, offset, window)
        arenas = (given_pages.k_arena, given_pages.v_arena)
        shown = None if given_mask is None else ops.plan_mask(given_mask, plan)
        options = {"scale": 0.3, "causal_offset": offset, "window": window, **extras(extra, 2 * group, q.dtype)}
        results.append(ops.attention(q, *arenas, plan, shown, **options))
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_static_buffers_of_packed_pages(dtype: torch.dtype, queries: int) -> None:
    results = []
    for pages in both(random_pages([40, 40], 2, 16, 16), dtype):
        plan = ops.plan_static(pages.plan(), 50)
        q = torch.randn(2, 4, queries, 16, generator=torch.Generator().manual_seed(3))
        mask = torch.arange(50).expand(queries, 50) < 43  # three positions that were not written
        arenas = (pages.k_arena, pages.v_arena)
        results.append(ops.attention(q, *arenas, plan, ops.plan_mask(mask, plan), scale=0.3))
        results.append(ops.gather(pages.v_arena, plan, torch.float32))
    torch.testing.assert_close(results[:2], results[2:], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_write_copy_and_gather(dtype: torch.dtype, transposed: bool) -> None:
    lengths, count = [30, 9], 5
    pages, plain = both(random_pages(lengths, 2, 16, 16, transposed=transposed), dtype)
    new = torch.randn(2, 2, count, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float32).bfloat16()
    plan = pages.plan(count)
    before = ops.gather(plain.k_arena, plan)
    ops.cache_write(pages.k_arena, new, plan)
    got = ops.gather(pages.k_arena, plan, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    codes, scales = reference.quantize(new, dtype)
    assert torch.equal(got[:, :, -count:], (codes.float() * scales[..., None]).bfloat16())
    assert torch.equal(got[:, :, :-count], before[:, :, :-count].bfloat16())
    free = sorted(set(range(1, pages.k_arena.shape[0])) - set(pages.block_table.flatten().tolist()))[0]
    used = int(pages.block_table[0, 0])
    ops.execute_copies([pages.k_arena, pages.v_arena], [(used, free)])
    for arena in (pages.k_arena, pages.v_arena):
        assert torch.equal(arena[used].view(torch.uint8), arena[free].view(torch.uint8))


def test_the_operators_pass_opcheck() -> None:  # which cannot compare numbers of float8
    pages, _ = both(random_pages([30, 9], 2, 16, 16), torch.int8)
    tables = (pages.block_table, pages.seq_lens)
    q, new = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 1, 16)
    operators = torch.ops.paged_inductor
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.gather, (pages.k_arena, *tables, 30, torch.bfloat16), test_utils=tests)
    torch.library.opcheck(operators.attention, (q, pages.k_arena, pages.v_arena, *tables, 30, 0.3), test_utils=tests)
    torch.library.opcheck(operators.cache_write, (pages.k_arena, new, *tables), test_utils=tests)
