"""What is refused, and how: errors of the package's own that say the value got, what is allowed, and what to do."""

from __future__ import annotations

import pytest
import torch

import paged_inductor
from paged_inductor import ConfigurationError, KVBudgetExceeded, PagedInductorError, PagedTensor, PatchError

from .zoo import Decoder, Form, generate


def paged_model(**options: object) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(Form())
    paged_inductor.page(model, inner="eager", **options)
    return model


def test_page_refuses_what_is_no_module() -> None:
    with pytest.raises(PatchError, match=r"nn\.Module.*got function.*torch\.compile"):
        paged_inductor.page(lambda x: x)  # type: ignore[arg-type]


def test_page_twice_and_unpage_twice() -> None:
    model = paged_model()
    with pytest.raises(PatchError, match="paged already.*unpage"):
        paged_inductor.page(model)
    assert paged_inductor.unpage(model) is model
    with pytest.raises(PatchError, match="not paged"):
        paged_inductor.unpage(model)


def test_page_refuses_a_replaced_forward() -> None:
    model = Decoder(Form())
    model.forward = lambda *args: None  # type: ignore[method-assign]
    with pytest.raises(PatchError, match="was replaced"):
        paged_inductor.page(model)


@pytest.mark.parametrize("call", ["page", "compile"])
def test_unknown_options_list_the_valid_ones(call: str) -> None:
    model = Decoder(Form())
    if call == "page":
        with pytest.raises(ConfigurationError, match="'iner'.*inner, mode, inductor, label"):
            paged_inductor.page(model, iner="eager")
        with pytest.raises(ConfigurationError, match="'nvcc'.*'inductor', 'aot_eager', 'eager'"):
            paged_inductor.page(model, inner="nvcc")
    else:
        step = torch.compile(model, backend="paged_inductor", options={"iner": "eager"})
        with pytest.raises(Exception, match="'iner'.*inner, mode, inductor, label"), torch.no_grad():
            step(torch.zeros(1, 4, dtype=torch.int64))


def test_budget_exhausted_in_mid_generation() -> None:
    """The error names who holds what; the caches made before stay valid; after freeing, generation works again."""
    model = paged_model(label="tenant model")
    prompt = torch.randint(0, 61, (1, 40))
    with torch.no_grad():
        expected = [generate(model, prompt, 20)[0]]
        paged_inductor.reset()
        block = 2 * 2 * 2 * 8 * 4 * 16
        paged_inductor.configure(kv_budget=5 * block)
        logits, held = model(prompt)  # 3 blocks of 5
        with pytest.raises(KVBudgetExceeded, match=r"budget.*tenant model: .*configure\(kv_budget") as caught:
            generate(model, prompt, 20)
        assert caught.value.holders[0][0] == "tenant model"
        caught.value.__traceback__ = None
        del caught
        paged_inductor.check_integrity()
        again = model(prompt[:, -1:], held)[0]
        paged_inductor.configure(kv_budget="1GiB")
        fresh, past = model(prompt)
        torch.testing.assert_close(again, model(prompt[:, -1:], past)[0], rtol=1e-5, atol=1e-5)
        paged_inductor.configure(kv_budget=5 * block)
        del held, past, fresh, logits, again
        assert torch.equal(generate(model, prompt, 20)[0], expected[0])


def test_another_backend_refuses_handles() -> None:
    """Compiled by somebody else, a handle would be read as memory that it does not have."""
    model = paged_model()
    with torch.no_grad():
        _, past = model(torch.randint(0, 61, (1, 9)))
    with pytest.raises(Exception, match="another torch.compile backend") as caught:
        torch.compile(lambda x: x + 1, backend="aot_eager")(past[0][0])
    assert "PagedInductorError" in repr(caught.value) or isinstance(caught.value, PagedInductorError)


def test_integer_caches_are_left_alone() -> None:
    """A dtype that pages do not hold: computed as ever, and not turned into a handle."""

    def step(past: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        return new * 2 if past is None else torch.cat([past, new], -2)

    compiled = torch.compile(step, backend="paged_inductor", options={"inner": "eager"})
    new = torch.arange(24).view(1, 2, 3, 4)
    with torch.no_grad():
        first = compiled(None, new)
        second = compiled(first, new)
    assert not isinstance(second, PagedTensor)
    assert torch.equal(second, torch.cat([new * 2, new], -2))


def test_head_counts_that_do_not_divide_are_not_paged() -> None:
    """torch refuses such attention itself; the reason is its own."""
    q, k = torch.randn(1, 5, 1, 8), torch.randn(1, 2, 1, 8)

    def step(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    with pytest.raises(Exception, match="(?i)head|divi|size"), torch.no_grad():
        torch.compile(step, backend="paged_inductor", options={"inner": "eager"})(q, k)
