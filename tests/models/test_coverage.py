"""Tiny random models of transformers: unmodified `generate` gives the dense model's tokens, from pages.

A fast part of `python -m benchmarks.coverage`, whose cases these are; docs/coverage.md has the rest.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.coverage.architectures import ARCHITECTURES, Architecture
from benchmarks.coverage.case import examine
from benchmarks.coverage.hf import Generation

# K and V tensors in pages at the end, where not all are: layers with a window stay dense.
PAGED = {"Mistral": 0, "Gemma 2": 2, "Gemma 3": 2, "gpt-oss": 2}
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def check(architecture: Architecture, mode: str, new_tokens: int) -> None:
    outcome = examine(Generation(architecture), mode, new_tokens)
    assert outcome.fault == ""
    assert outcome.varied >= 4, "equal tokens prove nothing if one is repeated"
    assert outcome.caches[0] >= PAGED.get(architecture.name, outcome.caches[1]), outcome.reasons
    assert outcome.dense_fallbacks == 0


@pytest.mark.filterwarnings("ignore")
# Half of them: `make coverage` runs all, in all modes.
@pytest.mark.parametrize("architecture", ARCHITECTURES[::2], ids=lambda architecture: architecture.name)
def test_greedy_tokens_equal_the_dense_models(architecture: Architecture) -> None:
    check(architecture, "greedy", 16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("Llama", "padded"),
        ("Llama", "beams"),
        ("Llama", "second turn"),
        ("DeepSeek-V3", "padded"),
        ("DeepSeek-V3", "beams"),
    ],
)
def test_other_modes(name: str, mode: str) -> None:
    check(BY_NAME[name], mode, 16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_the_oldest_cached_values_move_the_logits(architecture: Architecture) -> None:
    """The models above would notice a lost or stale cache."""
    subject = Generation(architecture)
    with torch.no_grad():
        assert subject.sensitivity(subject.build()) > 1e-2
