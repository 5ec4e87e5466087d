"""Drawn loops that are replayed from recordings: crops, forks, reordered and padded rows, several tokens a step."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from paged_inductor import stats
from paged_inductor.testing import fuzz

from .replaying import MODE
from .small_transformers import small
from .zoo import Decoder, Form

pytestmark = pytest.mark.usefixtures("kernels_serve")

EXAMPLES = 300 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 6


def decoder(form: Form) -> Decoder:
    torch.manual_seed(7)
    return Decoder(form, layers=2)


MODELS: dict[str, Any] = {
    "no mask": lambda: decoder(Form(heads_q=2, heads_kv=1, mask="none_or_is_causal")),
    "bool mask": lambda: decoder(Form(heads_q=2, heads_kv=1, mask="bool")),
    "float mask": lambda: decoder(Form(layout="BSHD", heads_q=4, heads_kv=2, gqa="expand", mask="float")),
    "llama": lambda: small("llama"),
    "llama, windows in its cache only": lambda: small("llama", sliding_window=12),
}


@pytest.mark.parametrize("name", MODELS)
def test_drawn_loops(name: str) -> None:
    sequence_dim = 1 if name == "float mask" else 2
    fuzz(MODELS[name](), options=MODE, max_examples=EXAMPLES, max_operations=5, sequence_dim=sequence_dim)
    assert stats().graph_recordings > 0
