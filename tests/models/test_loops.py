"""Hand-written models and loops: same tokens, really paged, and three graphs at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_inductor
from paged_inductor import PagedTensor
from paged_inductor.passes import SiteReport

from .zoo import Decoder, Form, decode, generate

FORMS = [
    Form(),
    Form(layout="BSHD"),
    Form(gqa="expand"),
    Form(gqa="repeat_interleave", heads_q=6),
    Form(layout="BSHD", gqa="expand", mask="float"),
    Form(gqa="tile", heads_q=6, mask="float"),
    Form(layout="BSHD", gqa="repeat"),
    Form(heads_q=4, heads_kv=4, mask="none_or_is_causal"),
    Form(heads_q=4, heads_kv=1, mask="is_causal_or_bool"),
    Form(store="list"),
    Form(store="attribute", layout="BSHD"),
]


def graphs(model: Decoder) -> tuple[int, tuple[SiteReport, ...]]:
    found = paged_inductor.explain(model)
    return len(found.graphs), found.sites


def flat(past: object) -> list[torch.Tensor]:
    return [tensor for pair in past for tensor in pair]  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_same_tokens_in_three_graphs(form: Form) -> None:
    torch.manual_seed(3)
    model = Decoder(form)
    prompt = torch.randint(0, 61, (2, 7))
    expected, dense = generate(model, prompt, 40)
    model.clear()
    paged_inductor.page(model, inner="eager")
    tokens, past = generate(model, prompt, 40)
    assert torch.equal(tokens, expected)
    assert all(isinstance(tensor, PagedTensor) for tensor in flat(past))
    for ours, theirs in zip(flat(past), flat(dense)):
        torch.testing.assert_close(ours.dense(), theirs, rtol=1e-4, atol=1e-4)
    count, sites = graphs(model)
    assert count <= 3
    assert all(site.paged and not site.reason for site in sites), sites
    assert len(sites) == 2 * count
    model.clear()
    del past, ours
    stats = paged_inductor.stats()
    assert stats.dense_fallbacks == 0 and stats.blocks_used == 0
    paged_inductor.check_integrity()


def test_disturbing_the_oldest_token_moves_the_logits() -> None:
    """The models above would notice a lost or stale cache."""
    torch.manual_seed(3)
    model = Decoder(Form())
    prompt = torch.randint(0, 61, (1, 40))
    logits, past = model(prompt)
    before, _ = model(prompt[:, -1:], past)
    past[0][1][:, :, 0] += 1.0
    after, _ = model(prompt[:, -1:], past)
    assert not torch.allclose(before, after, atol=1e-3)


@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("gqa", ["enable_gqa", "expand"])
def test_chunked_prefill(mask: str, gqa: str) -> None:
    torch.manual_seed(4)
    model = Decoder(Form(mask=mask, gqa=gqa))
    prompt = torch.randint(0, 61, (2, 50))
    expected, _ = generate(model, prompt, 12)
    paged_inductor.page(model, inner="eager")
    tokens, past = generate(model, prompt, 12, chunks=(9, 17, 17))
    assert torch.equal(tokens, expected)
    assert all(isinstance(tensor, PagedTensor) for tensor in flat(past))


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("gqa", ["enable_gqa", "expand", "repeat_interleave"])
def test_graph_breaks_inside_layers_keep_the_cache_paged(layout: str, gqa: str) -> None:
    """The graphs hold a cat or an attention alone: eager meanings and graphs must agree."""
    torch.manual_seed(5)
    model = Decoder(Form(layout=layout, gqa=gqa, breaks=True))
    prompt = torch.randint(0, 61, (2, 11))
    expected, _ = generate(model, prompt, 20)
    paged_inductor.page(model, inner="eager")
    tokens, _ = generate(model, prompt, 20)
    assert torch.equal(tokens, expected)
    paged_inductor.check_integrity()


def test_paged_cache_in_an_eager_model() -> None:
    """unpage() leaves caches valid: the loop goes on eagerly on the same pages."""
    torch.manual_seed(6)
    model = Decoder(Form(gqa="expand"))
    prompt = torch.randint(0, 61, (2, 11))
    expected, _ = generate(model, prompt, 20)
    paged_inductor.page(model, inner="eager")
    with torch.no_grad():
        logits, past = model(prompt)
    paged_inductor.unpage(model)
    tokens, past = decode(model, prompt, logits, past, 20)
    assert torch.equal(tokens, expected)
    assert all(isinstance(tensor, PagedTensor) for tensor in flat(past))
    assert not paged_inductor.stats().materializations


def test_dense_cache_is_taken_over() -> None:
    """A cache made before page() moves into pages at the first step."""
    torch.manual_seed(7)
    model = Decoder(Form())
    prompt = torch.randint(0, 61, (2, 11))
    expected, _ = generate(model, prompt, 20)
    with torch.no_grad():
        logits, past = model(prompt)
        paged_inductor.page(model, inner="eager")
        tokens, past = decode(model, prompt, logits, past, 20)
    assert torch.equal(tokens, expected)
    assert all(isinstance(tensor, PagedTensor) for tensor in flat(past))


def test_gradients_are_those_of_eager_and_explained() -> None:
    torch.manual_seed(8)
    model = Decoder(Form())
    model.requires_grad_(True)
    tokens = torch.randint(0, 61, (2, 9))
    model(tokens)[0].square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    paged_inductor.page(model, inner="aot_eager", label="gradients")
    logits, past = model(tokens)
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    assert not any(isinstance(tensor, PagedTensor) for tensor in flat(past))
    assert "gradients" in str(paged_inductor.explain(model))


def test_old_caches_stay_valid_in_compiled_steps() -> None:
    """Two continuations of one prefix: neither sees the other's tokens."""
    torch.manual_seed(9)
    model = Decoder(Form())
    prompt = torch.randint(0, 61, (1, 21))
    a, b = torch.randint(0, 61, (2, 1, 1))
    with torch.no_grad():
        _, dense = model(prompt)
        expected = [model(token, dense)[0] for token in (a, b, a)]
        paged_inductor.page(model, inner="eager")
        _, past = model(prompt)
        got = [model(token, past)[0] for token in (a, b, a)]
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    paged_inductor.check_integrity()


def test_exception_in_mid_step_rolls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(10)
    model = Decoder(Form())
    prompt = torch.randint(0, 61, (2, 15))
    expected, _ = generate(model, prompt, 10)
    paged_inductor.page(model, inner="eager")
    with torch.no_grad():
        logits, past = model(prompt)
        nxt = logits[:, -1].argmax(-1, keepdim=True)
        model(nxt, past)
        before = paged_inductor.stats().blocks_used
        from paged_inductor import program

        def fail(*args: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(program.ops, "execute_copies", fail)
            with pytest.raises(KeyboardInterrupt):
                model(nxt, past)
        assert paged_inductor.stats().blocks_used == before
        paged_inductor.check_integrity()
        tokens, past = decode(model, prompt, logits, past, 10)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_every_block_size(block_size: int) -> None:
    torch.manual_seed(12)
    model = Decoder(Form(), layers=1)
    prompt = torch.randint(0, 61, (2, 250))
    expected, _ = generate(model, prompt, 20)
    paged_inductor.configure(block_size=block_size)
    paged_inductor.page(model, inner="eager")
    tokens, past = generate(model, prompt, 20)
    assert torch.equal(tokens, expected)
    assert past[0][0]._view.group.block_size == block_size


@pytest.mark.parametrize("count", [1, 3])
def test_autocast_gives_what_dense_attention_returns(count: int) -> None:
    """Rounded, although queries and caches are not."""

    def attend(x: torch.Tensor, past: Any) -> tuple[torch.Tensor, Any]:
        new = (x.cos(), x.sin())
        k, v = new if past is None else (torch.cat(pair, 2) for pair in zip(past, new))
        return torch.nn.functional.scaled_dot_product_attention(x, k, v), (k, v)

    step = torch.compile(attend, backend="paged_inductor", options={"inner": "eager"})
    past, own = None, None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for i in range(4):
            x = torch.randn(1, 2, count if i else 6, 16)
            (got, past), (want, own) = step(x, past), attend(x, own)
            assert got.dtype == want.dtype == torch.bfloat16 and past[0].dtype == own[0].dtype == torch.float32
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
