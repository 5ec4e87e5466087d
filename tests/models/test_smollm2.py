"""A real model, SmolLM2-135M-Instruct: unmodified `generate` in six ways gives the dense model's tokens on pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

import paged_inductor
import smollm2
from paged_inductor.compare import Generation, cache_tensors
from paged_inductor.monitor import Stats

pytestmark = pytest.mark.xdist_group("smollm2")  # one process loads and compiles the model

SHORT = 12
MODES = {mode.name: replace(mode, new_tokens=min(mode.new_tokens, SHORT)) for mode in smollm2.MODES}
MODES["prompt lookup"] = replace(MODES["prompt lookup"], new_tokens=24)
# Two of its prompts, the second one long, and four beams for each.
MODES["padded beams"] = replace(
    MODES["padded batch"],
    name="padded beams",
    prompts=MODES["padded batch"].prompts[1:],
    options={"do_sample": False, "num_beams": 4},
)
if os.environ.get("HYPOTHESIS_PROFILE") != "fuzz":  # small models do all six ways in test_hf_loops: make fuzz does here
    MODES = {name: MODES[name] for name in ("greedy", "padded beams")}


@dataclass
class Pair:
    """The paged model, what it generated when it was dense, and what it generates."""

    chat: smollm2.Chat
    dense: dict[str, Generation]

    _paged: dict[str, tuple[Generation, Stats, Stats]] = field(default_factory=dict)

    def paged(self, name: str) -> tuple[Generation, Stats, Stats]:
        """What it generates in a mode, and the statistics before and after."""
        if name not in self._paged:
            before = paged_inductor.stats()
            self._paged[name] = self.chat.run(MODES[name])[0], before, paged_inductor.stats()
        return self._paged[name]


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
    generation, before, after = pair.paged(name)
    assert generation.tokens == pair.dense[name].tokens
    tensors = cache_tensors(generation.cache)
    assert len(tensors) == 60
    assert all(isinstance(tensor, paged_inductor.PagedTensor) for tensor in tensors)
    assert after.steps > before.steps
    assert after.dense_fallbacks == before.dense_fallbacks
    assert after.materializations == before.materializations
    assert generation.kv_bytes <= after.bytes_used


def test_keys_and_values_equal_the_dense_models(pair: Pair) -> None:
    generation, _, _ = pair.paged("padded beams")
    for ours, theirs in zip(cache_tensors(generation.cache), cache_tensors(pair.dense["padded beams"].cache)):
        torch.testing.assert_close(ours.dense(), theirs, rtol=1e-4, atol=1e-4)


def test_beams_share_the_prompts_pages(pair: Pair) -> None:
    generation, _, _ = pair.paged("padded beams")
    assert max(books.shared_blocks for books in generation.watch.books) >= 7  # of the prompt of over 112 tokens
    assert generation.kv_bytes < pair.dense["padded beams"].kv_bytes / 2


def test_every_layer_is_paged_in_every_graph(pair: Pair) -> None:
    pair.paged("greedy")
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
