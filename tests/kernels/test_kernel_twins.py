"""The twins: same signatures as the wrappers, and equal to dense attention written out independently."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paged_cases import PagedBatch, assert_close, examples, masks, paged_batches, score_options, visibilities
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


def dense_attention(
    q: Tensor,
    batch: PagedBatch,
    causal_offset: int | None,
    window: int | None,
    mask: Tensor | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The interface's sentence, one query at a time, in float64."""
    out = torch.zeros(*q.shape[:3], batch.v.shape[3], dtype=torch.float64)
    group = q.shape[1] // batch.k.shape[1]
    full_mask = None if mask is None else mask.expand(*q.shape[:3], batch.kv_len)
    keys = torch.arange(batch.kv_len)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).view(-1, 3).tolist():
        k, v = batch.k[b, h // group].double(), batch.v[b, h // group].double()
        scores = k @ q[b, h, i].double() * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = keys >= (batch.kv_len - batch.seq_lens[b] if mask is None else 0)
        if causal_offset is not None:
            visible &= keys <= i + causal_offset
            if window is not None:
                visible &= keys > i + causal_offset - window
        if full_mask is not None and full_mask.dtype == torch.bool:
            visible &= full_mask[b, h, i]
        elif full_mask is not None:
            scores += full_mask[b, h, i]
        scores[~visible] = float("-inf")
        if scores.max() > float("-inf"):
            sink = scores[:0] if sinks is None else sinks[h : h + 1].double()
            out[b, h, i] = torch.cat([scores, sink]).softmax(0)[: batch.kv_len] @ v
    return out.to(q.dtype)


@examples(40)
@given(batch=paged_batches(longest=24), group=st.integers(1, 2), q_len=st.integers(1, 4), data=st.data())
def test_the_attention_twin_matches_dense(batch: PagedBatch, group: int, q_len: int, data: st.DataObject) -> None:
    q = batch.queries(group, q_len)
    causal_offset, window = data.draw(visibilities(batch.kv_len, q_len))
    mask = data.draw(masks((*q.shape[:3], batch.kv_len)))
    limits = {"causal_offset": causal_offset, "window": window, "mask": mask, **data.draw(score_options(q.shape[1]))}
    want = dense_attention(q, batch, **limits)
    for compute_dtype in (torch.float32, torch.float64):
        got = reference.attention(q, *batch.pages, scale=0.3, **limits, compute_dtype=compute_dtype)
        assert_close(got, want)


@examples(20)
@given(batch=paged_batches())
def test_the_gather_twin_matches_dense(batch: PagedBatch) -> None:
    pages = (batch.block_table, batch.seq_lens, batch.kv_len)
    assert torch.equal(reference.gather(batch.k_arena, *pages), batch.k)
    assert torch.equal(reference.gather(batch.v_arena, *pages), batch.v)
