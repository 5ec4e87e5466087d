"""Ragged batches in poisoned pages, drawn by Hypothesis: everything no kernel may read is NaN."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_inductor.kernels import reference

Test = TypeVar("Test", bound=Callable[..., Any])

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTIZED = (torch.float8_e4m3fn, torch.int8)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
THOROUGHNESS = {"ci": 1, "fuzz": 30}


def examples(count: int) -> Callable[[Test], Test]:
    """Hypothesis settings of `count` examples, scaled by the profile named in HYPOTHESIS_PROFILE."""
    scale = THOROUGHNESS.get(os.environ.get("HYPOTHESIS_PROFILE", "ci"), 1)
    return settings(max_examples=count * scale, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def poisoned(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The allocator hook of the tests."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_close(got: Tensor, want: Tensor) -> None:
    """Equal up to the rounding of the dtype; NaN is never equal."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@dataclass(frozen=True, repr=False)
class PagedBatch:
    """K and V of one layer, dense [B, H_kv, kv_len, D] (zeros at virtual padding) and the same in pages.

    `dtype` is that of queries and new tokens; pages may be quantised.
    """

    k: Tensor
    v: Tensor
    k_arena: Tensor
    v_arena: Tensor
    block_table: Tensor
    seq_lens: Tensor
    kv_len: int
    seed: int
    dtype: torch.dtype
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    def __repr__(self) -> str:
        shapes = f"k_arena={tuple(self.k_arena.shape)}, v_arena={tuple(self.v_arena.shape)}, {self.k_arena.dtype}"
        return f"PagedBatch(seq_lens={self.seq_lens.tolist()}, {shapes}, seed={self.seed})"

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The pages' tensors that an attention call takes after q."""
        return self.k_arena, self.v_arena, self.block_table, self.seq_lens

    @property
    def pages(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """What an attention call takes after q."""
        return *self.tensors, self.kv_len

    @property
    def scales(self) -> dict[str, Tensor | None]:
        """What an attention call or a write of K and V takes by name."""
        return {"k_scales": self.k_scales, "v_scales": self.v_scales}

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1)

    def queries(self, group: int, q_len: int) -> Tensor:
        """Random q [B, H_q, Q, D], laid out as [B, Q, H_q, D]."""
        batch, num_kv_heads, _, head_dim = self.k.shape
        q = torch.randn(batch, q_len, num_kv_heads * group, head_dim, generator=self.generator)
        return q.to(self.dtype).transpose(1, 2)


def new_arena(blocks: int, heads: int, block_size: int, dim: int, dtype: torch.dtype, transposed: bool) -> Tensor:
    """NaN (int8: 127) but for the zero page; `transposed` puts the slots of a block side by side in memory."""
    shape = (blocks, heads, dim, block_size) if transposed else (blocks, heads, block_size, dim)
    arena = torch.full(shape, 127 if dtype == torch.int8 else float("nan"), dtype=dtype)
    arena[0] = 0
    return arena.mT if transposed else arena


def page(dense: Tensor, arena: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    """Scatter the rows of a left padded dense tensor into pages, token by token."""
    block_size, kv_len = arena.shape[2], dense.shape[2]
    for row, seq_len in enumerate(seq_lens.tolist()):
        for token in range(seq_len):
            block = int(block_table[row, token // block_size])
            arena[block, :, token % block_size] = dense[row, :, kv_len - seq_len + token]


def build(
    seq_lens: list[int],
    heads: int = 2,
    dim: int = 16,
    v_dim: int = 16,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    seed: int = 0,
    hidden: int = 0,
    stored: torch.dtype | None = None,
) -> PagedBatch:
    """A batch whose blocks are a random permutation, with unreferenced blocks among them. A window hides the first
    `hidden` keys: where they lie in pages, they are NaN. Pages of `stored`, if given, are quantised, and the dense
    tensors are what they hold, in float32."""
    generator = torch.Generator().manual_seed(seed)
    kv_len = max(seq_lens)
    needed = [-(-seq_len // block_size) for seq_len in seq_lens]
    ids = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
    block_table = torch.zeros(len(seq_lens), max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        block_table[row, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    padding = torch.arange(kv_len) < kv_len - lens[:, None]
    blocks = sum(needed) + 4
    dense, arenas, scales = [], [], []
    for width, layout in ((dim, transposed), (v_dim, False)):
        values = torch.randn(len(seq_lens), heads, kv_len, width, generator=generator).to(dtype)
        values.masked_fill_(padding[:, None, :, None], 0.0)
        arena = new_arena(blocks, heads, block_size, width, stored or dtype, layout)
        arenas.append(arena)
        if stored is not None:
            values, factors = reference.quantize(values, stored)
            factors[:, :, :hidden] = float("nan")
            scale_arena = new_arena(blocks, heads, block_size, 1, torch.float32, False)
            page(factors[..., None], scale_arena, block_table, lens)
            scales.append(scale_arena[..., 0])
            page(values, arena, block_table, lens)
            values = values.float() * factors[..., None]
        else:
            values[:, :, :hidden] = float("nan")
            page(values, arena, block_table, lens)
        dense.append(values[:, :, hidden:])
    return PagedBatch(*dense, *arenas, block_table, lens, kv_len - hidden, seed, dtype, *scales)


@st.composite
def paged_batches(draw: st.DrawFn, longest: int = 40) -> PagedBatch:
    """Ragged rows, some perhaps empty, the longest of at least one token."""
    seq_lens = draw(st.lists(st.integers(0, longest), min_size=1, max_size=3).filter(any))
    return build(
        seq_lens,
        heads=draw(st.sampled_from([1, 2])),
        dim=draw(st.sampled_from([8, 16, 20, 32, 80])),
        v_dim=draw(st.sampled_from([16, 24, 32])),
        block_size=draw(st.sampled_from([8, 16, 32])),
        dtype=draw(st.sampled_from(DTYPES)),
        transposed=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        hidden=draw(st.sampled_from([0, 0, min(5, max(seq_lens) - 1), max(seq_lens) // 2])),
        stored=draw(st.sampled_from([None, None, None, *QUANTIZED])),
    )


@st.composite
def visibilities(draw: st.DrawFn, kv_len: int, q_len: int) -> dict[str, int]:
    """`causal_offset`, with it perhaps `window` and `chunk`, around and beyond the edges."""
    causal_offset = draw(st.none() | st.integers(-q_len, kv_len + 1) | st.just(kv_len - q_len))
    if causal_offset is None:
        return {}
    limits = {"causal_offset": causal_offset}
    for name in ("window", "chunk"):
        limit = draw(st.none() | st.none() | st.integers(1, kv_len + q_len + 1))
        if limit is not None:
            limits[name] = limit
    return limits


@st.composite
def score_options(draw: st.DrawFn, num_heads: int) -> dict[str, object]:
    """`softcap` from a bend to a wall, `sinks` from negligible to dominant, `slopes`; mostly none of them."""
    options: dict[str, object] = {}
    softcap = draw(st.sampled_from([None, None, 0.5, 3.0, 30.0]))
    if softcap is not None:
        options["softcap"] = softcap
    for name, spread in (("sinks", 4.0), ("slopes", 0.2)):
        kind = draw(st.sampled_from([None, None, *DTYPES]))
        if kind is not None:
            generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
            options[name] = torch.randn(num_heads, generator=generator).mul(spread).to(kind)
    return options


@st.composite
def masks(draw: st.DrawFn, full: tuple[int, int, int, int]) -> Tensor | None:
    """No mask, or a bool or float one whose dims may be 1."""
    kind = draw(st.sampled_from([None, None, torch.bool, *DTYPES]))
    if kind is None:
        return None
    shape = tuple(draw(st.sampled_from([1, size])) for size in full)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    seen = torch.rand(shape, generator=generator) < 0.6
    if kind == torch.bool:
        return seen
    bias = torch.randn(shape, generator=generator).to(kind)
    # float32 scores near float16's least number keep 2**-8 of precision: a row of them is no test of a kernel
    hidden = [float("-inf")] if kind == torch.float16 else [float("-inf"), torch.finfo(kind).min]
    return bias.masked_fill_(~seen, draw(st.sampled_from(hidden)))


@st.composite
def variants(draw: st.DrawFn, q: Tensor, batch: PagedBatch) -> dict[str, Any]:
    """All that an attention call takes after q and the pages' tensors, by name."""
    kv_len = batch.kv_len
    limits: dict[str, Any] = {"scale": 0.3, **batch.scales}
    hides = (batch.seq_lens - kv_len).clamp(min=0)  # tokens that nobody may see
    if draw(st.sampled_from([False, False, True])):
        more = [min(int(n), int(h) + draw(st.integers(0, 5))) for n, h in zip(batch.seq_lens, hides)]
        limits["hidden"] = torch.tensor(more, dtype=torch.int32)
        room = batch.block_table.shape[1] * batch.k_arena.shape[2]
        kv_len = draw(st.sampled_from([kv_len, (kv_len + room) // 2, room]))
    unwritten = draw(st.sampled_from([None, None, None, -3, 0, 5, 23]))
    if unwritten is not None:
        hidden = max(hides.tolist(), default=0)
        limits["row_start"] = draw(st.sampled_from([0, 0, -3, 0 if hidden else 4])) - hidden
        kv_len = max(1, kv_len + limits["row_start"] + unwritten)
    limits["kv_len"] = kv_len
    limits |= draw(visibilities(kv_len, q.shape[2]))
    limits["mask"] = draw(masks((*q.shape[:3], kv_len)))
    return limits | draw(score_options(q.shape[1]))
