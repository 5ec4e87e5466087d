"""What the proof of sharing accepts, and what it refuses: each refused model would give wrong tokens if it shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paged_inductor
from paged_inductor.passes.prove_sharing import ProveSharing

VOCAB, DIM, HEADS = 31, 16, 2
COUNT = 9


class Decoder(nn.Module):
    """Two layers of attention; the parts that the tests vary are functions of (model, ...)."""

    def __init__(self, **parts: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4)) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.places = nn.Parameter(torch.randn(64, DIM))
        self.requires_grad_(False)
        self.parts = parts

    def forward(self, ids: Tensor, past: Any = None, extra: Any = None) -> tuple[Tensor, Any]:
        parts = self.parts
        seen = 0 if past is None else past[0][0].shape[2]
        x = parts.get("embed", lambda m, ids, seen: m.embed(ids))(self, ids, seen)
        count = x.shape[1]
        mask = parts.get("mask", causal)(self, seen, count, extra)
        presents = []
        for i, (q, k, v, o) in enumerate(self.layers):
            y = parts.get("mix", lambda m, x, extra: m.norm(x))(self, x, extra)
            query, key, value = (f(y).view(-1, count, HEADS, DIM // HEADS).transpose(1, 2) for f in (q, k, v))
            if past is not None:
                key, value = torch.cat([past[i][0], key], 2), torch.cat([past[i][1], value], 2)
            presents.append((key, value))
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = x + o(out.transpose(1, 2).reshape(-1, count, DIM))
        return x, presents


def causal(model: Decoder, seen: int, count: int, extra: Any) -> Tensor:
    return torch.arange(seen + count) <= torch.arange(seen, seen + count)[:, None]


def reasons(model: Decoder, ids: Tensor, extra: Any = None, steps: int = 1) -> list[str]:
    """Why each graph of a prompt and some steps does not share; "" if it does."""
    paged_inductor.page(model, inner="eager")
    with torch.no_grad():
        _, past = model(ids, None, extra)
        for _ in range(steps):
            _, past = model(ids[:, :1], past, extra)
    graphs = paged_inductor.explain(model).graphs
    assert all(site.paged for graph in graphs for site in graph.sites)
    return [graph.sharing for graph in graphs]


def prompt(rows: int = 2) -> Tensor:
    return torch.arange(rows * COUNT).view(rows, COUNT) % VOCAB


def test_one_row_is_shared() -> None:
    assert reasons(Decoder(), prompt(1), steps=2) == [""] * 3


def in_place(y: Tensor, x: Tensor) -> Tensor:
    before = y * 2
    y += x
    return y.view(-1, DIM).view(y.shape) + before


def after_a_view(y: Tensor) -> Tensor:
    flat = y.view(-1)
    y += 1
    return y + flat.view(y.shape)


def expanded_weight(m: Decoder, x: Tensor) -> Tensor:
    """The same matrix for each row of the batch."""
    weight = m.places[None, :16, :4].expand(x.shape[0], -1, -1)
    return (weight @ x[..., :4].transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"embed": lambda m, ids, seen: m.embed(ids) + m.embed(torch.arange(seen, seen + ids.shape[1]) + 3)},
        {"embed": lambda m, ids, seen: m.embed.weight[ids] * 2},
        {"mix": lambda m, x, extra: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)},
        {"mix": lambda m, x, extra: m.norm(x.reshape(-1, DIM)).view(x.shape)},
        {"mix": lambda m, x, extra: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)},
        {"mix": lambda m, x, extra: in_place(m.norm(x), x)},
        {"mix": lambda m, x, extra: x.view(*x.shape[:2], 2, -1)[:, :, [1]].flatten(2) @ m.places[:8, :16]},
        {"mix": lambda m, x, extra: F.linear(x, m.places[:16]) @ m.places[16:32].T},
        {"mix": lambda m, x, extra: expanded_weight(m, x)},
        {
            "mask": lambda m, seen, count, extra: (
                (torch.arange(seen + count) <= torch.arange(seen, seen + count)[:, None])
                & (torch.arange(seen + count) > torch.arange(seen, seen + count)[:, None] - 4)
            )
        },
    ],
    ids=["plain", "positions", "look-up", "rms", "flattened", "halves", "in place", "list", "T", "expanded", "window"],
)
def test_what_stays_in_its_place_is_shared(parts: dict[str, Any]) -> None:
    assert reasons(Decoder(**parts), prompt()) == [""] * 2


def experts(m: Decoder, x: Tensor, *, how: str = "", shift: int = 0) -> Tensor:
    """Two of four experts for each token: sorted by expert, multiplied in groups, and put back."""
    weight = m.places.view(4, DIM, DIM)
    flat = x.reshape(-1, DIM)
    chosen_weights, chosen = torch.topk(F.linear(flat, m.places[:4]).softmax(-1), 2, dim=-1)
    chosen_weights /= chosen_weights.sum(-1, keepdim=True)
    if shift:
        chosen = (chosen + shift) % 4
    ids, order = torch.sort(chosen.reshape(-1))
    counts = torch.histc(ids.float(), bins=4, min=0, max=3)
    if how == "counts of others":
        counts = torch.histc(flat[:, 0], bins=4, min=0, max=3)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    tokens = order % flat.shape[0] if how == "other tokens" else order // 2
    out = torch.ops.transformers.grouped_mm_fallback(flat[tokens], weight, offs=ends)
    out.add_(m.places[:4][ids])
    slots = chosen_weights.reshape(-1)
    out = out * (slots if how == "weights of others" else slots[order]).unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    if how != "left in order":
        out = out[order if how == "sorted twice" else back]
    if how == "other slots":
        return out.view(2, -1, DIM).sum(0).view(x.shape)
    return out.view(-1, 2, DIM).sum(1).view(x.shape)


@pytest.mark.parametrize("rows", [1, 2])
def test_experts_are_shared(rows: int) -> None:
    pytest.importorskip("transformers.integrations.moe")
    assert reasons(Decoder(mix=lambda m, x, extra: experts(m, x)), prompt(rows), steps=2) == [""] * 3


def test_which_expert_was_chosen_is_part_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors, the weights and the graphs' forms are the same."""
    pytest.importorskip("transformers.integrations.moe")
    found = []
    apply = ProveSharing.apply

    def noted(self: Any, state: Any) -> Any:
        result = apply(self, state)
        found.append(state.sharing.digest)
        return result

    monkeypatch.setattr(ProveSharing, "apply", noted)
    for shift in (0, 1, 2):
        torch._dynamo.reset()
        reasons(Decoder(mix=lambda m, x, extra, shift=shift: experts(m, x, shift=shift)), prompt(), steps=0)
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("counts of others", "out may mix positions"),
        ("other tokens", "order is no tensor that is understood"),
        ("weights of others", "a reshape mixes tokens with features"),
        ("left in order", "a reshape"),
        ("sorted twice", "is not one entry for each pair"),
        ("other slots", "laid out in another way"),
    ],
)
def test_experts_that_get_others_tokens_are_refused(how: str, reason: str) -> None:
    pytest.importorskip("transformers.integrations.moe")
    (found,) = reasons(Decoder(mix=lambda m, x, extra: experts(m, x, how=how)), prompt(), steps=0)
    assert reason in found


def padding(model: Decoder, seen: int, count: int, extra: Tensor) -> Tensor:
    return causal(model, seen, count, None) & extra[:, None, None, : seen + count].bool()


def test_a_mask_whose_columns_are_an_inputs_is_shared() -> None:
    found = []
    model = Decoder(mask=lambda m, seen, count, extra: padding(m, seen, count, extra))
    paged_inductor.page(model, inner="eager")
    with torch.no_grad():
        _, past = model(prompt(), None, torch.ones(2, COUNT, dtype=torch.int64))
        model(prompt()[:, :1], past, torch.ones(2, COUNT + 1, dtype=torch.int64))
    found = [graph.sharing for graph in paged_inductor.explain(model).graphs]
    assert found == ["", ""]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"mask": lambda m, seen, count, extra: None}, "not proven to hide later tokens"),
        (
            {"mask": lambda m, seen, count, extra: torch.arange(seen + count) <= torch.arange(count)[:, None] + 1},
            "not proven to hide later tokens",
        ),
        ({"mask": lambda m, seen, count, extra: extra[None, None]}, "not proven to hide later tokens"),
        ({"mix": lambda m, x, extra: x - x.mean(1, keepdim=True)}, "joins all positions, or all rows"),
        ({"mix": lambda m, x, extra: x - x.mean(0, keepdim=True)}, "joins all positions, or all rows"),
        ({"mix": lambda m, x, extra: x.flip(1)}, "flip at flip may mix positions"),
        ({"mix": lambda m, x, extra: x + x[:, -1:]}, "picks some of the positions"),
        (
            {"mix": lambda m, x, extra: x + m.places[1 : x.shape[1] + 1]},
            "joins tokens with a tensor of the call's length",
        ),
        ({"mix": lambda m, x, extra: x.reshape(x.shape[0], -1, 2 * DIM).view(x.shape)}, "mixes tokens"),
        ({"mix": lambda m, x, extra: F.dropout(x, 0.5, True)}, "is random"),
        ({"mix": lambda m, x, extra: x.view(x.shape).add_(1)}, "writes in place"),
        ({"mix": lambda m, x, extra: after_a_view(m.norm(x))}, "writes in place"),
        ({"embed": lambda m, ids, seen: m.embed(ids) + m.embed(torch.arange(ids.shape[1]) * 0)}, ""),
        ({"mix": lambda m, x, extra: x * extra.mean()}, "holds floating-point numbers, not token ids"),
    ],
)
def test_what_does_not_is_refused(parts: dict[str, Any], reason: str) -> None:
    ids = prompt()[:, : COUNT - 1]
    extra = torch.zeros(COUNT - 1, COUNT - 1)
    found = reasons(Decoder(**parts), ids, extra, steps=0)
    assert len(found) == 1
    assert reason in found[0]
    assert bool(found[0]) == bool(reason)


def test_inputs_as_embeddings_are_refused() -> None:
    model = Decoder(embed=lambda m, x, seen: x)
    assert reasons(model, torch.randn(2, COUNT, DIM), steps=0) == [
        "the input l_args_0_ holds floating-point numbers, not token ids"
    ]


def test_positions_that_every_call_counts_anew_are_refused() -> None:
    """A cache that is extended by several tokens: its prompt's graph would be right, but not this one."""
    model = Decoder(embed=lambda m, ids, seen: m.embed(ids) + m.places[torch.arange(ids.shape[1])])
    paged_inductor.page(model, inner="eager")
    ids = torch.arange(32)[None] % VOCAB
    with torch.no_grad(), paged_inductor.tenant("counts anew", share="tenant"):
        _, whole = model(ids)
        _, parts = model(ids[:, :16])
        _, parts = model(ids[:, 16:], parts)
        mine, yours = (past[0][0]._view.rows[0].blocks for past in (whole, parts))
        assert mine[0] == yours[0]
        assert mine[1] != yours[1]
        for _ in range(2):
            _, parts = model(ids[:, :5], parts)
    reason = "positions are counted from the call's first token on"
    assert paged_inductor.explain(model).graphs[-1].sharing == reason


class Placed(Decoder):
    """Its positions are an argument, or counted, or both, by what `place` makes of them."""

    def forward(self, ids: Tensor, past: Any = None, pos: Any = None) -> tuple[Tensor, Any]:
        self.parts["embed"] = lambda m, ids, seen: (
            m.embed(ids) + m.embed(m.parts["place"](pos, torch.arange(seen, seen + ids.shape[1])[None]))
        )
        return super().forward(ids, past)


def digests(place: Callable[..., Tensor]) -> list[bytes]:
    """How K and V of a prompt, and of a step behind it, are computed."""
    found: list[bytes] = []
    apply = ProveSharing.apply

    def recorded(self: ProveSharing, state: Any) -> int:
        count = apply(self, state)
        assert state.sharing.reason == ""
        found.append(state.sharing.digest)
        return count

    torch._dynamo.reset()
    model = paged_inductor.page(Placed(place=place), inner="eager")
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProveSharing, "apply", recorded)
        _, past = model(prompt(1), None, pos=torch.arange(COUNT)[None])
        model(prompt(1)[:, :1], past, pos=torch.tensor([[COUNT]]))
    return found


def test_positions_are_the_same_whether_they_are_passed_or_counted() -> None:
    passed = digests(lambda pos, counted: pos)
    assert len(set(passed)) == 1
    assert passed == digests(lambda pos, counted: counted)


def test_positions_from_two_places_are_told_apart() -> None:
    """They may differ, and then it counts which is which."""
    one = digests(lambda pos, counted: pos * 2 + counted)
    other = digests(lambda pos, counted: counted * 2 + pos)
    assert len(set(one)) == len(set(other)) == 1
    assert one != other


def test_the_reason_is_shown() -> None:
    model = Decoder(mix=lambda m, x, extra: x.flip(1))
    reasons(model, prompt(), steps=0)
    lines = str(paged_inductor.explain(model)).splitlines()
    assert "graph 1 does not share prefixes: flip at flip may mix positions" in lines


class Finished(Decoder):
    """Returns finish(model, x) besides its cache."""

    def forward(self, ids: Tensor, past: Any = None, extra: Any = None) -> tuple[Tensor, Any]:
        x, presents = super().forward(ids, past, extra)
        return self.parts["finish"](self, x), presents


def results(finish: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int]]:
    """What is proven of the results of a prompt, of a second part of it, and of a step."""
    found: list[tuple[bytes, int]] = []
    apply = ProveSharing.apply

    def recorded(self: ProveSharing, state: Any) -> int:
        count = apply(self, state)
        found.append((state.sharing.results, state.sharing.last))
        return count

    monkeypatch.setattr(ProveSharing, "apply", recorded)
    model = paged_inductor.page(Finished(finish=finish), inner="eager")
    with torch.no_grad():
        _, past = model(prompt())
        _, past = model(prompt()[:, :5], past)
        model(prompt()[:, :1], past)
    return found


@pytest.mark.parametrize(
    ("finish", "last"),
    [
        (lambda m, x: x[:, -1], 1),
        (lambda m, x: m.norm(x)[:, -1:].softmax(-1), 1),
        (lambda m, x: m.norm(x[:, -1:]).argmax(-1), 1),
        (lambda m, x: x[..., -1, :].mT, 1),
        (lambda m, x: x[:, -1].T[:4] if x.shape[1] > 1 else x[:, 0].T[:4], 1),
    ],
    ids=["last", "of one", "of all", "mT", "T"],
)
def test_results_of_the_last_position(finish: Any, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part, step = results(finish, monkeypatch)
    assert whole == part == step
    assert len(whole[0]) == 32 and whole[1] == last


def test_results_of_the_last_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part, step = results(lambda m, x: x[:, -3:], monkeypatch)
    assert whole == part and whole[1] == 3
    assert step != whole


@pytest.mark.parametrize(
    "finish",
    [
        lambda m, x: x,
        lambda m, x: x[:, -2:-1],
        lambda m, x: x[:, 0],
        lambda m, x: x[:, -1] + x.amax(1),
        lambda m, x: x[:, -1].flip(0),
        lambda m, x: x[:, -1].add_(1),
    ],
)
def test_results_that_are_not_proven(finish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert results(finish, monkeypatch)[0] == (b"", 0)


def test_a_length_in_results_is_no_part_of_another_length(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part, step = results(lambda m, x: x[:, -1] * x.shape[1], monkeypatch)
    assert len({whole, part, step}) == 3


def test_features_in_other_places_are_another_way_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(m: Decoder, x: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return x[:, -1].reshape(-1, 2, 8).transpose(1, 2).reshape(-1, 16)
        return x[:, -1].reshape(-1, 2, 8).reshape(-1, 16)

    whole, part, step = results(swapped, monkeypatch)
    assert whole == part != step
    assert step[0]
