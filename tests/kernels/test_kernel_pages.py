"""Writes, copies and gathers: bit-equal to their twins and to plain indexing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_cases import PagedBatch, build, examples, paged_batches, poisoned
from paged_inductor import kernels
from paged_inductor.kernels import checks, reference


def bits(value: Tensor) -> Tensor:
    """NaN-safe comparison: bits of a tensor."""
    return value.contiguous().view(torch.uint8)


def written_by_rule(arena: Tensor, new: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    """The interface's sentence, one token at a time."""
    want, (block_size, num_new) = arena.clone(), (arena.shape[2], new.shape[2])
    for row, seq_len in enumerate(seq_lens.tolist()):
        for index in range(num_new):
            token = seq_len - num_new + index
            if token < 0:
                continue
            block, slot = int(block_table[row, token // block_size]), token % block_size
            if slot == 0:
                want[block] = 0
            want[block, :, slot] = new[row, :, index]
    return want


@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "twin"])
@examples(25)
@given(batch=paged_batches(), num_new=st.integers(0, 45))
def test_cache_write_follows_the_rule(module: object, batch: PagedBatch, num_new: int) -> None:
    generator = batch.generator
    table, lens = batch.block_table, batch.seq_lens
    rows, heads = lens.shape[0], batch.k_arena.shape[1]
    k_new, v_new = (
        torch.randn(rows, num_new, heads, arena.shape[3], generator=generator).to(arena.dtype).transpose(1, 2)
        for arena in (batch.k_arena, batch.v_arena)
    )
    want_k = written_by_rule(batch.k_arena, k_new, table, lens)
    want_v = written_by_rule(batch.v_arena, v_new, table, lens)
    k_arena, v_arena = batch.k_arena.clone(), batch.v_arena.clone()
    module.cache_write_kv(k_arena, v_arena, k_new, v_new, table, lens)
    assert torch.equal(bits(k_arena), bits(want_k))
    assert torch.equal(bits(v_arena), bits(want_v))
    module.cache_write(batch.k_arena, k_new, table, lens)
    assert torch.equal(bits(batch.k_arena), bits(want_k))


@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "twin"])
def test_the_zero_page_is_never_written(module: object) -> None:
    batch = build([9, 17])
    batch.block_table[1] = 0
    module.cache_write(batch.k_arena, torch.ones(2, 2, 9, 16), batch.block_table, batch.seq_lens)
    assert not batch.k_arena[0].any()


@examples(15)
@given(batch=paged_batches(), ids=st.permutations(range(1, 5)), dtype=st.sampled_from(checks.ID_DTYPES))
def test_copy_blocks_matches_indexing(batch: PagedBatch, ids: list[int], dtype: torch.dtype) -> None:
    src, dst = torch.tensor(ids[:2], dtype=dtype), torch.tensor(ids[2:], dtype=dtype)
    want, twin = batch.k_arena.clone(), batch.k_arena.clone()
    want[dst.long()] = want[src.long()]
    reference.copy_blocks(twin, src, dst)
    kernels.copy_blocks(batch.k_arena, src, dst)
    assert torch.equal(bits(batch.k_arena), bits(want))
    assert torch.equal(bits(twin), bits(want))


@examples(25)
@given(batch=paged_batches(longest=70))
def test_gather_matches_dense(batch: PagedBatch) -> None:
    pages = (batch.block_table, batch.seq_lens, batch.kv_len)
    assert torch.equal(kernels.gather(batch.k_arena, *pages, allocate=poisoned), batch.k)
    assert torch.equal(kernels.gather(batch.v_arena, *pages, allocate=poisoned), batch.v)


def test_offsets_past_int32() -> None:
    """A pool of more than 2**31 elements; only the pages touched are ever backed by memory."""
    last = 2**24 + 1
    arena = torch.empty(last + 1, 1, 8, 16, dtype=torch.float16)
    table, lens = torch.tensor([[last]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    new = torch.randn(1, 1, 5, 16).half()
    kernels.cache_write(arena, new, table, lens)
    assert torch.equal(arena[last, :, :5], new[0])
    assert torch.equal(kernels.gather(arena, table, lens, 5), new)
    kernels.copy_blocks(arena, torch.tensor([last]), torch.tensor([last - 1]))
    assert torch.equal(arena[last - 1], arena[last])
    out = kernels.attention(new[:, :, :1], arena, arena, table, lens, 5, scale=0.25, allocate=poisoned)
    torch.testing.assert_close(out, (new[:, :, :1] @ new.mT * 0.25).softmax(-1) @ new, atol=2e-3, rtol=2e-3)
