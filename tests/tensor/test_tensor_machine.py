"""PagedTensors and dense tensors through the same random operations: equal after every step."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from random import Random
from typing import TypeVar

import torch
import torch.nn.functional as F
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from paged_inductor import configure
from paged_inductor._config import reset_config
from paged_inductor.runtime import manager
from paged_inductor.tensor import PagedTensor

from .factory import paged_like
from .model import Boom, Pair, attention, broken

HEADS, KEY_DIM = 2, 4
MAX_CACHES, MAX_ROWS, MAX_TOKENS = 8, 6, 90

T = TypeVar("T")
Cache = dict[int, Pair]
counts = st.integers(1, 20)
some = st.randoms(use_true_random=False)


def used_blocks() -> int:
    return sum(group.pool.num_used for group in manager().groups)


def choose(random: Random, items: Sequence[T]) -> T:
    """Hypothesis remembers the arguments of its random numbers: they must not be handles."""
    return items[random.randrange(len(items))]


FORKS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "clone": lambda x, rows: x.clone(),
    "deepcopy": lambda x, rows: copy.deepcopy(x),
    "index_select": lambda x, rows: x.index_select(0, torch.tensor(rows)),
    "index": lambda x, rows: x[torch.tensor(rows)],
    "list": lambda x, rows: x[rows],
    "mask": lambda x, rows: x[torch.tensor([i in rows for i in range(x.shape[0])])],
    "repeat_interleave": lambda x, rows: x.repeat_interleave(2, dim=0),
    "expand_clone": lambda x, rows: x[:1].expand(len(rows), -1, -1, -1).clone(),
    "cat_alone": lambda x, rows: torch.cat([x], dim=0),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda x: x.detach(),
    "transpose": lambda x: x.transpose(1, 2).transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 3, 1).permute(1, 3, 0, 2),
    "view": lambda x: x.view(x.shape) if x.is_contiguous() else x,
    "slice": lambda x: x[:],
    "narrow": lambda x: x.narrow(0, 0, x.shape[0]),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
}


WRITES = ["index_copy", "put", "put_slice", "copy", "scalar", "row", "head", "transposed"]


class TensorMachine(RuleBasedStateMachine):
    """`caches` are dicts from site (K and V of every layer) to pairs; operations go to all sites or to some."""

    def __init__(self) -> None:
        super().__init__()
        configure(on_materialize="silent")
        self.used_before = used_blocks()
        self.caches: list[Cache] = []
        self.parts: list[Pair] = []
        self.kept: list[BaseException] = []
        self.seed = 0

    @initialize(
        axes=st.sampled_from(["BHSD", "BSHD"]),
        block_size=st.sampled_from([8, 16]),
        layers=st.integers(1, 3),
        value_dim=st.sampled_from([KEY_DIM, 6]),
        inference=st.booleans(),
        kernels=st.booleans(),
    )
    def begin(self, axes: str, block_size: int, layers: int, value_dim: int, inference: bool, kernels: bool) -> None:
        configure(triton_on_cpu=kernels)
        self.inference = inference
        self.mode = torch.inference_mode(inference)  # outside it, torch keeps alive what a tensor is a view of
        self.mode.__enter__()
        self.axes, self.block_size, self.layers, self.value_dim = axes, block_size, layers, value_dim
        self.tokens = axes.index("S")
        self.create(2, 5)

    # -- helpers ---------------------------------------------------------------------------------------------

    def values(self, batch: int, count: int, site: int) -> Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        value = torch.randn(batch, HEADS, count, self.value_dim if site % 2 else KEY_DIM, generator=generator)
        return value if self.axes == "BHSD" else value.transpose(1, 2).contiguous()

    def pick(self, random: Random) -> Cache:
        return choose(random, self.caches)

    def sites(self, cache: Cache, random: Random) -> list[int]:
        """Some of a cache's sites, in some order; mostly all of them in theirs."""
        sites = sorted(cache)
        if random.random() < 0.3:
            sites = random.sample(sites, random.randint(1, len(sites)))
        return sites

    def keep(self, cache: Cache) -> None:
        self.caches.append(cache)

    def span(self, *indices: slice) -> tuple[slice, ...]:
        """An index of the sequence dimension."""
        return (slice(None),) * self.tokens + indices

    room = precondition(lambda self: 0 < len(self.caches) < MAX_CACHES)
    some_cache = precondition(lambda self: bool(self.caches))

    # -- derivations -----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.caches) < MAX_CACHES)
    @rule(batch=st.integers(1, 3), count=st.integers(1, 40))
    def create(self, batch: int, count: int) -> None:
        dense = [self.values(batch, count, site) for site in range(2 * self.layers)]
        handles = paged_like(*dense, axes=self.axes, block_size=self.block_size)
        self.keep({i: Pair.of(h, d.clone(), self.axes) for i, (h, d) in enumerate(zip(handles, dense))})

    @room
    @rule(random=some, count=counts, replace=st.booleans())
    def append(self, random: Random, count: int, replace: bool) -> None:
        cache = self.pick(random)
        longer: Cache = {}
        for site in self.sites(cache, random):
            pair = cache[site]
            if pair.dense.shape[self.tokens] < MAX_TOKENS:
                new = self.values(pair.dense.shape[0], count, site)
                longer[site] = pair.both(lambda x, new=new: torch.cat([x, new], dim=self.tokens))
        if longer:
            self.keep(longer)
        if replace:
            self.caches = [other for other in self.caches if other is not cache]

    @room
    @rule(random=some, kind=st.sampled_from(sorted(FORKS)))
    def fork(self, random: Random, kind: str) -> None:
        cache = self.pick(random)
        batch = next(iter(cache.values())).dense.shape[0]
        if not batch or (kind == "repeat_interleave" and batch * 2 > MAX_ROWS):
            return
        rows = [random.randrange(-batch, batch) for _ in range(random.randint(1, MAX_ROWS))]
        if kind in ("index_select", "mask"):
            rows = [row % batch for row in rows]
        self.keep({site: cache[site].both(lambda x: FORKS[kind](x, rows)) for site in self.sites(cache, random)})

    @room
    @rule(random=some, kind=st.sampled_from(sorted(VIEWS)))
    def view(self, random: Random, kind: str) -> None:
        cache = self.pick(random)
        self.keep({site: cache[site].both(VIEWS[kind]) for site in self.sites(cache, random)})

    @room
    @rule(random=some, where=st.floats(0, 1))
    def crop(self, random: Random, where: float) -> None:
        cache = self.pick(random)
        length = int(where * next(iter(cache.values())).dense.shape[self.tokens])
        index = self.span(slice(None, length))
        self.keep({site: cache[site].both(lambda x: x[index]) for site in self.sites(cache, random)})

    @room
    @rule(random=some, first=st.floats(0, 1), stop=st.floats(0, 1), clone=st.booleans())
    def window(self, random: Random, first: float, stop: float, clone: bool) -> None:
        """The newest tokens, as a sliding window keeps them, or some from the middle."""
        cache = self.pick(random)
        length = next(iter(cache.values())).dense.shape[self.tokens]
        index = self.span(slice(int(first * length), length if stop > 0.5 else int(stop * 2 * length)))
        take: Callable[[Tensor], Tensor] = (lambda x: x[index].clone()) if clone else (lambda x: x[index])
        self.keep({site: cache[site].both(take) for site in self.sites(cache, random)})

    @room
    @rule(random=some, kind=st.sampled_from(["slice", "split", "chunk"]))
    def rows(self, random: Random, kind: str) -> None:
        cache = self.pick(random)
        batch = next(iter(cache.values())).dense.shape[0]
        if not batch:
            return
        if kind == "slice":
            a, b = sorted(random.randint(0, batch) for _ in range(2))
            self.keep({site: cache[site].both(lambda x: x[a:b]) for site in self.sites(cache, random)})
            return
        pick = random.randrange(2)
        take = (lambda x: x.split(1)) if kind == "split" else (lambda x: x.chunk(2))
        self.keep(
            {site: cache[site].both(lambda x: take(x)[min(pick, batch - 1)]) for site in self.sites(cache, random)}
        )

    @room
    @rule(random=some, count=st.integers(2, 3))
    def merge(self, random: Random, count: int) -> None:
        caches = [self.pick(random) for _ in range(count)]
        sites = sorted(set.intersection(*(set(cache) for cache in caches)))
        if not sites or sum(cache[sites[0]].dense.shape[0] for cache in caches) > MAX_ROWS:
            return
        merged: Cache = {}
        for site in sites:
            pairs = [cache[site] for cache in caches]
            length = max(pair.dense.shape[self.tokens] for pair in pairs)
            after = 2 * (3 - self.tokens)
            dense = [F.pad(p.dense, (0,) * after + (length - p.dense.shape[self.tokens], 0)) for p in pairs]
            joined = torch.cat([p.paged for p in pairs])
            if isinstance(joined, PagedTensor):
                merged[site] = Pair.of(joined, torch.cat(dense), self.axes)
            else:  # tokens that a window hides do not become padding
                assert torch.equal(joined, torch.cat(dense))
        if merged:
            self.keep(merged)

    @room
    @rule(random=some)
    def part(self, random: Random) -> None:
        """A slice with a start, put off: it must see later writes, and pass on its own."""
        pair = choose(random, list(self.pick(random).values()))
        size = pair.dense.shape[self.tokens]
        if size > 1 and len(self.parts) < 4:
            a = random.randrange(1, size)
            b = random.randint(a, size)
            index = self.span(slice(a, b))
            self.parts.append(pair.part(lambda x: x[index]))

    # -- writes ----------------------------------------------------------------------------------------------

    @some_cache
    @rule(random=some, kind=st.sampled_from(WRITES))
    def write(self, random: Random, kind: str) -> None:
        cache = self.pick(random)
        for site in self.sites(cache, random):
            pair = cache[site]
            batch, size = pair.dense.shape[0], pair.dense.shape[self.tokens]
            if not batch or not size or 0 in pair.dense.stride():
                continue
            positions = random.sample(range(size), random.randint(1, size))
            pair.write(self.one_write(kind, batch, size, positions, site))

    def one_write(
        self, kind: str, batch: int, size: int, positions: list[int], site: int
    ) -> Callable[[Tensor], object]:
        start = min(positions)
        new = self.values(batch, len(positions), site)
        rest = self.values(batch, size - start, site)
        index = torch.tensor(positions)
        tail, head = self.span(slice(start, size)), self.span(slice(None, size - start))
        writes: dict[str, Callable[[Tensor], object]] = {
            "index_copy": lambda x: x.index_copy_(self.tokens, index, new),
            "put": lambda x: x.__setitem__((slice(None),) * self.tokens + (index,), new),
            "put_slice": lambda x: x.__setitem__(tail, rest),
            "copy": lambda x: x[head].copy_(rest),
            "scalar": lambda x: (x.mul_(0.5), x.add_(1.0)),
            "row": lambda x: x[batch - 1 :].fill_(float(start)),
            "head": lambda x: x.select(3 - self.tokens, 0).zero_(),
            "transposed": lambda x: x.transpose(1, 2)[(slice(None),) * (3 - self.tokens) + (slice(start, size),)].copy_(
                rest.transpose(1, 2)
            ),
        }
        return writes[kind]

    @precondition(lambda self: bool(self.parts))
    @rule(random=some, kind=st.sampled_from(["copy", "fill", "mul", "zero"]))
    def write_part(self, random: Random, kind: str) -> None:
        pair = choose(random, self.parts)
        if 0 in pair.dense.stride() or not pair.dense.numel():
            return
        new = torch.randn(pair.dense.shape, generator=torch.Generator().manual_seed(self.seed))
        writes: dict[str, Callable[[Tensor], object]] = {
            "copy": lambda x: x.copy_(new),
            "fill": lambda x: x.fill_(3.0),
            "mul": lambda x: x.mul_(2.0),
            "zero": lambda x: x.zero_(),
        }
        pair.write(writes[kind])

    # -- attention -------------------------------------------------------------------------------------------

    @some_cache
    @rule(
        random=some,
        queries=st.integers(1, 5),
        mask=st.sampled_from(["none", "causal", "bool", "bool2d", "float", "float_heads"]),
        heads=st.sampled_from(["same", "gqa", "repeat"]),
        inference=st.booleans(),
    )
    def attend(self, random: Random, queries: int, mask: str, heads: str, inference: bool) -> None:
        cache = self.pick(random)
        layer = choose(random, [site // 2 for site in cache])
        key, value = cache.get(2 * layer), cache.get(2 * layer + 1)
        if key is None or value is None or key.dense.shape[:3] != value.dense.shape[:3] or not key.dense.numel():
            return
        batch, length = key.dense.shape[0], key.dense.shape[self.tokens]
        query_heads = HEADS if heads == "same" else 2 * HEADS
        generator = torch.Generator().manual_seed(self.seed)
        query = torch.randn(batch, query_heads, queries, KEY_DIM, generator=generator)
        shape = {"bool2d": (queries, length), "float_heads": (1, query_heads, queries, length)}
        bits = torch.rand(shape.get(mask, (batch, 1, queries, length)), generator=generator)
        given: Tensor | None = None
        if mask.startswith("bool"):
            given = bits > 0.3
        elif mask.startswith("float"):
            given = bits.masked_fill(bits < 0.2, -torch.inf)
        k, v, dense_k, dense_v = (
            x if self.axes == "BHSD" else x.transpose(1, 2) for x in (key.paged, value.paged, key.dense, value.dense)
        )
        if heads == "repeat":
            k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(batch, query_heads, length, -1) for x in (k, v))
        whole = inference or self.value_dim != KEY_DIM  # else torch takes SDPA apart before it reaches the handles
        with torch.inference_mode() if whole else nullcontext():
            got = F.scaled_dot_product_attention(
                query, k, v, given, is_causal=mask == "causal", enable_gqa=heads == "gqa"
            )
        wanted = attention(query, dense_k, dense_v, key.pads, given, mask == "causal")
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-5)

    # -- ends ------------------------------------------------------------------------------------------------

    @some_cache
    @rule(random=some, all_parts=st.booleans())
    def drop(self, random: Random, all_parts: bool) -> None:
        self.caches.remove(self.pick(random))
        if all_parts:
            self.parts.clear()

    @some_cache
    @rule(random=some, name=st.sampled_from(["cache_write", "execute_copies"]), keep=st.booleans(), write=st.booleans())
    def fail(self, random: Random, name: str, keep: bool, write: bool) -> None:
        """A step that dies on its way changes nothing, also while its traceback is kept."""
        cache = self.pick(random)
        site = choose(random, sorted(cache))
        pair = cache[site]
        if not pair.dense.numel() or 0 in pair.dense.stride():
            return
        new = self.values(pair.dense.shape[0], 3, site)
        try:
            with broken(name):
                if write:
                    pair.paged.zero_()
                else:
                    torch.cat([pair.paged, new], dim=self.tokens)
        except Boom as error:
            note(f"{name} failed as planned")
            if keep:
                self.kept.append(error)
        else:  # nothing was copied, nothing broke
            if write:
                pair.write(lambda x: x.zero_())

    @rule()
    def forget(self) -> None:
        self.kept.clear()

    @invariant()
    def equal(self) -> None:
        for cache in self.caches:
            for pair in cache.values():
                pair.check()
        for pair in self.parts:
            pair.check()
        manager().check_integrity()

    def teardown(self) -> None:
        self.caches.clear()
        self.parts.clear()
        self.kept.clear()
        reset_config()
        if hasattr(self, "mode"):
            self.mode.__exit__(None, None, None)
        if sys.exc_info()[0] is not None:
            return  # its traceback holds handles
        manager().check_integrity()
        assert used_blocks() <= self.used_before


TestTensorMachine = TensorMachine.TestCase
