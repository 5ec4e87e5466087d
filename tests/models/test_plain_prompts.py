"""Hand-written loops that pass a whole prompt: what of it is cached is not computed if nobody can tell."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import paged_inductor
from paged_inductor.plain_reuse import PlainReuse
from paged_inductor.program import PagedProgram
from tests.models.zoo import Decoder, Form

NEW = 4
_numbers = itertools.count()


class Model(Decoder):
    """A decoder whose results the tests vary: finish(model, logits, cache, past)."""

    def __init__(self, finish: Callable[..., Any]) -> None:
        super().__init__(Form())
        self.finish = finish
        self.calls = 0
        self.totals = {"tokens": 0}
        self.facts = [SimpleNamespace(tokens=0)]

    def forward(self, tokens: Tensor, past: Any = None, scale: float = 1.0) -> Any:
        cache = past if past is None else [past[f"layer {i}"] for i in range(2)] if isinstance(past, dict) else past
        logits, cache = super().forward(tokens, cache)
        return self.finish(self, logits * scale, cache, past)


def last(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    return logits[:, -1], cache


def tokens(count: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(1, 61, (rows, count), generator=torch.Generator().manual_seed(seed))


def joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts, 1)


def loop(model: Any, ids: Tensor, keyword: bool = False, **options: Any) -> Tensor:
    """All tokens of an ordinary loop."""
    out = model(ids, **options) if keyword else model(ids, None, **options)
    for step in range(NEW):
        token = out[0].reshape(ids.shape[0], -1, 61)[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], 1)
        if step < NEW - 1:
            out = model(token, past=out[1], **options) if keyword else model(token, out[1], **options)
    return ids


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step computed."""
    attempt, counts = PagedProgram._attempt, []

    def counted(self: PagedProgram, args: Any) -> Any:
        done = attempt(self, args)
        counts.append(self._plans[0].count(args))
        return done

    monkeypatch.setattr(PagedProgram, "_attempt", counted)
    return counts


class Pair:
    """A dense model, and a paged one that must give the same tokens."""

    def __init__(self, finish: Callable[..., Any], computed: list[int]) -> None:
        torch.manual_seed(0)
        self.dense = Model(finish).eval()
        self.paged: Any = paged_inductor.page(copy.deepcopy(self.dense), inner="eager")
        self._computed = computed

    def skipped(self, *prompts: Tensor, **options: Any) -> list[int]:
        """How many tokens of each prompt were not computed; less than 0 if some were computed twice."""
        counts = []
        with torch.no_grad():
            for prompt in prompts:
                self._computed.clear()
                got = loop(self.paged, prompt, **options)
                assert torch.equal(got, loop(self.dense, prompt, **options))
                counts.append(prompt.shape[1] - (sum(self._computed) - (NEW - 1)))
        paged_inductor.check_integrity()
        return counts


@pytest.fixture(autouse=True)
def sharing() -> Any:
    with paged_inductor.tenant(f"plain {next(_numbers)}", share="tenant"):
        yield


def as_dict(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    return logits[:, -1:], {f"layer {i}": layer for i, layer in enumerate(cache)}


def as_list(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    return logits.softmax(-1)[:, -1:], [list(layer) for layer in cache], None


def if_several(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    return (logits[:, -1:] if logits.shape[1] > 1 else logits), cache


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("finish", [last, as_dict, as_list, if_several])
def test_what_is_cached_is_not_computed(finish: Callable[..., Any], keyword: bool, computed: list[int]) -> None:
    pair = Pair(finish, computed)
    system = tokens(32)
    assert pair.skipped(tokens(40), tokens(40), keyword=keyword) == [0, 39]
    assert paged_inductor.stats().dense_fallbacks == 0
    longer = [joined(system, tokens(count, count)) for count in (20, 25, 9)]
    assert pair.skipped(*longer, tokens(40), keyword=keyword) == [
        0,
        32,
        32,
        39,
    ]  # the first one makes a graph of its own
    said = loop(pair.dense, longer[1])
    assert pair.skipped(joined(said, tokens(7, 1)), keyword=keyword) == [60]  # the next turn
    assert pair.skipped(tokens(50, 9), keyword=keyword) == [0]


def test_rows_of_a_batch(computed: list[int]) -> None:
    pair = Pair(last, computed)
    batch = tokens(40, rows=2)
    assert pair.skipped(batch, batch) == [0, 39]
    changed = batch.clone()
    changed[1, 20] = 0
    assert pair.skipped(changed, batch.flip(0)) == [20, 39]  # as many as all rows have


def test_what_a_tenant_does_not_share_is_computed(computed: list[int]) -> None:
    pair = Pair(last, computed)
    with paged_inductor.tenant("plain, alone", share="none"):
        assert pair.skipped(tokens(40), tokens(40)) == [0, 0]
    assert paged_inductor.register_prefix(pair.paged, tokens(40)[0, :33]) == 32
    with paged_inductor.tenant("plain, registered", share="system"):
        assert pair.skipped(tokens(33), tokens(33)) == [0, 32]


def test_other_arguments_must_be_the_same(computed: list[int]) -> None:
    pair = Pair(last, computed)
    prompt = tokens(40)
    assert pair.skipped(prompt, prompt, scale=1.0) == [0, 39]
    assert pair.skipped(prompt, prompt, scale=-1.0)[0] == 0
    assert pair.skipped(prompt, scale=1.0) == [39]


def test_weights_may_change(computed: list[int]) -> None:
    pair = Pair(last, computed)
    prompt = tokens(40)
    assert pair.skipped(prompt, prompt) == [0, 39]
    for model in (pair.dense, pair.paged):
        model.head.weight.mul_(-1)  # no key and no value depends on it
    assert pair.skipped(prompt) == [39]
    for model in (pair.dense, pair.paged):
        model.head.weight = nn.Parameter(model.head.weight.flip(0), requires_grad=False)
        model.layers[0].k.weight.mul_(1.5)
    assert pair.skipped(prompt, prompt) == [0, 39]
    for model in (pair.dense, pair.paged):
        model.layers[1].k.weight = nn.Parameter(model.layers[1].k.weight * 1.5, requires_grad=False)
    assert pair.skipped(prompt, prompt) == [0, 39]


def everything(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    return logits, cache


def the_one_before(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    return (logits[:, -2] if logits.shape[1] > 1 else logits[:, -1]), cache


def averaged(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    return logits[:, -1] + logits.mean(1), cache


def length(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    return logits[:, -1], cache, logits.shape[1]


def counting(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    model.calls += logits.shape[1]
    return logits[:, -1], cache


def counting_in_a_dict(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    model.totals["tokens"] += logits.shape[1]
    return logits[:, -1], cache


def counting_in_an_object(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    model.facts[0].tokens += logits.shape[1]
    return logits[:, -1], cache


def all_of_short_ones(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    return (logits if logits.shape[1] > 64 else logits[:, -1:]), cache


def tempered(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    """Prompts and steps are not computed in the same way."""
    return (logits[:, -1] if past is None else torch.tanh(logits[:, -1])), cache


def one_by_one(model: Model, logits: Tensor, cache: Any, past: Any) -> Any:
    if past is not None and logits.shape[1] > 1:
        raise ValueError("one token at a time")
    return logits[:, -1], cache


@pytest.mark.parametrize(
    "finish",
    [everything, the_one_before, averaged, length, counting, counting_in_a_dict, counting_in_an_object, tempered],
)
def test_what_more_than_the_last_position_decides_is_computed(finish: Callable[..., Any], computed: list[int]) -> None:
    pair = Pair(finish, computed)
    prompts = [tokens(40), tokens(40), joined(tokens(32), tokens(20, 1)), joined(tokens(32), tokens(25, 2))]
    assert pair.skipped(*prompts) == [0] * 4
    assert pair.paged.calls == pair.dense.calls


def test_a_model_that_nothing_is_learned_of_is_not_observed_for_ever(computed: list[int]) -> None:
    pair = Pair(everything, computed)
    assert pair.skipped(*[tokens(20, seed) for seed in range(9)]) == [0] * 9
    with torch.no_grad(), mock.patch.object(PlainReuse, "_observe", side_effect=AssertionError):
        pair.paged(tokens(20))


def test_a_prompt_that_another_graph_is_for_is_computed(computed: list[int]) -> None:
    """All logits of a prompt of more than 64 tokens are wanted, of which a part alone looks like a shorter one."""
    pair = Pair(all_of_short_ones, computed)
    short = [tokens(40), joined(tokens(32), tokens(20, 1)), joined(tokens(32), tokens(25, 2))]
    assert pair.skipped(*short) == [0, 0, 32]
    long = joined(tokens(52), tokens(30, 3))
    assert pair.skipped(long, long) == [0, 0]
    with torch.no_grad():
        assert pair.paged(long)[0].shape == (1, 82, 61)


def test_a_model_that_takes_no_tokens_behind_a_cache_is_left_alone(computed: list[int]) -> None:
    pair = Pair(one_by_one, computed)
    prompts = [joined(tokens(32), tokens(20, seed)) for seed in range(8)]
    assert pair.skipped(prompts[0], prompts[0]) == [0, 51]
    assert pair.skipped(*prompts[1:]) == [0] * 7
    with torch.no_grad(), pytest.raises(ValueError, match="one token at a time"):
        pair.paged(tokens(4), pair.paged(tokens(9))[1])


def test_hooks_see_every_position(computed: list[int]) -> None:
    pair = Pair(last, computed)
    seen: list[int] = []
    pair.paged.head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    assert pair.skipped(tokens(40), tokens(40)) == [0, 0]
    assert max(seen) == 40
