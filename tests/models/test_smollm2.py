"""A real model, SmolLM2-135M-Instruct: unmodified `generate` in six ways gives the dense model's tokens on pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

import paged_inductor
import smollm2
from paged_inductor.compare import Generation, cache_tensors

pytestmark = pytest.mark.xdist_group("smollm2")  # one process loads and compiles the model

SHORT = 12
MODES = {mode.name: replace(mode, new_tokens=min(mode.new_tokens, SHORT)) for mode in smollm2.MODES}
MODES["prompt lookup"] = replace(MODES["prompt lookup"], new_tokens=24)
if os.environ.get("HYPOTHESIS_PROFILE") != "fuzz":  # small models do all six ways in test_hf_loops: make fuzz does here
    MODES = {name: MODES[name] for name in ("greedy", "4 beams", "padded batch")}


@dataclass
class Pair:
    """The paged model, and what it generated when it was dense."""

    chat: smollm2.Chat
    dense: dict[str, Generation]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Instead of the folder's fixture: what one test compiled serves the next ones."""
    yield
    paged_inductor.check_integrity()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    torch._dynamo.reset()
    paged_inductor.reset()
    chat = smollm2.load()
    dense = {name: chat.run(mode)[0] for name, mode in MODES.items()}
    paged_inductor.page(chat.model, inner="eager", label="smollm2")
    yield Pair(chat, dense)
    paged_inductor.unpage(chat.model)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MODES)
def test_tokens_equal_the_dense_models(pair: Pair, name: str) -> None:
    before = paged_inductor.stats()
    generation, _ = pair.chat.run(MODES[name])
    after = paged_inductor.stats()
    assert generation.tokens == pair.dense[name].tokens
    tensors = cache_tensors(generation.cache)
    assert len(tensors) == 60
    assert all(isinstance(tensor, paged_inductor.PagedTensor) for tensor in tensors)
    assert after.steps > before.steps
    assert after.dense_fallbacks == before.dense_fallbacks
    assert after.materializations == before.materializations
    assert generation.kv_bytes <= after.bytes_used


def test_keys_and_values_equal_the_dense_models(pair: Pair) -> None:
    generation, _ = pair.chat.run(MODES["padded batch"])
    for ours, theirs in zip(cache_tensors(generation.cache), cache_tensors(pair.dense["padded batch"].cache)):
        torch.testing.assert_close(ours.dense(), theirs, rtol=1e-4, atol=1e-4)


def test_beams_share_the_prompts_pages(pair: Pair) -> None:
    generation, _ = pair.chat.run(MODES["4 beams"])
    assert max(books.shared_blocks for books in generation.watch.books) >= 7  # of the prompt of over 112 tokens
    assert generation.kv_bytes < pair.dense["4 beams"].kv_bytes / 2


def test_every_layer_is_paged_in_every_graph(pair: Pair) -> None:
    pair.chat.run(MODES["greedy"])
    explanation = paged_inductor.explain(pair.chat.model)
    assert len(explanation.graphs) >= 3
    for graph in explanation.graphs:
        assert len(graph.sites) == 30
        assert all(site.paged for site in graph.sites), str(explanation)


def test_a_dropped_cache_gives_its_pages_back(pair: Pair) -> None:
    generation, _ = pair.chat.run(MODES["greedy"])
    held = paged_inductor.stats().blocks_used
    assert held >= generation.kv_bytes // (16 * 60 * 3 * 64 * 4)
    del generation
    assert paged_inductor.stats().blocks_used < held
