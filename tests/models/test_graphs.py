"""Graphs with something unusual in them: in-place operations, odd sizes, unusual readers. Values as without paging."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import paged_inductor
from paged_inductor import PagedTensor, reports

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def append(past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (k, v) if past is None else (torch.cat([past[0], k], 2), torch.cat([past[1], v], 2))


def _inplace(change: Callable[[Tensor], object]) -> Step:
    """An in-place operation whose result nobody uses: it must not be taken for dead."""

    def step(x: Tensor, past: Any) -> tuple[Tensor, Any]:
        k, v = append(past, x * 0.5, x * 2)
        y = attend(x, k, v)
        change(y)
        return y, (k, v)

    return step


def cache_changed_in_place(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = append(past, x * 0.5, x * 2)
    k.mul_(1.5)
    return attend(x, k, v), (k, v)


def past_changed_in_place(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    if past is not None:
        past[0][:, :, :1] += 1
    k, v = append(past, x * 0.5, x * 2)
    return attend(x, k, v), (k, v)


def mask_changed_between_layers(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = append(past, x * 0.5, x * 2)
    mask = torch.zeros(x.shape[2], k.shape[2])
    y = F.scaled_dot_product_attention(x, k, v, mask)
    mask[:, :2] = 3.0
    return F.scaled_dot_product_attention(y, k, v, mask), (k, v)


def halved_prompt(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    half = x[:, :, : x.shape[2] // 2 + 1]
    k, v = append(past, half * 0.5, half * 2)
    return attend(x, k, v), (k, v)


def read_whole(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = append(past, x * 0.5, x * 2)
    return attend(x, k, v) + k.mean(2, keepdim=True), (k, v)


def rotated_after_the_cat(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = append(past, x * 0.5, x * 2)
    angle = torch.arange(k.shape[2])[:, None] * 0.1
    return attend(x, k * angle.cos(), v), (k, v)


def top_left_causal(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = append(past, x * 0.5, x * 2)
    return F.scaled_dot_product_attention(x, k, v, is_causal=True), (k, v)


def reversed_cat(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = x * 0.5, x * 2
    if past is not None:
        k, v = torch.cat([k, past[0]], 2), torch.cat([v, past[1]], 2)
    return attend(x, k, v), (k, v)


def three_parts(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = x * 0.5, x * 2
    if past is not None:
        k, v = torch.cat([past[0], k, k * 2], 2), torch.cat([past[1], v, v * 2], 2)
    return attend(x, k, v), (k, v)


def one_head_broadcast(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = append(past, x[:, :1] * 0.5, x[:, :1] * 2)
    return attend(x, k, v), (k, v)


def promoted(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """A float32 step on a bfloat16 cache: the cache becomes float32, as torch.cat promotes."""
    k, v = x * 0.5, x * 2
    if past is None:
        return attend(x, k, v), (k.bfloat16(), v.bfloat16())
    k, v = append(past, k, v)
    return attend(x, k.float(), v.float()), (k, v)


def reinterpreted(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """The cache's bits read as another dtype: nothing that moves heads."""
    k, v = append(past, (x * 0.5).bfloat16(), (x * 2).bfloat16())
    return attend(x.half(), k.view(torch.float16), v.view(torch.float16)).float(), (k, v)


def different_heads(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = append(past, x[:, :1] * 0.5, x * 2)
    return attend(x, k, v), (k, v)


def swapped_by_name(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    k, v = (x * 0.5).transpose(1, 2), (x * 2).transpose(1, 2)
    if past is not None:
        k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
    y = attend(x, torch.swapaxes(k, axis0=1, axis1=2), torch.swapaxes(v, axis0=1, axis1=2))
    return y, (k, v)


def only_read(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    if past is None:
        k, v = x * 0.5, x * 2
        return attend(x, k, v), (k, v)
    return x + past[0].mean() + past[1].flip(2)[:, :, :1], past


def _setitem(y: Tensor) -> None:
    y[:, 0] = 9.0


STEPS: dict[str, Step] = {
    "mul_": _inplace(lambda y: y.mul_(3.0)),
    "index_add_": _inplace(lambda y: y.index_add_(2, torch.zeros(1, dtype=torch.int64), y[:, :, :1].clone())),
    "masked_fill_": _inplace(lambda y: y.masked_fill_(y > 0, 7.0)),
    "setitem": _inplace(_setitem),
    "view_mul_": _inplace(lambda y: y[..., :4].mul_(5.0)),
    **{
        step.__name__: step
        for step in (
            cache_changed_in_place,
            past_changed_in_place,
            mask_changed_between_layers,
            halved_prompt,
            read_whole,
            rotated_after_the_cat,
            top_left_causal,
            reversed_cat,
            three_parts,
            one_head_broadcast,
            promoted,
            reinterpreted,
            different_heads,
            swapped_by_name,
            only_read,
        )
    },
}


@pytest.mark.filterwarnings("ignore:paged_inductor")
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", STEPS)
def test_values_as_without_paging(name: str, inner: str) -> None:
    torch.manual_seed(0)
    prompts = [torch.randn(1, 2, 5, 16), torch.randn(1, 2, 7, 16)]
    tokens = [torch.randn(1, 2, 1, 16) for _ in range(3)]

    def loop(step: Step) -> list[Tensor]:
        outputs = []
        with torch.no_grad():
            for prompt in prompts:
                y, past = step(prompt.clone(), None)
                outputs.append(y)
                for token in tokens:
                    y, past = step(token.clone(), past)
                    outputs += [y, *(t.dense() if isinstance(t, PagedTensor) else t.clone() for t in past)]
        return outputs

    expected = loop(STEPS[name])
    got = loop(torch.compile(STEPS[name], backend="paged_inductor", options={"inner": inner}))
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    paged_inductor.check_integrity()


def test_one_broadcast_head_is_paged() -> None:
    with torch.no_grad():
        _, past = one_head_broadcast(torch.randn(1, 4, 5, 16), None)
        found = paged_inductor.explain(one_head_broadcast, torch.randn(1, 4, 1, 16), past)
    assert [site.paged for site in found.sites] == [True]


def test_two_caches_whose_batches_part() -> None:
    """Equal when the graph was captured, unequal later: each keeps its own rows."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b, c, d = x * 0.5, x * 2, y * 0.5, y * 2
        return attend(x, a, b).sum() + attend(y, c, d).sum(), a, b, c, d

    compiled = torch.compile(step, backend="paged_inductor", options={"inner": "eager"}, dynamic=True)
    with torch.no_grad():
        for rows in ((2, 2), (3, 3), (2, 3), (4, 2)):
            x, y = (torch.randn(n, 2, 5, 16) for n in rows)
            for ours, theirs in zip(compiled(x, y), step(x, y)):
                ours = ours.dense() if isinstance(ours, PagedTensor) else ours
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_step_on_dense_copies_is_said_once_at_the_users_line() -> None:
    def step(x: Tensor, past: Any) -> tuple[Tensor, Any]:
        k, v = append(past, x * 0.5, x * 2)
        return attend(x, k, v), (k, v)

    run = torch.compile(step, backend="paged_inductor", options={"inner": "eager"})
    before = paged_inductor.stats().dense_fallbacks
    with torch.no_grad():
        past = theirs = None
        for queries in (5, 1, 1, 1):
            x = torch.randn(1, 2, queries, 16)
            (_, past), (_, theirs) = run(x, past), step(x, theirs)
        apart = (past[0], past[1].clone())  # K and V no longer share a view
        with pytest.warns(UserWarning, match="ran on dense copies") as caught:
            outputs = [run(x, apart)[0] for _ in range(2)]
        for output in outputs:
            torch.testing.assert_close(output, step(x, theirs)[0], rtol=1e-4, atol=1e-4)
    assert [warning.filename for warning in caught] == [__file__]
    assert "def step" in linecache.getline(__file__, caught[0].lineno)
    assert paged_inductor.stats().dense_fallbacks == before + 2


def size_of_the_extended_cache(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """Whether a cache is empty, asked before and after: Dynamo adds to the old size to know the new one."""
    if past is not None and past[0].numel() == 0:
        past = None
    k, v = append(past, x * 0.5, x * 2)
    if k.numel() == 0:
        return x, (k, v)
    return attend(x, k, v), (k, v)


def test_arithmetic_on_sizes_reads_no_cache() -> None:
    paged_inductor.reset()
    step = torch.compile(
        size_of_the_extended_cache, backend="paged_inductor", options={"inner": "eager", "label": "size"}
    )
    past = None
    for length in (5, 1, 1, 1):
        _, past = step(torch.randn(2, 3, length, 8), past)
    sites = [site for report in reports.published("size") for site in report.sites]
    assert sites and all(site.paged and not site.reason for site in sites), sites


def returned_through_slices(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """x-transformers returns its cache as slices that leave nothing out, and V once more."""
    k, v = append(past, x * 0.5, x * 2)
    return attend(x, k, v), (k[..., 0:, :], v[..., 0:, :], v)


def sizes_asked_for(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """Who asks a cache for its size does not read it."""
    k, v = append(past, x * 0.5, x * 2)
    scale = 1.0 / (1 + (0 if past is None else past[0].size(2)))
    return attend(x, k, v) * scale, (k, v)


def a_scalar_through_an_ellipsis(x: Tensor, past: Any) -> tuple[Any, Any]:
    k, v = append(past, x * 0.5, x * 2)
    y = attend(x, k, v)
    return (y, y.sum()[...]), (k, v)


@pytest.mark.parametrize(
    "step",
    [returned_through_slices, sizes_asked_for, a_scalar_through_an_ellipsis],
    ids=lambda step: step.__name__,
)
def test_caches_are_paged_and_read_in_pages(step: Step) -> None:
    torch._dynamo.reset()
    label = step.__name__
    run = torch.compile(step, backend="paged_inductor", options={"inner": "eager", "label": label})
    ours = theirs = None
    with torch.no_grad():
        for queries in (5, 1, 1, 1):
            x = torch.randn(2, 2, queries, 8)
            got, ours = run(x, ours)
            expected, theirs = step(x, theirs)
            torch.testing.assert_close(got, expected)
    assert all(isinstance(tensor, PagedTensor) for tensor in ours)
    sites = [site for report in reports.published(label) for site in report.sites]
    assert [site.reason for site in sites] == [""] * len(sites)
    assert {site.attention for site in sites} == {"sdpa"}
