"""The twins: same signatures as the wrappers, and equal to dense attention written out independently."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_cases import PagedBatch, assert_close, examples, paged_batches, variants
from paged_inductor import kernels
from paged_inductor.kernels import reference

WRAPPERS = ["attention", "cache_write", "cache_write_kv", "copy_blocks", "gather"]


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_twin_has_its_wrappers_signature(name: str) -> None:
    wrapper = inspect.signature(getattr(kernels, name)).parameters
    twin = inspect.signature(getattr(reference, name)).parameters
    own = {"allocate", "compute_dtype", "deterministic"}
    shared = [[p for p in signature.values() if p.name not in own] for signature in (wrapper, twin)]
    assert shared[0] == shared[1]


def _placed(dense: Tensor, lens: list[int], starts: list[int], kv_len: int) -> Tensor:
    """The rows of a left padded tensor with their tokens from `starts` on, in `kv_len` positions of zeros."""
    placed = dense.new_zeros(*dense.shape[:2], kv_len, dense.shape[3])
    for row, (length, start) in enumerate(zip(lens, starts)):
        shift = dense.shape[2] - length - start
        first, stop = max(0, start, -shift), min(kv_len, start + length)
        if first < stop:
            placed[row, :, first:stop] = dense[row, :, first + shift : stop + shift]
    return placed


def dense_attention(
    q: Tensor,
    batch: PagedBatch,
    kv_len: int,
    causal_offset: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    row_start: int | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """The interface's sentence, one query at a time, in float64."""
    out = torch.zeros(*q.shape[:3], batch.v.shape[3], dtype=torch.float64)
    group = q.shape[1] // batch.k.shape[1]
    full_mask = None if mask is None else mask.expand(*q.shape[:3], kv_len)
    keys = torch.arange(kv_len)
    lens = batch.seq_lens.tolist()
    starts = [kv_len - length if row_start is None else row_start for length in lens]
    dense_k, dense_v = (_placed(x, lens, starts, kv_len).double() for x in (batch.k, batch.v))
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).view(-1, 3).tolist():
        k, v = dense_k[b, h // group], dense_v[b, h // group]
        start = starts[b]
        scores = k @ q[b, h, i].double() * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = i + (kv_len - q.shape[2] if causal_offset is None else causal_offset)
        if slopes is not None:
            scores += slopes[h].double() * (keys - position)
        visible = (keys >= start) & (keys < start + lens[b]) if mask is None else keys >= 0
        if hidden is not None and hidden[b] > 0:
            visible &= keys >= start + hidden[b]
        if causal_offset is not None:
            visible &= keys <= position
        if window is not None:
            visible &= keys > position - window
        if chunk is not None:
            own = [max(0, position - start) // chunk == (key - start) // chunk for key in keys.tolist()]
            visible &= torch.tensor(own)
        if full_mask is not None and full_mask.dtype == torch.bool:
            visible &= full_mask[b, h, i]
        elif full_mask is not None:
            scores += full_mask[b, h, i]
        scores[~visible] = float("-inf")
        if scores.max() > float("-inf"):
            sink = scores[:0] if sinks is None else sinks[h : h + 1].double()
            out[b, h, i] = torch.cat([scores, sink]).softmax(0)[:kv_len] @ v
    return out.to(q.dtype)


@examples(60)
@given(batch=paged_batches(longest=24), group=st.integers(1, 2), q_len=st.integers(1, 4), data=st.data())
def test_the_attention_twin_matches_dense(batch: PagedBatch, group: int, q_len: int, data: st.DataObject) -> None:
    q = batch.queries(group, q_len)
    variant = data.draw(variants(q, batch))
    own = ("scale", "k_scales", "v_scales")
    want = dense_attention(q, batch, **{name: value for name, value in variant.items() if name not in own})
    for compute_dtype in (torch.float32, torch.float64):
        got = reference.attention(q, *batch.tensors, **variant, compute_dtype=compute_dtype)
        assert_close(got, want)


@examples(20)
@given(batch=paged_batches())
def test_the_gather_twin_matches_dense(batch: PagedBatch) -> None:
    pages = (batch.block_table, batch.seq_lens, batch.kv_len)
    assert torch.equal(reference.gather(batch.k_arena, *pages, scales=batch.k_scales), batch.k)
    assert torch.equal(reference.gather(batch.v_arena, *pages, scales=batch.v_scales), batch.v)
