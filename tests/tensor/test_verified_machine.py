"""The same machine on handles with shadows: whatever is done to a handle, its shadow must stay what it stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from paged_inductor.tensor.verified import VerifiedTensor, promote

from .factory import paged_like
from .model import Pair
from .test_tensor_machine import MAX_CACHES, TensorMachine


class VerifiedMachine(TensorMachine):
    """`Pair.check` reads a handle's pages by `dense()`, which compares them with the shadow first."""

    @precondition(lambda self: len(self.caches) < MAX_CACHES)
    @rule(batch=st.integers(1, 3), count=st.integers(1, 40))
    def create(self, batch: int, count: int) -> None:
        dense = [self.values(batch, count, site) for site in range(2 * self.layers)]
        handles = paged_like(*dense, axes=self.axes, block_size=self.block_size)
        pairs = [Pair.of(promote(h, 1e-5), d.clone(), self.axes) for h, d in zip(handles, dense)]
        assert all(isinstance(pair.paged, VerifiedTensor) for pair in pairs)
        self.keep(dict(enumerate(pairs)))


TestVerifiedMachine = VerifiedMachine.TestCase


@pytest.mark.parametrize("axes", ["BHSD", "BSHD"])
def test_writes_through_a_view_of_one_token_reach_its_base(axes: str) -> None:
    """Its strides along dimensions of size 1 may be others than the shadow's, which is no reason for a copy."""
    (handle,) = paged_like(torch.randn([1, 2, 1, 4] if axes == "BHSD" else [1, 1, 2, 4]), axes=axes, block_size=8)
    base = promote(handle, 1e-5)
    new = torch.randn(base.shape)
    base.view(base.shape).index_copy_(axes.index("S"), torch.tensor([0]), new)
    assert torch.equal(base.dense(), new)


def test_writes_reach_a_view_of_a_crop() -> None:
    """The crop's shadow has gaps, the handle has none."""
    (handle,) = paged_like(torch.randn(2, 2, 5, 4), block_size=8)
    base = promote(handle, 1e-5)
    crop = base[:, :, :2]
    view = crop.view(crop.shape)
    new = torch.randn(2, 2, 1, 4)
    base.index_copy_(2, torch.tensor([0]), new)
    assert torch.equal(view.dense()[:, :, :1], new)


@pytest.mark.parametrize("axes", ["BHSD", "BSHD"])
def test_a_merge_with_a_longer_part_that_has_no_rows(axes: str) -> None:
    values = torch.randn([2, 2, 5, 4] if axes == "BHSD" else [2, 5, 2, 4])
    (handle,) = paged_like(values, axes=axes, block_size=8)
    base, dim = promote(handle, 1e-5), axes.index("S")
    merged = torch.cat([base[:1].narrow(dim, 0, 3), base[:0]])
    assert torch.equal(merged.dense().narrow(dim, 2, 3), values[:1].narrow(dim, 0, 3))
    assert not merged.dense().narrow(dim, 0, 2).any()
