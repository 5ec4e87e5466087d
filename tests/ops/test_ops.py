"""The operations: opcheck, and the CPU formulas against float64 over shapes, masks and ragged lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_inductor import ops
from paged_inductor.kernels.launch import Launch
from paged_inductor.ops import formulas
from paged_inductor.ops.decode import decode_formula

from .pages import random_pages, reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def masks(kind: str, batch: int, heads: int, queries: int, length: int) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(length)
    if kind == "none":
        return None
    shape = {"rows": (batch, 1, queries, length), "heads": (1, heads, queries, length), "flat": (queries, length)}
    noise = torch.randn(shape[kind.split("-")[1]], generator=generator)
    return noise > 0 if kind.startswith("bool") else noise


def extras(kind: str, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """A soft cap that bends the scores, sinks from negligible to dominant, both, or neither."""
    given: dict[str, Any] = {"softcap": 2.5} if "softcap" in kind else {}
    return given | ({"sinks": torch.linspace(-20, 12, heads).to(dtype)} if "sinks" in kind else {})


EXTRAS = ["neither", "softcap", "sinks", "softcap and sinks"]
MASKS = ["none", "bool-rows", "bool-heads", "bool-flat", "float-rows", "float-heads", "float-flat"]


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2), (12, 1)]),
    dims=st.sampled_from([(16, 16), (8, 8), (24, 16), (80, 80), (64, 32)]),
    block_size=st.sampled_from([8, 16, 64, 256]),
    transposed=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    mask=st.sampled_from(MASKS),
    extra=st.sampled_from(EXTRAS),
    seed=st.integers(0, 1000),
    hidden=st.sampled_from([0, 0, 1, 17]),
    bounds=st.none() | st.tuples(st.integers(-3, 330), st.none() | st.integers(1, 330)),
)
def test_decode_formula_is_attention(
    lengths: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_size: int,
    transposed: bool,
    dtype: torch.dtype,
    mask: str,
    extra: str,
    seed: int,
    hidden: int,
    bounds: tuple[int, int | None] | None,
) -> None:
    """The formula itself, run eagerly: NaN in every slot that no row owns, or that is hidden, must not leak."""
    hidden = min(hidden, max(lengths) - 1)
    pages = random_pages(lengths, heads[1], *dims, dtype, block_size, transposed, seed, hidden)
    q = torch.randn(len(lengths), heads[0], 1, dims[0], generator=torch.Generator().manual_seed(seed)).to(dtype)
    given_mask = masks(mask, len(lengths), heads[0], 1, pages.kv_len)
    plan = pages.plan(1)
    if bounds is not None:
        plan = ops.plan_window(plan, *bounds)
        if given_mask is not None:  # a mask implies the bounds that it comes with
            key = torch.arange(pages.kv_len)
            seen = (key <= bounds[0]) & (key > bounds[0] - (bounds[1] or 10**6))
            given_mask = given_mask & seen if given_mask.dtype == torch.bool else given_mask.where(seen, -torch.inf)
    planned = None if given_mask is None else ops.plan_mask(given_mask, plan)
    chunks = plan.chunks
    assert chunks is not None
    packed = q.view(len(lengths), heads[1], heads[0] // heads[1], dims[0])
    masking = (None, None) if planned is None else (planned.bias, planned.padding)
    options = extras(extra, heads[0], dtype)
    out = decode_formula(
        packed,
        pages.k_arena,
        pages.v_arena,
        chunks.table,
        chunks.row,
        chunks.bias,
        chunks.of_row,
        chunks.count,
        *masking,
        options.get("sinks"),
        None,
        None,
        0.3,
        options.get("softcap"),
    )
    offset, window = bounds or (None, None)
    expected = reference(pages, q, given_mask, 0.3, offset, window, **options)
    torch.testing.assert_close(
        out.view(*q.shape[:3], dims[1]).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize(
    ("mask", "dtype", "extra"),
    [
        ("none", torch.float32, "neither"),
        ("none", torch.bfloat16, "softcap and sinks"),
        ("bool-rows", torch.float32, "softcap"),
        ("bool-rows", torch.bfloat16, "neither"),
        ("float-heads", torch.float32, "sinks"),
        ("float-heads", torch.bfloat16, "neither"),
    ],
    ids=str,
)
def test_compiled_decode_serves_all_sizes_with_one_compilation(mask: str, dtype: torch.dtype, extra: str) -> None:
    from paged_inductor.ops import decode

    options = extras(extra, 9, dtype)
    before = len(decode._formula._compiled)
    for lengths in ([5], [1, 700], [130, 128, 129, 1], [64] * 7):
        pages = random_pages(lengths, 3, 16, 16, dtype, seed=len(lengths))
        q = torch.randn(len(lengths), 9, 1, 16).to(dtype)
        given_mask = masks(mask, len(lengths), 9, 1, pages.kv_len)
        plan = pages.plan(1)
        planned = None if given_mask is None else ops.plan_mask(given_mask, plan)
        out = ops.attention(q, pages.k_arena, pages.v_arena, plan, planned, scale=0.25, **options)
        expected = reference(pages, q, given_mask, 0.25, **options)
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert len(decode._formula._compiled) <= before + 1


@given(
    lengths=st.lists(st.integers(4, 90), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2), (6, 2)]),
    queries=st.integers(2, 4),
    mask=st.sampled_from(MASKS),
    causal=st.booleans(),
    extra=st.sampled_from(EXTRAS),
    seed=st.integers(0, 1000),
)
def test_several_queries(
    lengths: list[int], heads: tuple[int, int], queries: int, mask: str, causal: bool, extra: str, seed: int
) -> None:
    pages = random_pages(lengths, heads[1], 8, 8, seed=seed)
    q = torch.randn(len(lengths), heads[0], queries, 8, generator=torch.Generator().manual_seed(seed))
    given_mask = masks(mask, len(lengths), heads[0], queries, pages.kv_len)
    plan = pages.plan(queries, decodes=False)
    offset = pages.kv_len - queries if causal else None
    planned = None if given_mask is None else ops.plan_mask(given_mask, plan)
    options = extras(extra, heads[0], torch.float32)
    out = ops.attention(q, pages.k_arena, pages.v_arena, plan, planned, scale=0.3, causal_offset=offset, **options)
    expected = reference(pages, q, given_mask, 0.3, offset, **options)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@given(
    extent=st.integers(1, 60),
    unwritten=st.integers(-20, 60),
    rows=st.integers(1, 3),
    hidden=st.sampled_from([0, 0, 3]),
    queries=st.integers(1, 3),
    mask=st.sampled_from(MASKS[1:]),
    extra=st.sampled_from(EXTRAS),
    seed=st.integers(0, 1000),
)
def test_the_kernels_operator_reads_static_buffers(
    extent: int, unwritten: int, rows: int, hidden: int, queries: int, mask: str, extra: str, seed: int
) -> None:
    """The operator of devices other than the CPU, and the CPU's formulas, against a dense buffer of zeros."""
    hidden = 0 if unwritten > 0 else hidden  # only a full buffer slides
    kv_len = max(1, extent + unwritten)
    pages = random_pages([extent + hidden] * rows, 2, 8, 8, seed=seed, hidden=hidden)
    plan = ops.plan_static(pages.plan(queries), kv_len, -hidden)
    q = torch.randn(rows, 4, queries, 8, generator=torch.Generator().manual_seed(seed))
    given_mask = masks(mask, rows, 4, queries, kv_len)
    assert given_mask is not None
    options = extras(extra, 4, torch.float32)
    planned = ops.plan_mask(given_mask, plan)
    key, value = (ops.gather(arena, plan).repeat_interleave(2, 1).double() for arena in (pages.k_arena, pages.v_arena))
    scores = q.double() @ key.mT * 0.3
    scores = scores if "softcap" not in options else 2.5 * torch.tanh(scores / 2.5)
    scores = scores.where(planned.mask, -torch.inf) if planned.mask.dtype == torch.bool else scores + planned.mask
    if "sinks" in options:
        scores = torch.cat([scores, options["sinks"].double()[:, None, None].expand(rows, 4, queries, 1)], -1)
    expected = scores.softmax(-1).nan_to_num()[..., :kv_len] @ value
    tables = (pages.block_table, pages.seq_lens, kv_len, 0.3, None, None, planned.mask)
    operator = torch.ops.paged_inductor.attention(
        q, pages.k_arena, pages.v_arena, *tables, **options, row_start=-hidden
    )
    torch.testing.assert_close(operator.double(), expected, rtol=2e-5, atol=2e-5)
    if queries > 1:  # one query is served by the compiled formula of decode
        formula = ops.attention(q, pages.k_arena, pages.v_arena, plan, planned, scale=0.3, **options)
        torch.testing.assert_close(formula.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_shared_prefix_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = random_pages([40, 37], 2, 8, 8)
    pages.block_table[:, :2] = pages.block_table[:1, :2]
    q = torch.randn(2, 4, 1, 8)
    expected = reference(pages, q, None, 0.3)
    plan = ops.plan_step(pages.block_table, pages.seq_lens, pages.kv_len, 1, pages.block_size, shared_prefix=32)
    monkeypatch.setattr(ops.library, "uses_kernels", lambda device: True)
    launches: list[Launch] = []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: (launches.append(launch), run(launch)))
    out = ops.attention(q, pages.k_arena, pages.v_arena, plan, scale=0.3)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    assert [launch.arguments.get("IS_PREFIX") for launch in launches] == [True, False, None]


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("served", ["formulas", "kernels"])
def test_a_query_hidden_from_everything_by_the_least_number_sees_everything(served: str, queries: int) -> None:
    """As padding does: the number swallows the scores, and all positions count the same, unwritten ones, too."""
    pages = random_pages([20, 20], 2, 8, 8)
    plan = ops.plan_static(pages.plan(queries), 33)
    q = torch.randn(2, 2, queries, 8)
    mask = torch.full((2, 1, queries, 33), torch.finfo(torch.float32).min)
    mask[1, :, :, 4:25] = 0.5
    value = ops.gather(pages.v_arena, plan)
    scores = q @ ops.gather(pages.k_arena, plan).mT * 0.3 + mask
    planned = ops.plan_mask(mask, plan)
    if served == "formulas":
        out = ops.attention(q, pages.k_arena, pages.v_arena, plan, planned, scale=0.3)
    else:
        tables = (pages.block_table, pages.seq_lens, 33, 0.3, None, None, planned.mask)
        out = torch.ops.paged_inductor.attention(q, pages.k_arena, pages.v_arena, *tables, row_start=0)
    torch.testing.assert_close(out, scores.softmax(-1) @ value, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(out[0, :, 0], value[0].mean(1), rtol=2e-5, atol=2e-5)


def test_a_static_plan_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = random_pages([20, 20], 2, 8, 8)
    plan = ops.plan_static(pages.plan(1), 33)
    q, seen = torch.randn(2, 4, 1, 8), torch.rand(2, 1, 1, 33) < 0.7
    expected = formulas.static_attention(q, pages.k_arena, pages.v_arena, plan, seen, scale=0.3)
    monkeypatch.setattr(ops.library, "uses_kernels", lambda device: True)
    out = ops.attention(q, pages.k_arena, pages.v_arena, plan, ops.plan_mask(seen, plan), scale=0.3)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


@given(
    lengths=st.lists(st.integers(6, 60), min_size=1, max_size=3),
    count=st.integers(1, 6),
    block_size=st.sampled_from([8, 16]),
    transposed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_write_then_gather(lengths: list[int], count: int, block_size: int, transposed: bool, seed: int) -> None:
    pages = random_pages(lengths, 2, 8, 8, block_size=block_size, transposed=transposed, seed=seed)
    plan = pages.plan(count, decodes=False)
    before = ops.gather(pages.k_arena, plan)
    new = torch.randn(len(lengths), 2, count, 8)
    ops.cache_write(pages.k_arena, new, plan)
    after = ops.gather(pages.k_arena, plan)
    assert torch.equal(after[:, :, -count:], new)
    assert torch.equal(after[:, :, :-count], before[:, :, :-count])
    for i, length in enumerate(lengths):
        assert not after[i, :, : pages.kv_len - length].any()
    assert not pages.k_arena[0].any()


@pytest.mark.parametrize("transposed", [False, True])
def test_custom_operators_pass_opcheck(transposed: bool) -> None:
    pages = random_pages([20, 7], 2, 16, 16, transposed=transposed)
    table, lens = pages.block_table, pages.seq_lens
    q = torch.randn(2, 4, 1, 16)
    library = torch.ops.paged_inductor
    torch.library.opcheck(library.cache_write.default, (pages.k_arena, torch.randn(2, 2, 3, 16), table, lens))
    torch.library.opcheck(library.gather.default, (pages.k_arena, table, lens, 20))
    arguments = (q, pages.k_arena, pages.v_arena, table, lens, 20, 0.25)
    torch.library.opcheck(library.attention.default, arguments)
    masked = (*arguments, 19, 8, torch.ones(1, 1, 1, 20, dtype=torch.bool))
    torch.library.opcheck(library.attention.default, masked)
    torch.library.opcheck(library.attention.default, (*masked, 5.0, torch.randn(4)))
    every = (*masked, 5.0, torch.randn(4), 16, torch.randn(4), None, None, 0, torch.zeros(2, dtype=torch.int32), 16)
    torch.library.opcheck(library.attention.default, every)
    chunks = pages.plan(1).chunks
    assert chunks is not None
    decode = (q.view(2, 2, 2, 16), pages.k_arena, pages.v_arena, chunks.table, chunks.row, chunks.bias)
    decode = (*decode, chunks.of_row, chunks.count, None, None, 0.25)
    torch.library.opcheck(library.decode.default, decode)
    torch.library.opcheck(library.decode.default, (*decode, 5.0, torch.randn(4)))


def test_operands_in_any_order_of_dimensions() -> None:
    """A compiler may hand the operator tensors laid out differently from those it was compiled for."""
    pages = random_pages([300, 20, 140], 2, 8, 8)
    q = torch.randn(3, 2, 4, 8)
    chunks = pages.plan(1).chunks
    assert chunks is not None
    operands = [q, chunks.table, chunks.row, chunks.bias, chunks.of_row, chunks.count]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    def call(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return torch.ops.paged_inductor.decode(q, pages.k_arena, pages.v_arena, *rest, None, None, 0.3)

    assert torch.equal(call(*operands), call(*map(turned, operands)))


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("queries", [1, 2])
def test_fully_masked_rows_give_zeros(queries: int, extra: str) -> None:
    pages = random_pages([20, 7], 2, 8, 8)
    q = torch.randn(2, 4, queries, 8)
    plan = pages.plan(queries)
    nothing = torch.zeros(2, 1, 1, 20, dtype=torch.bool)
    masked = ops.plan_mask(nothing, plan)
    options = extras(extra, 4, torch.float32)
    out = ops.attention(q, pages.k_arena, pages.v_arena, plan, masked, scale=1.0, **options)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("lengths", [[20, 20], [20, 7]], ids=["even", "ragged"])
def test_rows_masked_by_the_lowest_number_attend_to_every_key(lengths: list[int]) -> None:
    """finfo.min is finite: a dense softmax over nothing else is uniform, also over virtual padding."""
    pages = random_pages(lengths, 2, 8, 8)
    q = torch.randn(2, 4, 1, 8)
    plan = pages.plan(1)
    lowest = torch.full((2, 1, 1, 20), torch.finfo(torch.float32).min)
    out = ops.attention(q, pages.k_arena, pages.v_arena, plan, ops.plan_mask(lowest, plan), scale=1.0)
    value = ops.gather(pages.v_arena, plan).repeat_interleave(2, 1)
    torch.testing.assert_close(out, value.mean(2, keepdim=True), rtol=1e-5, atol=1e-5)


def test_cost_follows_live_tokens_not_the_longest_row() -> None:
    """One long row among short ones: the work list holds their chunks, not a rectangle."""
    pages = random_pages([1000, *[16] * 15], 1, 8, 8)
    chunks = pages.plan(1).chunks
    assert chunks is not None
    assert chunks.table.shape[0] == 8 + 15


@pytest.mark.parametrize("hidden", [0, 20])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_one_query_counts_the_unwritten_positions_of_a_buffer_that_slid(kind: str, hidden: int) -> None:
    pages = random_pages([60, 60], 2, 16, 16, hidden=hidden)
    plan = ops.plan_static(pages.plan(), 70 - hidden)  # ten positions were not written
    q = torch.randn(2, 4, 1, 16, generator=torch.Generator().manual_seed(3))
    mask = torch.arange(plan.kv_len).expand(1, -1) < plan.kv_len - 3
    if kind == "float":
        mask = torch.where(mask, torch.linspace(-1, 1, plan.kv_len), float("-inf"))
    arenas = (pages.k_arena, pages.v_arena)
    got = ops.attention(q, *arenas, plan, ops.plan_mask(mask, plan), scale=0.3)
    want = formulas.static_attention(q, *arenas, plan, mask[None, None], scale=0.3)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_visibility_without_tensor_masks() -> None:
    pages = random_pages([6, 3], 1, 8, 8)
    visible = formulas.visibility(pages.plan(2, decodes=False), 2, 4, 2, None)
    rows = [[[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]] * 2
    assert torch.equal(visible.int(), torch.tensor(rows)[:, None].int())
