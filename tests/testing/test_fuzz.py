"""The fuzzer finds what is wrong, shrinks it, and leaves the model alone; what is right passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import find, given
from hypothesis import strategies as st
from torch import nn

import paged_inductor
from paged_inductor import ConfigurationError, MissingExtraError, testing
from paged_inductor.testing import Crop, Feed, Fork, FuzzFailure, Greedy, Loop, Reorder, Repeat, fuzz, replay
from paged_inductor.testing.player import CacheOperationError, _in_place

from ..models.test_windows import MODELS
from ..models.zoo import Decoder, Form
from .faulty import Faulty, greedy, step

SLOW = pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "fuzz", reason="takes minutes: make fuzz")
SMALL = {"max_batch": 2, "max_prompt": 4, "max_new_tokens": 2, "max_operations": 3}

EVERYTHING = Loop(
    prompts=((5, 6, 7), (8,)),
    operations=(
        Greedy(tokens=2),
        Repeat(times=2),
        Reorder(rows=(3, 0, 2, 2)),
        Fork(),
        Feed(tokens=(1, 2, 3)),
        Crop(tokens=2, branch=1),
        Greedy(branch=1, tokens=2),
        testing.Drop(branch=0),
        Greedy(tokens=1),
    ),
)


def decoder(kind: type[Decoder] = Decoder, form: Form | None = None) -> Decoder:
    torch.manual_seed(0)
    return kind(form or Form())


@pytest.mark.parametrize("form", [Form(), Form(layout="BSHD", gqa="expand")], ids=lambda form: form.name)
def test_right_models_pass(form: Form) -> None:
    fuzz(decoder(form=form), step=step, padded=True, max_examples=4, sequence_dim=form.layout.index("S"))


@SLOW
def test_transformers_pass() -> None:
    model = MODELS["Llama"].build("sdpa")
    fuzz(model, max_examples=2, **SMALL)
    replay(model, EVERYTHING)


@SLOW
@pytest.mark.filterwarnings("ignore:paged_inductor")
def test_a_mistake_is_found_shrunk_and_reproduced_by_the_script(tmp_path: Path) -> None:
    model = decoder(Faulty)
    with pytest.raises(FuzzFailure) as caught:
        fuzz(model, folder=str(tmp_path), max_examples=60, **SMALL)
    loop, failure = caught.value.loop, caught.value
    assert [type(operation) for operation in loop.operations] == [Reorder]
    assert len(loop.prompts) == 2 and sum(map(len, loop.prompts)) <= 4
    assert Path(failure.script).read_text() in str(failure)
    run = subprocess.run([sys.executable, failure.script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert "FuzzFailure" in run.stderr and failure.reason in run.stderr
    with pytest.raises(FuzzFailure, match="a last step of continuation 1: logits differ"):
        replay(model, loop)


@SLOW
def test_a_broken_operation_of_the_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_inductor.tensor import derive

    crop = derive.crop
    monkeypatch.setattr(derive, "crop", lambda view, site, length: crop(view, site, max(0, length - (site == 2))))
    with pytest.raises(FuzzFailure) as caught:
        fuzz(decoder(), shrink_seconds=3, **SMALL)
    assert any(isinstance(operation, Crop) for operation in caught.value.loop.operations)


def test_generate_of_the_users_own() -> None:
    fuzz(decoder(), generate=greedy, max_examples=2)
    model = MODELS["Llama"].build("sdpa")

    def beams(model: nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model.generate(tokens, attention_mask=mask, num_beams=2, max_new_tokens=4, pad_token_id=0)

    fuzz(model, generate=beams, max_examples=2)

    def wrong(model: nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return tokens + int("forward" in model.__dict__)

    with pytest.raises(FuzzFailure, match=r"tokens \[\[1\]\] where dense gives \[\[0\]\]") as caught:
        fuzz(decoder(), generate=wrong)
    assert "generate = ...  # the function" in str(caught.value)


def test_the_model_is_left_as_it_was() -> None:
    model = paged_inductor.page(decoder(), inner="eager", label="mine").train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fuzz(model, max_examples=2)
    assert model.training and model.forward.options == {"inner": "eager", "label": "mine"}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert paged_inductor.stats().blocks_used == 0


def test_equal_seeds_draw_equal_loops() -> None:
    drawn: dict[int, list[list[list[int]]]] = {}
    for run, seed in enumerate((7, 7, 8)):
        seen = drawn.setdefault(run, [])

        def record(model: nn.Module, tokens: torch.Tensor, mask: torch.Tensor, seen: list = seen) -> torch.Tensor:
            seen.append(tokens.tolist())
            return tokens

        fuzz(decoder(), generate=record, seed=seed)
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_the_dense_model_raises_is_passed_on() -> None:
    with pytest.raises(Exception, match="index out of range"):
        fuzz(decoder(), vocab_size=1000)


def test_vocabulary_must_be_known() -> None:
    with pytest.raises(ConfigurationError, match=r"vocabulary of Linear.*vocab_size="):
        fuzz(nn.Linear(2, 2))


def test_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    for call in (lambda: fuzz(decoder()), lambda: testing.prompts(10)):
        with pytest.raises(MissingExtraError, match=r"pip install 'paged-inductor\[testing\]'"):
            call()
    replay(decoder(), Loop(((1, 2),)))


@given(st.data())
def test_strategies_draw_what_they_say(data: st.DataObject) -> None:
    loop = data.draw(testing.loops(11, max_batch=2, max_length=5, padded=False, max_operations=3))
    assert 1 <= len(loop.prompts) <= 2 and len({len(prompt) for prompt in loop.prompts}) == 1
    assert all(0 <= token < 11 for prompt in loop.prompts for token in prompt) and 1 <= len(loop.operations) <= 3


def test_smallest_examples() -> None:
    assert find(testing.prompts(5), lambda _: True) == (0,)
    assert find(testing.batches(5), lambda batch: len(batch) == 2) == ((0,), (0,))


def test_a_cache_that_refuses_an_operation_is_passed_over() -> None:
    """As a window of transformers that is full, which cannot be cropped."""

    class Full:
        def crop(self, length: int) -> None:
            raise RuntimeError("the window is full")

    with pytest.raises(CacheOperationError, match=r"Full\.crop\(3\): the window is full"):
        _in_place(Full(), "crop", 3)
