"""verify=True passes on what is right, and names the layer and the step of what is not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paged_inductor
from paged_inductor import ConfigurationError, PagedTensor, VerificationError, ops

from ..models.static_zoo import FORMS as FORMS_IN_PLACE
from ..models.static_zoo import StaticForm
from ..models.static_zoo import generate as generate_in_place
from ..models.test_windows import MODELS, MODES
from ..models.zoo import Decoder, Form, decode, generate
from ..passes.test_flex import alibi, squared, windowed
from ..passes.test_flex import step as flex_step

FORMS = [Form(), Form(layout="BSHD", gqa="expand", mask="float"), Form(store="list", mask="is_causal_or_bool")]


def verified(form: Form | None = None, layers: int = 3, **options: Any) -> tuple[Decoder, Decoder]:
    """A model, dense, and a copy of it that is paged and verified."""
    torch.manual_seed(0)
    model = Decoder(form or Form(), layers=layers)
    paged = copy.deepcopy(model)
    paged_inductor.page(paged, **{"inner": "eager", "verify": True, **options})
    return model, paged


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "attention", "dtype", "mode"),
    [
        *(("Llama", "sdpa", torch.float32, mode) for mode in MODES),
        ("Llama", "sdpa", torch.bfloat16, "padded"),
        ("Llama", "eager", torch.float32, "padded"),
        ("Llama", "eager", torch.float32, "static"),
        ("Gemma 3", "sdpa", torch.float32, "beams"),
        ("Gemma 3", "sdpa", torch.float32, "static"),
    ],
)
def test_transformers_pass(name: str, attention: str, dtype: torch.dtype, mode: str) -> None:
    model = MODELS[name].build(attention).to(dtype)
    prompt = torch.randint(1, 97, (2, 7))
    options = {"max_new_tokens": 20, "do_sample": False, **MODES[mode]}
    paged = paged_inductor.page(copy.deepcopy(model), inner="eager", verify=True)
    out = paged.generate(prompt, return_dict_in_generate=True, **options)
    if dtype == torch.float32:
        assert torch.equal(out.sequences, model.generate(prompt, **options))
    for layer in out.past_key_values.layers:
        assert isinstance(layer.keys, PagedTensor) and isinstance(layer.values, PagedTensor)
        layer.keys.dense(), layer.values.dense()
    stats = paged_inductor.stats()
    assert stats.dense_fallbacks == 0 and stats.materializations.keys() <= {"dense"}
    assert all(site.paged for site in paged_inductor.explain(paged).sites)


@pytest.mark.parametrize(
    ("form", "inner"),
    [*((form, "eager") for form in FORMS), (FORMS[0], "aot_eager")],
    ids=lambda value: getattr(value, "name", value),
)
def test_hand_written_models_pass(form: Form, inner: str) -> None:
    model, paged = verified(form, inner=inner)
    prompt = torch.randint(0, 61, (2, 21))
    expected, _ = generate(model, prompt, 20, chunks=(5, 9))
    tokens, past = generate(paged, prompt, 20, chunks=(5, 9))
    assert torch.equal(tokens, expected)
    del past
    gc.collect()
    assert paged_inductor.stats().blocks_used == 0


def test_what_inductor_compiles_passes() -> None:
    model, paged = verified(Form(gqa="expand"), layers=1, inner="inductor")
    prompt = torch.randint(0, 61, (2, 7))
    assert torch.equal(generate(paged, prompt, 6)[0], generate(model, prompt, 6)[0])


def test_graph_breaks_and_unequal_rows_pass() -> None:
    """A graph that only reads, on merged rows of unequal lengths: their virtual padding is seen by neither side."""
    _, paged = verified(Form(breaks=True, mask="none_or_is_causal"))
    with torch.no_grad():
        token = torch.randint(0, 61, (1, 1))
        caches = [paged(token, paged(torch.randint(0, 61, (1, n)))[1])[1] for n in (5, 12)]  # paged by their first cat
        merged = [tuple(torch.cat([a, b]) for a, b in zip(*pair)) for pair in zip(*caches)]
        for _ in range(3):
            _, merged = paged(torch.randint(0, 61, (2, 1)), merged)
    assert merged[0][0]._view.lengths == (9, 16)


@pytest.mark.parametrize("mask", ["none_or_is_causal", "bool", "float"])
def test_unequal_rows_in_one_graph_pass(mask: str) -> None:
    _, paged = verified(Form(mask=mask, layout="BSHD"))
    with torch.no_grad():
        caches = [paged(torch.randint(0, 61, (1, n)))[1] for n in (5, 12)]
        merged = [tuple(torch.cat([a, b]) for a, b in zip(*pair)) for pair in zip(*caches)]
        for count in (1, 1, 3):
            _, merged = paged(torch.randint(0, 61, (2, count)), merged)
    assert paged_inductor.stats().dense_fallbacks == 0


def test_inference_mode_passes_in_and_out() -> None:
    model, paged = verified()
    prompt = torch.randint(0, 61, (2, 9))
    expected, _ = generate(model, prompt, 12)
    with torch.inference_mode():
        logits, past = paged(prompt)
        past = [tuple(x.clone() for x in pair) for pair in past]
    tokens, past = decode(paged, prompt, logits.clone(), past, 12)
    assert torch.equal(tokens, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [form for form in FORMS_IN_PLACE if form.layout or "func" in form.name], ids=str)
def test_static_caches_pass(form: StaticForm) -> None:
    torch.manual_seed(3)
    model = form.make()
    prompts = [torch.randint(0, 61, (2, length)) for length in (7, 5)]
    model.start(2, 64)
    expected = generate_in_place(form, model, model, prompts, 12)
    model.start(2, 64)
    step = paged_inductor.page(model, inner="eager", verify=True)
    assert torch.equal(generate_in_place(form, model, step, prompts, 12), expected)


@pytest.mark.filterwarnings("ignore")
def test_a_static_cache_is_never_believed_again() -> None:
    """Its shadow is its own from the step after its adoption on."""
    torch.manual_seed(3)
    form = next(form for form in FORMS_IN_PLACE if form.name == "litgpt")
    model = form.make()
    model.start(2, 64)
    feed = form.feed(model, paged_inductor.page(model, inner="eager", verify=True))
    tokens = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        for seen in range(6):
            feed(tokens[:, seen : seen + 1], seen)
        handle = feed.caches()[2]
        handle._view.group.arenas[handle._form.site][handle._view.rows[1].blocks[0], 0, 2] += 1.0
        with pytest.raises(VerificationError, match=r"stored keys of layers.1") as caught:
            feed(tokens[:, 6:7], 6)
    assert caught.value.index[:3] == (1, 0, 2)


@pytest.mark.parametrize("score_mod", [alibi, windowed, squared])
def test_flex_attention_passes(score_mod: Any) -> None:
    def step(x: torch.Tensor, past: Any) -> tuple[torch.Tensor, Any]:
        return flex_step(score_mod, 0, False, x, past)

    verified_step = torch.compile(step, backend="paged_inductor", options={"inner": "eager", "verify": True})
    past = dense = None
    with torch.no_grad():
        for x in torch.randn(2, 4, 14, 8).split([7, 1, 1, 1, 4], 2):
            y, past = verified_step(x, past)
            wanted, dense = step(x, dense)
            torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    assert isinstance(past[0], PagedTensor)


# -- injected faults -----------------------------------------------------------------------------------------


def nth_call(name: str, n: int, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the n-th call of an operation in each graph of 3 layers (2 writes and 1 attention each) by a fault."""
    operation = getattr(ops, name)
    calls = 3 * (2 if name == "cache_write" else 1)
    count = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return (fault if (count[0] - 1) % calls == n else operation)(*args, **kwargs)

    call.__name__ = name
    monkeypatch.setattr(ops, name, call)


def run(paged: Decoder, steps: int = 6) -> list[Any]:
    """Prefill and steps; returns all caches, and the error if one came last."""
    caches: list[Any] = []
    past = None
    with torch.no_grad():
        try:
            for tokens in torch.randint(0, 61, (2, 5 + steps)).split([5] + [1] * steps, 1):
                _, past = paged(tokens, past)
                caches.append(past)
        except VerificationError as error:
            caches.append(error)
    return caches


def checked(caches: list[Any], step: int, layer: str, what: str) -> VerificationError:
    """The error names these; the step before is intact, and nothing leaks."""
    error = caches.pop()
    assert isinstance(error, VerificationError), "nothing was noticed"
    assert (error.step, error.layer, error.what) == (step, layer, what), str(error)
    assert f"step {step} (graph" in str(error) and layer in str(error) and "verify_tolerance" in str(error)
    assert error.largest > error.allowed and len(error.index) == 4 and error.label == "Decoder"
    return error


def test_a_corrupted_page_is_noticed() -> None:
    """The page belongs to an old token: only the shadow knows what was in it."""
    _, paged = verified()
    caches = run(paged, 3)
    handle = caches[-1][1][1]
    arena = handle._view.group.arenas[handle._form.site]
    block = handle._view.rows[1].blocks[0]
    arena[block, 0, 2] += 1.0
    before = paged_inductor.stats().blocks_used
    with torch.no_grad(), pytest.raises(VerificationError) as caught:
        paged(torch.randint(0, 61, (2, 1)), caches[-1])
    error = checked([caught.value], 5, "layers.1", "stored values")
    assert error.index[:3] == (1, 0, 2) and error.largest == pytest.approx(1.0)
    assert paged_inductor.stats().blocks_used == before, "the traceback keeps no block of the step"
    paged_inductor.check_integrity()
    arena[block, 0, 2] -= 1.0
    with torch.no_grad():
        paged(torch.randint(0, 61, (2, 1)), caches[-1])


def test_a_corrupted_page_is_noticed_by_eager_reads() -> None:
    _, paged = verified()
    (*_, past) = run(paged, 1)
    handle = past[2][0]
    handle._view.group.arenas[handle._form.site][handle._view.rows[0].blocks[0]] = 0.0
    for read in (lambda: handle.mean(), lambda: handle.dense(), lambda: handle[:1].clone().sum()):
        with pytest.raises(VerificationError, match=r"step 2 \(an eager operation\).*stored keys of layers.2"):
            read()


def test_a_dropped_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = ops.attention
    nth_call("attention", 1, lambda q, k, v, plan, mask, **kw: attention(q, k, v, plan, None, **kw), monkeypatch)
    _, paged = verified()
    padding = torch.ones(2, 40, dtype=torch.bool)
    padding[0, :2] = False
    with torch.no_grad():
        past = paged(torch.randint(0, 61, (2, 5)), None, padding)[1]
        with pytest.raises(VerificationError) as caught:
            paged(torch.randint(0, 61, (2, 1)), past, padding)
    checked([caught.value], 2, "layers.1", "output")


def test_a_write_to_a_wrong_slot_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    write = ops.cache_write

    def one_early(arena: Any, new: Any, plan: Any) -> None:
        write(arena, new, plan._replace(seq_lens=plan.seq_lens - int(new.shape[2] == 1)))

    nth_call("cache_write", 4, one_early, monkeypatch)
    _, paged = verified()
    checked(run(paged), 2, "layers.2", "stored keys")


def test_a_write_that_is_skipped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    nth_call("cache_write", 3, lambda a, new, plan: None, monkeypatch)
    _, paged = verified()
    checked(run(paged), 1, "layers.1", "stored values")


def test_a_stale_block_table_is_noticed() -> None:
    """All that is read from pages agrees with itself: the rows are swapped for every reader alike."""
    _, paged = verified()
    caches = run(paged, 2)
    view = caches[-1][0][0]._view
    view.rows = view.rows[::-1]
    view.schedule = None
    with torch.no_grad(), pytest.raises(VerificationError) as caught:
        paged(torch.randint(0, 61, (2, 1)), caches[-1])
    checked([caught.value], 4, "layers.0", "stored keys")
    view.rows = view.rows[::-1]
    view.schedule = None


def test_a_wrong_fork_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reordering between two steps, wrong only on pages."""
    from paged_inductor.tensor import derive

    _, paged = verified()
    (*_, past) = run(paged, 1)
    select = derive.select
    monkeypatch.setattr(derive, "select", lambda view, site, rows, alias: select(view, site, rows[::-1], alias))
    past = [tuple(x.index_select(0, torch.tensor([1, 1, 0])) for x in pair) for pair in past]
    with torch.no_grad(), pytest.raises(VerificationError) as caught:
        paged(torch.randint(0, 61, (3, 1)), past)
    checked([caught.value], 3, "layers.0", "stored keys")


def test_exhausted_budget_leaves_shadows_as_they_were() -> None:
    _, paged = verified()
    (*_, past) = run(paged, 10)
    block = past[0][0]._view.group.block_bytes
    paged_inductor.configure(kv_budget=3 * block)
    with torch.no_grad():
        with pytest.raises(paged_inductor.KVBudgetExceeded):
            paged(torch.randint(0, 61, (2, 40)), past)
        paged_inductor.configure(kv_budget="1GiB")
        paged(torch.randint(0, 61, (2, 1)), past)


# -- options -------------------------------------------------------------------------------------------------


def test_tolerance_decides() -> None:
    _, paged = verified(verify_tolerance=0.0)
    assert isinstance(run(paged)[-1], VerificationError), "sums in two orders never agree to the last bit"
    for wrong in (-1, 2, "much"):
        with pytest.raises(ConfigurationError, match=r"verify_tolerance=.*from 0 to 1"):
            verified(verify_tolerance=wrong)
    with pytest.raises(ConfigurationError, match=r"verify='maybe'.*True or False"):
        verified(verify="maybe")


def test_without_verify_handles_carry_nothing() -> None:
    _, paged = verified(verify=False)
    (*_, past) = run(paged, 1)
    assert type(past[0][0]) is PagedTensor


def test_a_cache_from_before_verifying_is_adopted() -> None:
    model, paged = verified(verify=False)
    prompt = torch.randint(0, 61, (2, 9))
    expected, _ = generate(model, prompt, 10)
    with torch.no_grad():
        logits, past = paged(prompt)
    paged_inductor.unpage(paged)
    paged_inductor.page(paged, inner="eager", verify=True)
    assert torch.equal(decode(paged, prompt, logits, past, 10)[0], expected)
