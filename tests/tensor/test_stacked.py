"""A stack of handles is the stacked tensor: every operation gives torch's numbers, and writes reach the pages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_inductor import configure, stats
from paged_inductor._config import reset_config
from paged_inductor.runtime import manager
from paged_inductor.tensor import PagedStack, PagedTensor

from .factory import paged_like

LEAD = (3, 2)  # layers, K and V
SIZE = (*LEAD, 2, 2, 5, 4)


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    configure(on_materialize="silent")
    yield
    reset_config()
    manager().check_integrity()


def pair(seed: int = 0) -> tuple[Tensor, PagedStack]:
    """A dense [L, 2, B, H, S, D] and the same in pages."""
    dense = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    return dense, PagedStack(paged_like(*dense.flatten(0, 1), block_size=8), LEAD)


def values(result: Tensor) -> Tensor:
    return result.dense() if isinstance(result, PagedStack | PagedTensor) else result


def new_tokens(count: int = 3) -> Tensor:
    return torch.randn(*SIZE[:4], count, 4, generator=torch.Generator().manual_seed(9))


# name -> (operation, whether its result must stay in pages)
OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "layer": (lambda x: x[1], True),
    "keys of a layer": (lambda x: x[-1, 0], True),
    "two indices": (lambda x: x[2][1], True),
    "keys of all layers": (lambda x: x[:, 0], True),
    "some layers": (lambda x: x[1:], True),
    "some layers' values": (lambda x: x[::2, 1], True),
    "unbind": (lambda x: x.unbind(0)[2].unbind(0)[0], True),
    "unbind batch": (lambda x: x.unbind(2)[1], True),
    "crop": (lambda x: x[:, :, :, :, :3], True),
    "narrow": (lambda x: x.narrow(4, 1, 3), True),
    "negative crop": (lambda x: x[..., -2:, :], True),
    "rows": (lambda x: x[:, :, 1:], True),
    "rows in another order": (lambda x: x.index_select(2, torch.tensor([1, 1, 0])), True),
    "rows by index": (lambda x: x[:, :, torch.tensor([1, 0])], True),
    "layers in another order": (lambda x: x.index_select(0, torch.tensor([2, 0])), True),
    "layers transposed": (lambda x: x.transpose(0, 1), True),
    "heads and tokens transposed": (lambda x: x.transpose(3, 4), True),
    "layers and batch transposed": (lambda x: x.transpose(0, 2), False),
    "clone": (lambda x: x.clone(), True),
    "detach": (lambda x: x.detach(), True),
    "deep copy": (copy.deepcopy, True),
    "append": (lambda x: torch.cat([x, new_tokens()], 4), True),
    "append, negative dim": (lambda x: torch.cat([x, new_tokens()], -2), True),
    "join a batch": (lambda x: torch.cat([x, x], 2), True),
    "join layers": (lambda x: torch.cat([x, x], 0), False),
    "split tokens": (lambda x: x.split([2, 3], 4)[1], True),
    "split layers": (lambda x: x.split(2, 0)[1], True),
    "chunk": (lambda x: x.chunk(2, 1)[0], True),
    "no layers": (lambda x: x[3:], False),
    "permute": (lambda x: x.permute(2, 0, 1, 3, 4, 5), False),
    "permute apart": (lambda x: x.permute(1, 0, 2, 4, 3, 5), True),
    "reshape": (lambda x: x.reshape(6, 2, 2, 5, 4), True),
    "reshape the rest": (lambda x: x.reshape(3, 2, 4, -1), True),
    "reshape all": (lambda x: x.reshape(12, -1), False),
    "unsqueeze": (lambda x: x.unsqueeze(0).unsqueeze(3).unsqueeze(-1), True),
    "squeeze": (lambda x: x[:1, :, :1].squeeze(), True),
    "squeeze one": (lambda x: x[:1, :, :1].squeeze(2).squeeze(0).squeeze(0), True),
    "expand": (lambda x: x[:1].expand(4, 3, 2, 2, 2, 5, 4), True),
    "expand rows": (lambda x: x[:, :, :1].expand(-1, -1, 3, -1, -1, -1), True),
    "arithmetic": (lambda x: x * 2 + 1, False),
    "reduction": (lambda x: x.amax((0, 4)), False),
    "mask of layers": (lambda x: x[torch.tensor([True, False, True])], False),
    "comparison": (lambda x: x > 0.5, False),
    "add to dense": (lambda x: torch.ones(SIZE).add_(x), False),
    "copy into dense": (lambda x: torch.empty(SIZE).copy_(x), False),
    "to double": (lambda x: x.double(), False),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("inference", [False, True])
def test_an_operation_gives_the_numbers_of_the_dense_tensor(name: str, inference: bool) -> None:
    operation, paged = OPERATIONS[name]
    with torch.inference_mode(inference):
        dense, stack = pair()
        result, expected = operation(stack), operation(dense)
        assert result.shape == expected.shape
        assert result.dtype == expected.dtype
        assert torch.equal(values(result), expected)
        assert isinstance(result, PagedStack | PagedTensor) == paged
        assert torch.equal(stack.dense(), dense)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "one layer": lambda x: x[1].fill_(7.0),
    "keys": lambda x: x[:, 0].zero_(),
    "all": lambda x: x.zero_(),
    "multiply": lambda x: x.mul_(3.0),
    "tokens": lambda x: x[..., 1:3, :].copy_(torch.ones(2, 4)),
    "a row of one layer": lambda x: x[2, 1, 0].add_(1.0),
    "a slice of layers": lambda x: x[1:, :, :, :, 2:4].mul_(-1.0),
    "set item": lambda x: x.__setitem__((0, 1, slice(None), slice(None), 3), 4.0),
    "copy a stack": lambda x: x.copy_(x.clone().mul_(2)),
    "out": lambda x: torch.add(x, 1.0, out=x),
    "a view of the layers": lambda x: x.view(6, *x.shape[2:])[4].mul_(2.0),
    "a view of the rest": lambda x: x.flatten(2)[1, :, 3:9].mul_(2.0),
    "dimensions of size one": lambda x: x.unsqueeze(0).unsqueeze(4)[:, 1].squeeze().mul_(-2.0),
    "permuted": lambda x: x.permute(1, 0, 2, 4, 3, 5)[1, 2].add_(1.0),
    "expanded to itself": lambda x: x.expand_as(x)[1:].add_(1.0),
    "last": lambda x: x[2].unbind(0)[1].copy_(x[0, 0]),
}


@settings(max_examples=25, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(WRITES)), min_size=1, max_size=4), fork_at=st.integers(0, 3))
def test_writes_through_parts_reach_the_whole_and_no_copy(names: list[str], fork_at: int) -> None:
    dense, stack = pair()
    fork, dense_fork = stack.clone(), dense.clone()
    with torch.no_grad():
        for i, name in enumerate(names):
            if i == fork_at:
                fork, dense_fork = stack.clone(), dense.clone()
            WRITES[name](stack)
            WRITES[name](dense)
            assert torch.equal(stack.dense(), dense)
            assert torch.equal(fork.dense(), dense_fork)


def test_parts_are_the_pages_themselves() -> None:
    before = stats().blocks_used
    _, stack = pair()
    held = stats().blocks_used - before
    parts = [stack[i, j] for i in range(3) for j in range(2)] + [stack[:, 0], stack[..., :2, :]]
    assert stats().blocks_used - before == held
    del parts, stack
    assert stats().blocks_used == before


def test_text_and_numpy() -> None:
    dense, stack = pair()
    assert "PagedStack(shape=[3, 2, 2, 2, 5, 4]" in repr(stack)
    assert (stack.numpy() == dense.numpy()).all()
    assert stack.tolist() == dense.tolist()
