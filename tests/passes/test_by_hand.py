"""Attention written by hand, as people write it: it reads pages and gives the dense values, or says why not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import paged_inductor
from paged_inductor import PagedTensor
from paged_inductor.passes import GraphReport

BATCH, HEADS, GROUP, DIM = 2, 2, 3, 16
LOWEST = torch.finfo(torch.float32).min
BIAS = torch.randn(HEADS * GROUP, 1, 64, generator=torch.Generator().manual_seed(5))
SINKS = torch.linspace(-2, 3, HEADS * GROUP)
TEMPERATURE = torch.linspace(0.2, 0.7, HEADS * GROUP)[:, None, None]

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""q [B, H * G, Q, D], k and v [B, H, S, D], visible bool [B, 1, Q, S] -> [B, H * G, Q, D]."""


def repeat(x: Tensor) -> Tensor:
    return x[:, :, None].expand(-1, -1, GROUP, -1, -1).reshape(x.shape[0], HEADS * GROUP, -1, DIM)


def merge(x: Tensor) -> Tensor:
    """[B, H, S, D] as [B * H, S, D]."""
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[3])


def additive(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, LOWEST)


def scaled_and_added(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    weights = torch.matmul(q, repeat(k).transpose(2, 3)) * 0.25 + additive(visible)
    weights = F.dropout(F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype), p=0.0, training=False)
    return torch.matmul(weights, repeat(v))


def divided_and_filled(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = (q @ repeat(k).mT / math.sqrt(DIM)).masked_fill(~visible, float("-inf"))
    return F.dropout(scores.float().softmax(-1), 0.5, False) @ repeat(v)


def replaced_by_minus_1e9(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = torch.where(visible, (q * 0.25) @ repeat(k).permute(0, 1, 3, 2), -1e9)
    return torch.softmax(scores, 3) @ repeat(v)


def capped_with_sinks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = 2.0 * torch.tanh(torch.matmul(q, repeat(k).transpose(-1, -2)) * 0.25 / 2.0) + additive(visible)
    sinks = SINKS.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    logits = torch.cat([scores, sinks], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1] @ repeat(v)


def biased_in_three_dimensions(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Batch and heads merged; the bias enters the product itself."""
    batch, heads, queries, _ = q.shape
    bias = BIAS[:, :, : k.shape[2]].repeat(batch, 1, 1)
    scores = bias.baddbmm(batch1=merge(q), batch2=merge(repeat(k)).transpose(1, 2), beta=0.5, alpha=0.25)
    scores = scores.view(batch, heads, queries, -1) + additive(visible)
    scores = torch.max(scores, torch.tensor(LOWEST)).view(batch * heads, queries, -1)
    out = torch.bmm(scores.softmax(-1), merge(repeat(v)))
    return out.view(batch, heads, queries, -1)


def bias_and_mask_scaled_in_place(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = q @ repeat(k).transpose(-1, -2)
    scores += BIAS[:, :, : k.shape[2]]
    scores *= 0.25
    scores = scores - (~visible) * 1e38 * 3.4
    return F.softmax(scores, -1) @ repeat(v)


def grouped_einsum(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    batch, _, queries, _ = q.shape
    bias = BIAS.view(HEADS, GROUP, 1, -1)[..., : k.shape[2]]
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q.view(batch, HEADS, GROUP, queries, DIM), k * 0.25) + bias
    weights = scores.masked_fill(~visible[:, :, None], LOWEST).softmax(-1)
    return torch.einsum("bhgqk,bhkd->bqhgd", weights, v).flatten(2, 3).transpose(1, 2)


def grouped_matmul(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    q = q.unflatten(1, (HEADS, GROUP))
    scores = torch.matmul(q, k.unsqueeze(2).transpose(-2, -1)).mul(0.25) + additive(visible).unsqueeze(2)
    return torch.matmul(scores.softmax(dim=-1), v[:, :, None]).flatten(1, 2)


def tempered_queries_first(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """The order [B, S, H, D], a temperature for each head, and a sink in front."""
    q, k, v = q.transpose(1, 2), repeat(k).transpose(1, 2), repeat(v).transpose(1, 2)
    scores = torch.einsum("b i h d, b j h d -> b h i j", q, k) * TEMPERATURE
    scores = torch.where(visible, scores, torch.full((), float("-inf")))
    logits = torch.cat((SINKS.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1), scores), 3)
    return torch.einsum("bhij,bjhd->bhid", logits.softmax(-1)[:, :, :, 1:], v)


def capped_with_a_bool_mask_added(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """It hides nothing: 1 is added where the mask is true."""
    scores = torch.tanh(q @ repeat(k).mT * 0.25 / 2.0) * 2.0
    return (scores + visible).softmax(-1) @ repeat(v)


PAGED: dict[str, Attend] = {
    f.__name__: f
    for f in (
        scaled_and_added,
        divided_and_filled,
        replaced_by_minus_1e9,
        capped_with_sinks,
        biased_in_three_dimensions,
        bias_and_mask_scaled_in_place,
        capped_with_a_bool_mask_added,
        grouped_einsum,
        grouped_matmul,
        tempered_queries_first,
    )
}
FORMS = {
    "capped_with_a_bool_mask_added": "by hand: softcap 2",
    "capped_with_sinks": "by hand: softcap 2, sinks",
    "tempered_queries_first": "by hand: sinks",
}


def weights_are_read_twice(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    weights = (q @ repeat(k).mT + additive(visible)).softmax(-1)
    return weights @ repeat(v) + weights.sum(-1, keepdim=True)


def bounded_after_the_mask(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return torch.tanh(q @ repeat(k).mT + additive(visible)).softmax(-1) @ repeat(v)


def hidden_by_a_small_number(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return (q @ repeat(k).mT).masked_fill(~visible, -3.0).softmax(-1) @ repeat(v)


def normalized_over_queries(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return (q @ repeat(k).mT + additive(visible)).softmax(-2) @ repeat(v)


def a_sink_that_keeps_its_weight(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = q @ repeat(k).mT + additive(visible)
    sinks = SINKS.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)
    return weights[..., 1:] @ repeat(v)


def a_sink_for_each_query(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = q @ repeat(k).mT + additive(visible)
    return torch.cat([scores, q[..., :1]], -1).softmax(-1)[..., :-1] @ repeat(v)


def a_mask_that_changes_meanwhile(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    mask = additive(visible)
    scores = q @ repeat(k).mT + mask
    mask[..., :2] = 3.0
    return scores.softmax(-1) @ repeat(v)


def unknown_function_of_scores(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return ((q @ repeat(k).mT).abs() + additive(visible)).softmax(-1) @ repeat(v)


def keys_changed_after_the_cache(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    angle = torch.arange(k.shape[2])[:, None] * 0.1
    return (q @ repeat(k * angle.cos()).mT + additive(visible)).softmax(-1) @ repeat(v)


def capped_after_a_shift(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = q @ repeat(k).mT
    scores = 3 * torch.tanh((scores - scores.amax(-1, keepdim=True)) / 3)
    return (scores + additive(visible)).softmax(-1) @ repeat(v)


def a_sink_after_a_shift(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = q @ repeat(k).mT + additive(visible)
    scores = scores - scores.amax(-1, keepdim=True)
    sinks = SINKS.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ repeat(v)


DENSE: dict[Attend, str] = {
    capped_after_a_shift: "bounds scores that are biased, bounded or shifted",
    a_sink_after_a_shift: "joins a sink with scores that are shifted",
    weights_are_read_twice: "reads the weights, too",
    bounded_after_the_mask: "bounds scores that are biased",
    hidden_by_a_small_number: "by -3.0, which does not hide them",
    normalized_over_queries: "is a softmax over another dimension",
    a_sink_that_keeps_its_weight: "changes the weights in a way that is not understood",
    a_sink_for_each_query: "is not one number a head",
    a_mask_that_changes_meanwhile: "writes to its operands in place",
    unknown_function_of_scores: "changes the scores in a way that is not understood",
    keys_changed_after_the_cache: "between cache and attention is not understood",
}


def loop(attend: Attend, compiled: bool, steps: tuple[int, ...]) -> tuple[list[Tensor], list[GraphReport]]:
    """A padded prompt, then steps of so many tokens: every output, and the reports of the steps' graphs."""
    generator = torch.Generator().manual_seed(0)
    padding = torch.ones(BATCH, 64, dtype=torch.bool)
    padding[0, :2] = False

    def step(x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        k, v = x[:, ::GROUP] * 0.5, x[:, 1::GROUP] * 2
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        seen, queries = k.shape[2], x.shape[2]
        causal = torch.arange(seen) <= torch.arange(queries)[:, None] + (seen - queries)
        return attend(x, k, v, causal & padding[:, None, None, :seen]), (k, v)

    label = f"{attend.__name__}, compiled"
    options = {"inner": "eager", "label": label}
    run = torch.compile(step, backend="paged_inductor", options=options) if compiled else step
    outputs, past = [], None
    with torch.no_grad():
        for queries in (5, *steps):
            y, past = run(torch.randn(BATCH, HEADS * GROUP, queries, DIM, generator=generator), past)
            outputs.append(y)
    assert isinstance(past[0], PagedTensor) == compiled
    return outputs, paged_inductor.reports.published(label)[1:]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, (3, 3)) for name in PAGED),
        ("capped_with_sinks", (1, 1)),
        ("biased_in_three_dimensions", (1, 1)),
        ("grouped_einsum", (1, 1)),
    ],
)
def test_it_reads_pages(name: str, steps: tuple[int, ...]) -> None:
    got, reports = loop(PAGED[name], True, steps)
    expected, _ = loop(PAGED[name], False, steps)
    for ours, theirs in zip(got, expected):  # a padded query that sees nothing is NaN in dense code
        torch.testing.assert_close(ours.nan_to_num(), theirs.nan_to_num(), rtol=1e-5, atol=1e-5)
    sites = [site for report in reports for site in report.sites]
    assert [site.reason for site in sites] == [""] * len(reports)
    assert {site.attention for site in sites} == {FORMS.get(name, "by hand")}


@pytest.mark.filterwarnings("ignore:paged_inductor")
@pytest.mark.parametrize("attend", DENSE, ids=lambda attend: attend.__name__)
def test_it_stays_dense(attend: Attend) -> None:
    got, reports = loop(attend, True, (3,))
    expected, _ = loop(attend, False, (3,))
    for ours, theirs in zip(got, expected):  # a padded query that sees nothing is NaN in dense code
        torch.testing.assert_close(ours.nan_to_num(), theirs.nan_to_num(), rtol=1e-5, atol=1e-5)
    for report in reports:
        (site,) = [site for site in report.sites if site.attention]
        assert not site.paged
        assert DENSE[attend] in site.reason
