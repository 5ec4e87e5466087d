"""Shared prefixes of static caches: buffers share the blocks of equal tokens, and `generate` computes only the rest."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import paged_inductor
from paged_inductor.runtime import Manager
from paged_inductor.token_names import row_tokens
from tests.models.static_zoo import FORMS, StaticForm, loop
from tests.models.test_prefixes import Pair, blocks, hits, llama, tenant, tokens
from tests.models.test_window_prefixes import mistral

pytestmark = pytest.mark.filterwarnings("ignore")
CROPS = hasattr(transformers.cache_utils.StaticLayer, "crop")  # since transformers 5.18


def buffer(model: Any, length: int) -> transformers.StaticCache:
    return transformers.StaticCache(config=model.config, max_cache_len=length)


def crop(cache: transformers.StaticCache, count: int) -> None:
    """Let the last tokens be overwritten, as `StaticCache.crop` does."""
    for layer in cache.layers:
        layer.cumulative_length.sub_(count)


def test_generate_does_not_compute_what_is_cached() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    prompt = tokens(43)
    with tenant("tenant"):
        first, found = pair.generate(prompt, cache_implementation="static")
        assert found == 0
        second, found = pair.generate(prompt, cache_implementation="static")
        assert found == 42
        assert blocks(second.past_key_values)[0][:2] == blocks(first.past_key_values)[0][:2]
        assert pair.generate(torch.cat([prompt[:, :21], tokens(9, 1)], 1), cache_implementation="static")[1] == 21
        answer = first.sequences
        del first, second
        assert paged_inductor.stats().blocks_used == 0
        found = pair.generate(torch.cat([answer, tokens(9, 2)], 1), cache_implementation="static")[1]
        assert found == 48  # the next turn, after the cache was dropped
        assert pair.generate(prompt, num_beams=2, cache_implementation="static")[1] == 2 * 42
        if CROPS:
            assert pair.generate(prompt, prompt_lookup_num_tokens=3, cache_implementation="static")[1] == 42
        assert paged_inductor.stats().dense_fallbacks == 0
    paged_inductor.check_integrity()


def test_static_caches_and_those_that_grow_share() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    with tenant("tenant"):
        pair.generate(tokens(5, 9))  # each kind is observed once
        pair.generate(tokens(5, 9), cache_implementation="static")
        grown = pair.generate(tokens(43))[0].past_key_values
        fixed, found = pair.generate(tokens(43), cache_implementation="static")
        assert found == 42
        assert blocks(fixed.past_key_values)[0][:2] == blocks(grown)[0][:2]
        assert pair.generate(tokens(40, 3), cache_implementation="static")[1] == 0
        assert pair.generate(tokens(40, 3))[1] == 39


def test_generate_with_padding() -> None:
    """Its masks are made by the caller, of all positions of the buffer: each call looks at them."""
    torch.manual_seed(0)
    pair = Pair(llama())
    static = {"cache_implementation": "static"}
    with tenant("tenant"):
        batch = tokens(43).repeat(2, 1)
        mask = torch.ones_like(batch)
        mask[0, :5] = 0
        assert pair.generate(batch, attention_mask=mask, **static)[1] == 0
        answer, found = pair.generate(batch, attention_mask=mask, **static)
        assert found == 2 * 42
        longer = torch.cat([answer.sequences, tokens(7, 2).repeat(2, 1)], 1)
        along = torch.cat([mask, torch.ones(2, 13, dtype=mask.dtype)], 1)
        assert pair.generate(longer, attention_mask=along, **static)[1] == 2 * 48
        mask[0, 5] = 0
        assert pair.generate(batch, attention_mask=mask, **static)[1] == 2 * 5  # the hidden tokens that it had before
        assert paged_inductor.stats().dense_fallbacks == 0


def test_a_loop_with_a_buffer_of_its_own() -> None:
    """No positions are passed: the model counts them by the cache's tensor."""
    torch.manual_seed(0)
    pair = Pair(llama())
    caches = []
    with tenant("tenant"), torch.no_grad():
        for count in (40, 40, 33, 50):
            prompt = tokens(60)[:, :count]
            got, expected = [], []
            for model, into in ((pair.paged, got), (pair.dense, expected)):
                past = buffer(model, 64)
                into.append(model(prompt, past_key_values=past, logits_to_keep=1).logits)
                into += [model(tokens(1, n), past_key_values=past).logits for n in range(3)]
                into.append(model(tokens(5, 5), past_key_values=past).logits)
                caches.append(past)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            assert int(caches[-2].get_seq_length()) == count + 8
        assert hits() == 39 + 32 + 40
    mine = [blocks(past)[0] for past in caches[::2]]
    assert mine[0][:2] == mine[1][:2] == mine[2][:2] == mine[3][:2]
    assert mine[0][2] == mine[1][2]  # of equal tokens, too
    assert len({block[2] for block in mine}) == 3
    paged_inductor.check_integrity()


def test_what_a_buffer_overwrites_others_keep() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    prompt = tokens(40)
    with tenant("tenant"), torch.no_grad():
        mine, yours = (buffer(pair.paged, 64) for _ in range(2))
        pair.paged(prompt, past_key_values=mine, logits_to_keep=1)
        pair.paged(prompt, past_key_values=yours, logits_to_keep=1)
        assert blocks(mine)[0][:2] == blocks(yours)[0][:2]
        before = yours.layers[0].keys.dense()
        crop(mine, 30)
        pair.paged(tokens(25, 1), past_key_values=mine, logits_to_keep=1)
        mine.layers[1].values[:, :, 3] = 7.0
        torch.testing.assert_close(yours.layers[0].keys.dense(), before, rtol=0, atol=0)
        yours.reset()
        assert int(yours.layers[0].keys.dense().abs().sum()) == 0
        assert hits() == 32  # the block that is filled in part belongs to a living cache
        dense = buffer(pair.dense, 64)
        past = buffer(pair.paged, 64)
        got = pair.paged(prompt, past_key_values=past, logits_to_keep=1).logits
        assert hits() == 2 * 32
        torch.testing.assert_close(
            got, pair.dense(prompt, past_key_values=dense, logits_to_keep=1).logits, rtol=1e-4, atol=1e-4
        )
    paged_inductor.check_integrity()


SHARING = [form for form in FORMS if form.name in ("gpt-fast", "meta-llama", "litgpt", "litgpt-cropped")]


@pytest.mark.parametrize("form", SHARING, ids=lambda form: form.name)
def test_hand_written_buffers_share(form: StaticForm) -> None:
    """Once they are handles, rows of equal prompts point to the same blocks, until they part."""
    torch.manual_seed(0)
    model = form.make()
    model.start(2, 128)
    twin = copy.deepcopy(model)
    twin.start(2, 128)
    paged_inductor.page(model, inner="eager")
    same = tokens(40).repeat(2, 1)
    with tenant("none"):
        found = []
        for turn in (same, same, torch.cat([same[:, :20], torch.arange(40).view(2, 20)], 1)):
            got = loop(form.feed(model, model), [turn], 12)
            assert torch.equal(got, loop(form.feed(twin, twin), [turn], 12))
            rows = [row.blocks for row in model.caches()[0]._view.rows]
            found.append([a == b for a, b in zip(*rows)])
        assert found == [[False] * 4, [True, True, False, False], [True, False, False, False]]
    assert all(not graph.sharing for graph in paged_inductor.explain(model).graphs if graph.sites)
    paged_inductor.check_integrity()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_fails_leaves_the_cache_empty(error: type[BaseException]) -> None:
    """What was lent does not stay in the caller's cache: it may be used again."""
    torch.manual_seed(0)
    pair = Pair(llama())
    with tenant("tenant"), torch.no_grad():
        for make in (lambda: buffer(pair.paged, 64), lambda: transformers.DynamicCache(config=pair.paged.config)):
            pair.paged(tokens(40), past_key_values=make(), logits_to_keep=1)
            past = make()
            with mock.patch.object(Manager, "begin", side_effect=error), pytest.raises(error):
                pair.paged(tokens(40), past_key_values=past, logits_to_keep=1)
            assert int(past.get_seq_length()) == 0
            assert not any(layer.is_initialized for layer in past.layers)
            got = pair.paged(tokens(40), past_key_values=past, logits_to_keep=1).logits
            torch.testing.assert_close(got, pair.dense(tokens(40), logits_to_keep=1).logits, rtol=1e-4, atol=1e-4)
    paged_inductor.check_integrity()


def test_a_buffer_that_rolled_and_begins_again() -> None:
    """Its rows have left blocks behind: what is in the others are not the first tokens."""
    torch.manual_seed(0)
    pair = Pair(mistral(45))
    with tenant("tenant"), torch.no_grad():
        mine, theirs = (buffer(model, 120) for model in (pair.paged, pair.dense))
        for seed in (1, 1, 2):
            got, expected = [], []
            for model, cache, into in ((pair.paged, mine, got), (pair.dense, theirs, expected)):
                cache.reset()
                into += model.generate(tokens(40, seed), past_key_values=cache, max_new_tokens=30, do_sample=False)
            assert torch.equal(*got, *expected)
            assert mine.layers[0].keys._view.rows[0].skipped in (1, 2, 3)
        fresh = transformers.DynamicCache(config=pair.paged.config)
        pair.paged.generate(tokens(40, 1), past_key_values=fresh, max_new_tokens=2, do_sample=False)
        pair.generate(tokens(40, 1))
    paged_inductor.check_integrity()


# -- masks of truth values over the whole buffer -------------------------------------------------------------------


def shown(old: int, count: int, length: int, hidden: int = 0) -> Tensor:
    """A causal mask [1, 1, count, length], of which the first `hidden` tokens are seen by none."""
    mask = torch.ones(1, 1, count, length, dtype=torch.bool).tril(old)
    mask[..., :hidden] = False
    return mask


@pytest.mark.parametrize("count", [1, 4])
def test_masks_of_whole_buffers(count: int) -> None:
    ids = torch.arange(count)[None]
    (found,) = row_tokens(ids, [], [], shown(3, count, 9, hidden=2), 3, static=True) or ()
    assert found.ids == ids[0].tolist()
    assert found.hidden == [0, 1]
    assert not found.deviations
    (found,) = row_tokens(ids, [], [], shown(0, count, 9, hidden=1), 0, static=True) or ()
    assert (found.hidden, found.deviations) == ([0], {0: b"h"})


@pytest.mark.parametrize(
    "place", [(0, 4), (0, 8), (3, 8), (1, 0), (3, 3)], ids=["later", "last", "unwritten", "some", "one"]
)
def test_masks_that_show_other_tokens_say_nothing(place: tuple[int, int]) -> None:
    mask = shown(3, 4, 9)
    mask[0, 0][place] ^= True
    assert row_tokens(torch.arange(4)[None], [], [], mask, 3, static=True) is None


def test_masks_of_another_kind_than_before() -> None:
    """The graph of truth values was proven; one of numbers to be added was not."""
    torch.manual_seed(0)
    pair = Pair(llama())
    with tenant("tenant"), torch.no_grad():
        for kind in ("bool", "bool", "float", "bool"):
            mask = shown(0, 40, 64, hidden=3)
            if kind == "float":
                mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
            options = {"attention_mask": mask, "position_ids": torch.arange(40)[None], "logits_to_keep": 1}
            got, expected = (
                model(tokens(40), past_key_values=buffer(model, 64), **options).logits
                for model in (pair.paged, pair.dense)
            )
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert hits() == 2 * 39
    assert row_tokens(torch.arange(4)[None], [], [], shown(3, 4, 9).float(), 3, static=True) is None


# -- any calls -----------------------------------------------------------------------------------------------------


class Chat(NamedTuple):
    """A paged cache, the dense one that must be equal, and how many tokens they have."""

    paged: transformers.StaticCache
    dense: transformers.StaticCache
    length: int


_pairs: list[Pair] = []
CALLS = st.tuples(
    st.sampled_from(["begin", "begin", "go on", "go on", "crop", "reset", "drop", "copy"]),
    st.integers(0, 5),
    st.integers(1, 40),
    st.integers(0, 2),
)


def test_any_calls_give_the_dense_models_logits() -> None:
    found: list[int] = []
    any_calls(found)
    assert sum(found) > 0


@example(calls=[("begin", 0, 30, 0), ("begin", 0, 30, 0), ("drop", 0, 1, 0), ("begin", 0, 30, 0), ("go on", 1, 9, 1)])
@given(calls=st.lists(CALLS, min_size=3, max_size=14))
@settings(max_examples=max(12, settings.default.max_examples // 4))
def any_calls(found: list[int], calls: list[tuple[str, int, int, int]]) -> None:
    if not _pairs:
        torch.manual_seed(0)
        _pairs.append(Pair(llama()))
    pair = _pairs[0]
    chats: list[Chat] = []
    paged_inductor.reset()
    with tenant("tenant"), torch.no_grad():
        for what, which, count, seed in calls:
            if what == "begin":
                empty = Chat(buffer(pair.paged, 64), buffer(pair.dense, 64), 0)
                chats.append(fed(pair, empty, tokens(64, seed)[:, : 17 + count]))
            elif chats:
                at = which % len(chats)
                chat = chats.pop(at)
                if what == "go on" and chat.length + count <= 64:
                    chats.append(fed(pair, chat, tokens(count, seed)))
                elif what == "crop" and count < chat.length:
                    for cache in (chat.paged, chat.dense):
                        crop(cache, count)
                    chats.append(chat._replace(length=chat.length - count))
                elif what == "reset":
                    for cache in (chat.paged, chat.dense):
                        cache.reset()
                    chats.append(fed(pair, chat._replace(length=0), tokens(64, seed)[:, : 17 + count]))
                elif what == "copy":
                    chats += [chat, Chat(copy.deepcopy(chat.paged), copy.deepcopy(chat.dense), chat.length)]
            paged_inductor.check_integrity()
        for chat in chats:
            for mine, theirs in zip(chat.paged.layers, chat.dense.layers):
                torch.testing.assert_close(mine.keys.dense(), theirs.keys, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(mine.values.dense(), theirs.values, rtol=1e-4, atol=1e-4)
        found.append(hits())


def fed(pair: Pair, chat: Chat, ids: Tensor) -> Chat:
    """After one more call of both models, whose logits must be equal."""
    got = pair.paged(ids, past_key_values=chat.paged, logits_to_keep=1).logits
    expected = pair.dense(ids, past_key_values=chat.dense, logits_to_keep=1).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return chat._replace(length=chat.length + ids.shape[1])


@pytest.fixture(autouse=True)
def no_pairs() -> Any:
    yield
    _pairs.clear()
