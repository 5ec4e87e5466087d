"""Shared prefixes of models whose layers see a window: the dense model's tokens, and only the window is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

import paged_inductor
from paged_inductor.reuse import Reuse
from tests.models.test_prefixes import COMMON, Pair, gemma3, hits, tenant, tokens

WINDOW = 20


def mistral(window: int = WINDOW) -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MistralConfig(**COMMON, **sizes, **heads, sliding_window=window)
    return transformers.MistralForCausalLM(config)


@pytest.fixture
def whole_prompts() -> Iterator[Callable[[], int]]:
    """How many prompts were computed as a whole since the last time."""
    count = 0
    observe = Reuse._observe

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return observe(*args)

    def since() -> int:
        nonlocal count
        found, count = count, 0
        return found

    with mock.patch.object(Reuse, "_observe", counted):
        yield since


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [mistral, gemma3])
def test_generate_does_not_compute_what_is_cached(
    make: Callable[[], transformers.PreTrainedModel], whole_prompts: Callable[[], int]
) -> None:
    torch.manual_seed(0)
    pair = Pair(make())
    prompt = tokens(43)
    with tenant("tenant"):
        first, found = pair.generate(prompt)
        assert (found, whole_prompts()) == (0, 1)
        second, found = pair.generate(prompt)
        assert (found, whole_prompts()) == (42, 0)
        layer = second.past_key_values.layers[0]
        assert layer.is_sliding
        assert layer.keys.shape[-2] == layer.sliding_window - 1
        assert layer.cumulative_length == first.sequences.shape[1] - 1
        (row,) = layer.keys._view.rows
        assert row.skipped >= 1
        assert len(row.blocks) <= 3
        found = pair.generate(torch.cat([prompt[:, :21], tokens(9, 1)], 1))[1]
        assert (found, whole_prompts()) == (21, 0)
        answer = first.sequences
        del first, second, layer, row
        assert paged_inductor.stats().blocks_used == 0
        found = pair.generate(torch.cat([answer, tokens(9, 2)], 1))[1]  # the next turn, after the cache was dropped
        assert (found, whole_prompts()) == (48, 0)
        for _ in range(2):  # computed by a graph that needs no window, like its beginning
            assert pair.generate(prompt[:, :9])[1] == 8
        assert pair.generate(prompt)[1] == 42
        assert whole_prompts() == 0
        assert pair.generate(prompt, num_beams=2)[1] == 2 * 42


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [mistral, gemma3])
def test_padded_rows_share(make: Callable[[], transformers.PreTrainedModel], whole_prompts: Callable[[], int]) -> None:
    torch.manual_seed(0)
    pair = Pair(make())
    prompt = torch.cat([tokens(43), tokens(43, 1), tokens(43, 2)])
    mask = torch.ones_like(prompt)
    for row, pad in enumerate((5, 0, 30)):
        prompt[row, :pad] = 0
        mask[row, :pad] = 0
    with tenant("tenant"):
        pair.generate(prompt, 20, attention_mask=mask)
        whole_prompts()
        found = pair.generate(prompt, 20, attention_mask=mask)[1]
        assert (found, whole_prompts()) == (3 * 42, 0)


@pytest.mark.filterwarnings("ignore")
def test_a_window_learned_of_later(whole_prompts: Callable[[], int]) -> None:
    """Short prompts are computed by graphs that know nothing of the window."""
    torch.manual_seed(0)
    pair = Pair(mistral())
    prompt = tokens(60, 3)
    with tenant("tenant"):
        assert pair.generate(prompt[:, :12])[1] == 0
        found = pair.generate(prompt)[1]  # goes on with a window, which is found to be another way
        assert (found, whole_prompts()) == (0, 2)
        assert (pair.generate(prompt)[1], whole_prompts()) == (59, 0)
        assert (pair.generate(tokens(9, 4))[1], whole_prompts()) == (0, 1)
        assert (pair.generate(prompt)[1], whole_prompts()) == (59, 0)  # the short one is no reason to forget it


@pytest.mark.filterwarnings("ignore")
def test_other_windows_are_another_model() -> None:
    """Of two models that have the same weights, the same tensors, neither takes the other's blocks."""
    torch.manual_seed(0)
    narrow, wide = mistral().eval(), mistral(WINDOW + 5).eval()
    for mine, others in zip(wide.modules(), narrow.modules()):
        mine._parameters.update(others._parameters)
        mine._buffers.update(others._buffers)
    dense = [copy.deepcopy(each) for each in (narrow, wide)]
    paged = [paged_inductor.page(each, inner="eager") for each in (narrow, wide)]

    def found(prompt: Tensor) -> list[int]:
        """How many tokens each of them finds, one after the other."""
        result = []
        for model, other in zip(paged, dense):
            torch._dynamo.reset()  # else a graph of any length goes on, of which less is proven
            before = hits()
            answer, wanted = (each.generate(prompt, max_new_tokens=6, do_sample=False) for each in (model, other))
            assert torch.equal(answer, wanted)
            result.append(hits() - before)
        return result

    with tenant("tenant"):
        assert found(tokens(43, 5)) == [0, 0]
        assert found(tokens(43, 5)) == [42, 42]
        assert found(tokens(43, 6)) == [0, WINDOW]  # up to there no window hides anything


@pytest.mark.filterwarnings("ignore")
def test_a_windows_past_does_not_pile_up() -> None:
    torch.manual_seed(0)
    pair = Pair(mistral())
    with tenant("tenant"):
        got = pair.generate(tokens(10), new_tokens=300)[0]
        group = got.past_key_values.layers[0].keys._view.group
        assert group.pool.index.num_behind > 0
        assert group.pool.capacity - 1 <= 8  # of 19 blocks; the window is in 2 or 3


@pytest.mark.filterwarnings("ignore")
def test_a_window_that_is_changed_later() -> None:
    torch.manual_seed(0)
    pair = Pair(mistral())
    with tenant("tenant"):
        for window in (WINDOW, 11, WINDOW, 37):
            for model in (pair.dense, pair.paged):
                model.config.sliding_window = window
                for layer in model.model.layers:
                    layer.self_attn.sliding_window = window
            pair.generate(tokens(43), 12)


@pytest.mark.filterwarnings("ignore")
def test_models_of_other_windows_in_one_process() -> None:
    """What differs between models, Dynamo must not take for a number that varies within one."""
    for window in (WINDOW, 11, 29):
        torch.manual_seed(0)
        pair = Pair(mistral(window))
        with tenant("tenant"):
            assert [pair.generate(tokens(43))[1] for _ in range(2)] == [0, 42]
        assert not any(graph.sharing for graph in paged_inductor.explain(pair.paged).graphs)
