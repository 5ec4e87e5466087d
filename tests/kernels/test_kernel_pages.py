"""Writes, copies and gathers: bit-equal to their twins and to plain indexing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_cases import QUANTIZED, PagedBatch, build, examples, paged_batches, poisoned
from paged_inductor import kernels
from paged_inductor.kernels import checks, reference
from paged_inductor.kernels.launch import Launch


def bits(value: Tensor) -> Tensor:
    """NaN-safe comparison: bits of a tensor."""
    return value.contiguous().view(torch.uint8)


def quantized_by_rule(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Per vector [..., D]: the largest magnitude becomes the largest of the dtype."""
    top = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = vectors.float().abs().amax(-1).clamp_min(1e-30) / top
    exact = vectors.float() * (1 / scales)[..., None]
    return (exact.add(0.5).floor().clamp(-127, 127) if dtype == torch.int8 else exact.clamp(-448, 448)).to(
        dtype
    ), scales


def written_by_rule(
    arena: Tensor, scales: Tensor | None, new: Tensor, block_table: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The interface's sentence, one token at a time."""
    want, (block_size, num_new) = arena.clone(), (arena.shape[2], new.shape[2])
    want_scales = None if scales is None else scales.clone()
    for row, seq_len in enumerate(seq_lens.tolist()):
        for index in range(num_new):
            token = seq_len - num_new + index
            if token < 0:
                continue
            block, slot = int(block_table[row, token // block_size]), token % block_size
            values = new[row, :, index]
            if want_scales is not None:
                values, want_scales[block, :, slot] = quantized_by_rule(values, want.dtype)
            want[block, :, slot] = values
    return want, want_scales


@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "twin"])
@examples(25)
@given(batch=paged_batches(), num_new=st.integers(0, 45))
def test_cache_write_follows_the_rule(module: object, batch: PagedBatch, num_new: int) -> None:
    generator = batch.generator
    table, lens = batch.block_table, batch.seq_lens
    rows, heads = lens.shape[0], batch.k_arena.shape[1]
    k_new, v_new = (
        torch.randn(rows, num_new, heads, arena.shape[3], generator=generator).to(batch.dtype).transpose(1, 2)
        for arena in (batch.k_arena, batch.v_arena)
    )
    want_k = written_by_rule(batch.k_arena, batch.k_scales, k_new, table, lens)
    want_v = written_by_rule(batch.v_arena, batch.v_scales, v_new, table, lens)
    k, v = ((arena.clone(), scales if scales is None else scales.clone()) for arena, scales in stored_pairs(batch))
    module.cache_write_kv(k[0], v[0], k_new, v_new, table, lens, k_scales=k[1], v_scales=v[1])
    for got, want in ((k, want_k), (v, want_v)):
        assert torch.equal(bits(got[0]), bits(want[0]))
        assert got[1] is None or torch.equal(bits(got[1]), bits(want[1]))
    module.cache_write(batch.k_arena, k_new, table, lens, scales=batch.k_scales)
    assert torch.equal(bits(batch.k_arena), bits(want_k[0]))


def stored_pairs(batch: PagedBatch) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    return (batch.k_arena, batch.k_scales), (batch.v_arena, batch.v_scales)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_codes_of_all_magnitudes_are_those_of_torch(dtype: torch.dtype) -> None:
    """From the largest down to what becomes a signed zero, and ties between two codes."""
    batch = build([8], dim=256, stored=dtype)
    signs = torch.tensor([1.0, -1.0]).repeat(128)
    new = (signs * 448.0 * 2.0 ** -torch.linspace(0, 24, 256)).expand(1, 2, 8, 256).clone()
    new[:, :, 1:] = torch.arange(256) * signs / 2.0
    twin = batch.k_arena.clone()
    reference.cache_write(twin, new, batch.block_table, batch.seq_lens, scales=batch.k_scales.clone())
    kernels.cache_write(batch.k_arena, new, batch.block_table, batch.seq_lens, scales=batch.k_scales)
    assert torch.equal(bits(batch.k_arena), bits(twin))


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 1e-3, 1.0, 6e4])
def test_a_quantised_token_comes_back_within_its_rounding(magnitude: float, dtype: torch.dtype) -> None:
    batch = build([24], dim=64, stored=dtype)
    new = torch.randn(1, 2, 24, 64, generator=batch.generator) * magnitude
    kernels.cache_write(batch.k_arena, new, batch.block_table, batch.seq_lens, scales=batch.k_scales)
    got = kernels.gather(batch.k_arena, batch.block_table, batch.seq_lens, 24, scales=batch.k_scales)
    amax = new.abs().amax(-1, keepdim=True)
    step = amax / 254 if dtype == torch.int8 else torch.maximum(new.abs() / 16, amax / 448 * 2**-10)
    assert ((got - new).abs() <= step * 1.001 + 1e-32).all()


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
    group = [batch.k_arena, batch.v_arena, torch.randn(9, 3, 40, 64, generator=batch.generator)]
    group += [scales for scales in (batch.k_scales, batch.v_scales) if scales is not None]
    want, twins = [arena.clone() for arena in group], [arena.clone() for arena in group]
    for arena in want:
        arena[dst.long()] = arena[src.long()]
    reference.copy_blocks(twins, src, dst)
    kernels.copy_blocks(group, src, dst)
    for got, twin, expected in zip(group, twins, want, strict=True):
        assert torch.equal(bits(got), bits(expected))
        assert torch.equal(bits(twin), bits(expected))


def test_copies_of_a_group_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch))
    arenas = [build([9]).k_arena for _ in range(5)]
    kernels.copy_blocks(arenas, torch.tensor([1, 2]), torch.tensor([3, 4]))
    kernels.copy_blocks([], torch.tensor([1, 2]), torch.tensor([3, 4]))
    assert [launch.grid for launch in launches] == [(10, 1)]


@examples(25)
@given(batch=paged_batches(longest=70))
def test_gather_matches_dense(batch: PagedBatch) -> None:
    pages = (batch.block_table, batch.seq_lens, batch.kv_len)
    assert torch.equal(kernels.gather(batch.k_arena, *pages, scales=batch.k_scales, allocate=poisoned), batch.k)
    assert torch.equal(kernels.gather(batch.v_arena, *pages, scales=batch.v_scales, allocate=poisoned), batch.v)


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
