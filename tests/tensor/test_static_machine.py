"""Static buffers as handles and as dense tensors through the same random operations: equal after every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from paged_inductor import configure
from paged_inductor._config import reset_config
from paged_inductor.runtime import SiteSpec, manager
from paged_inductor.tensor import PagedTensor
from paged_inductor.tensor.adopt import Buffer, adopt, refusal

HEADS, DIM, LENGTH, SITES = 2, 4, 50, 4

FORKS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "clone": lambda x, rows: x.clone(),
    "deepcopy": lambda x, rows: copy.deepcopy(x),
    "index_select": lambda x, rows: x.index_select(0, torch.tensor(rows)),
    "index": lambda x, rows: x[rows],
    "repeat_interleave": lambda x, rows: x.repeat_interleave(2, dim=0),
    "cat": lambda x, rows: torch.cat([x, x]),
}


class StaticMachine(RuleBasedStateMachine):
    """`caches` are lists of (handle, dense twin), one per site (K and V of two layers)."""

    def __init__(self) -> None:
        super().__init__()
        configure(on_materialize="silent")
        self.caches: list[list[tuple[Tensor, Tensor]]] = []
        self.generator = torch.Generator().manual_seed(0)

    @initialize(
        axes=st.sampled_from(["BHSD", "BSHD"]),
        written=st.integers(0, LENGTH),
        block_size=st.sampled_from([8, 16]),
        kernels=st.booleans(),
    )
    def begin(self, axes: str, written: int, block_size: int, kernels: bool) -> None:
        configure(triton_on_cpu=kernels)
        self.dim = axes.index("S")
        dense = [self.values(2, LENGTH) for _ in range(SITES)]
        for x in dense:
            x.narrow(self.dim, written, LENGTH - written).zero_()
        handles = [x.clone() for x in dense]
        spec = SiteSpec(HEADS, DIM, torch.float32, torch.device("cpu"))
        assert not any(map(refusal, handles))
        adopt([Buffer(x, axes, spec) for x in handles], block_size, "test")
        assert all(isinstance(x, PagedTensor) for x in handles)
        blocks = {len(row.blocks) for row in handles[0]._view.rows}
        assert blocks == {-(-written // block_size)}
        self.caches.append(list(zip(handles, dense)))

    def values(self, batch: int, count: int) -> Tensor:
        size = (batch, HEADS, count, DIM)
        value = torch.randn(size, generator=self.generator)
        return value if self.dim == 2 else value.transpose(1, 2).contiguous()

    def span(self, item: object) -> tuple[object, ...]:
        return (slice(None),) * self.dim + (item,)

    room = precondition(lambda self: len(self.caches) < 5)

    @rule(
        random=st.randoms(use_true_random=False),
        kind=st.sampled_from(["index_copy", "put", "slice", "copy", "scattered", "add", "row"]),
        all_sites=st.booleans(),
    )
    def write(self, random: Random, kind: str, all_sites: bool) -> None:
        cache = random.choice(self.caches)
        start = random.randrange(LENGTH)
        count = random.randint(1, min(12, LENGTH - start))
        index = torch.tensor(random.sample(range(LENGTH), count))
        for handle, dense in cache if all_sites else random.sample(cache, 2):
            new = self.values(dense.shape[0], count)
            writes: dict[str, Callable[[Tensor], object]] = {
                "index_copy": lambda x, new=new: x.index_copy_(self.dim, torch.arange(start, start + count), new),
                "put": lambda x, new=new: x.__setitem__(self.span(torch.arange(start, start + count)), new),
                "slice": lambda x, new=new: x.__setitem__(self.span(slice(start, start + count)), new),
                "copy": lambda x, new=new: x.narrow(self.dim, start, count).copy_(new),
                "scattered": lambda x, new=new: x.index_copy_(self.dim, index, new),
                "add": lambda x: x.narrow(self.dim, start, count).add_(1.0),
                "row": lambda x, new=new: x[:1].narrow(self.dim, start, count).copy_(new[:1]),
            }
            writes[kind](handle)
            writes[kind](dense)

    @room
    @rule(random=st.randoms(use_true_random=False), kind=st.sampled_from(sorted(FORKS)))
    def fork(self, random: Random, kind: str) -> None:
        cache = random.choice(self.caches)
        rows = [random.randrange(cache[0][1].shape[0]) for _ in range(random.randint(1, 3))]
        if kind in ("repeat_interleave", "cat") and cache[0][1].shape[0] > 2:
            return
        self.caches.append([(FORKS[kind](handle, rows), FORKS[kind](dense, rows)) for handle, dense in cache])
        assert all(isinstance(handle, PagedTensor) and handle._view.static for handle, _ in self.caches[-1])

    @rule(random=st.randoms(use_true_random=False), all_sites=st.booleans())
    def zero(self, random: Random, all_sites: bool) -> None:
        cache = random.choice(self.caches)
        for handle, dense in cache if all_sites else cache[:1]:
            handle.zero_()
            dense.zero_()
        if all_sites:
            assert not any(row.blocks for row in cache[0][0]._view.rows if sum(row.live.values()) == 1)

    @rule(random=st.randoms(use_true_random=False), masked=st.booleans())
    def read(self, random: Random, masked: bool) -> None:
        (key, dense_key), (value, dense_value) = random.choice(self.caches)[:2]
        stop = random.randint(1, LENGTH)
        index = self.span(slice(random.choice([0, 0, stop // 2]), stop))
        assert torch.equal(key[index] + 0, dense_key[index])
        query = self.values(dense_key.shape[0], 1)
        mask = (torch.arange(stop) <= stop // 2)[None] if masked else None
        out, wanted = (
            F.scaled_dot_product_attention(*(x if self.dim == 2 else x.transpose(1, 2) for x in (query, k, v)), mask)
            for k, v in (
                (key.narrow(self.dim, 0, stop), value.narrow(self.dim, 0, stop)),
                (dense_key.narrow(self.dim, 0, stop), dense_value.narrow(self.dim, 0, stop)),
            )
        )
        torch.testing.assert_close(out, wanted)

    @precondition(lambda self: len(self.caches) > 1)
    @rule(random=st.randoms(use_true_random=False))
    def drop(self, random: Random) -> None:
        self.caches.pop(random.randrange(len(self.caches)))

    @invariant()
    def equal(self) -> None:
        for cache in self.caches:
            for handle, dense in cache:
                assert torch.equal(handle.dense(), dense)  # type: ignore[attr-defined]
        manager().check_integrity()

    def teardown(self) -> None:
        self.caches.clear()
        reset_config()
        manager().check_integrity()


TestStaticMachine = StaticMachine.TestCase
