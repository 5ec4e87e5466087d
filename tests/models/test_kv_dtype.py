"""Quantised pages: the tokens of a model whose attention reads rounded keys and values, in half the memory or less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import paged_inductor
from paged_inductor import ConfigurationError, configure, explain, page
from paged_inductor._config import reset_config
from paged_inductor._layout import KV_DTYPES
from paged_inductor.kernels import reference
from paged_inductor.runtime import manager

from . import zoo
from .zoo import Decoder, Form, generate

FORMS = [Form(), Form(layout="BSHD", mask="none_or_is_causal", gqa="expand"), Form(mask="float", heads_kv=4)]
NAMES = list(KV_DTYPES)


@pytest.fixture
def formula() -> None:
    """Compiled code that reads codes."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    reset_config()


def model_of(form: Form, seed: int = 0, **options: Any) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(form)
    return page(model, inner="eager", **options) if options else model


def prompt(batch: int = 2, length: int = 21) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def flat(past: Any) -> list[Any]:
    return [tensor for pair in past for tensor in pair]


def rounded(values: Tensor, name: str) -> Tensor:
    codes, scales = reference.quantize(values, KV_DTYPES[name])
    return (codes.float() * scales[..., None]).to(values.dtype)


def attend_rounded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let dense models attend to rounded keys and values wherever a paged one reads pages."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if q.shape[2] != k.shape[2]:
            k, v = rounded(k, name), rounded(v, name)
        return F.scaled_dot_product_attention(q, k, v, **options)

    functional = type("functional", (), {"scaled_dot_product_attention": staticmethod(attend)})
    monkeypatch.setattr(zoo, "F", functional)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("form", "chunks", "kernels"),
    [(FORMS[0], (), False), (FORMS[1], (9, 5), False), (FORMS[2], (), False), (FORMS[0], (9, 5), True)],
    ids=lambda value: value.name if isinstance(value, Form) else str(value),
)
def test_attention_reads_rounded_tokens(
    form: Form, chunks: tuple[int, ...], kernels: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(triton_on_cpu=kernels)
    got, past = generate(model_of(form, kv_dtype=name), prompt(), 12, chunks)
    with monkeypatch.context() as patched:
        attend_rounded(patched, name)
        want, kept = generate(model_of(form), prompt(), 12, chunks)
    assert torch.equal(got, want)
    for paged, dense in zip(flat(past), flat(kept), strict=True):
        torch.testing.assert_close(paged.dense(), rounded(dense, name), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("name", "share"), [("int8", 0.5 / 127), ("fp8_e4m3", 2**-4)])
def test_tokens_are_stored_within_half_a_step(name: str, share: float) -> None:
    with torch.no_grad():
        _, past = model_of(Form(), kv_dtype=name)(prompt(), None)
        _, kept = model_of(Form())(prompt(), None)
    for paged, dense in zip(flat(past)[:2], flat(kept)[:2], strict=True):
        largest = dense.abs().amax(-1, keepdim=True)
        bound = largest * share if name == "int8" else dense.abs() * share + largest / 448 * 2**-10
        assert ((paged.dense() - dense).abs() <= bound * (1 + 1e-5)).all()
        assert not torch.equal(paged.dense(), dense)


@pytest.mark.usefixtures("eager_formula")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory(dtype: torch.dtype) -> None:
    form = Form()
    torch.manual_seed(0)
    for name in (None, *NAMES):
        model = page(Decoder(form, head_dim=64).to(dtype), inner="eager", kv_dtype=name, label=f"{name}")
        _, past = generate(model, prompt(), 3)
        group = past[0][0]._view.group
        values = 4 * form.heads_kv  # K and V of two layers
        per_value = 64 * dtype.itemsize if name is None else 64 + 4
        assert group.token_bytes == values * per_value
        assert paged_inductor.stats().bytes_used == group.pool.num_used * group.block_size * group.token_bytes
        reports = explain(model)
        assert {site.bytes_per_token for site in reports.sites} == {2 * form.heads_kv * per_value}
        assert (f'kv_dtype="{name}"' in str(reports)) == (name is not None)
        del past, group, model


@pytest.mark.parametrize("name", NAMES)
def test_forks_copy_codes_and_scales(name: str) -> None:
    model = model_of(Form(), kv_dtype=name)
    _, past = generate(model, prompt(), 4)
    before = [tensor.dense() for tensor in flat(past)]
    branches = []
    for token in (7, 8):
        with torch.no_grad():
            branches.append(model(torch.full((2, 1), token), past)[0])
    assert not torch.equal(*branches)
    assert all(torch.equal(tensor.dense(), values) for tensor, values in zip(flat(past), before, strict=True))
    picked = [tensor.index_select(0, torch.tensor([1, 1, 0])) for tensor in flat(past)]
    for tensor, values in zip(picked, before, strict=True):
        assert torch.equal(tensor.dense(), values[[1, 1, 0]])
    longer = torch.cat([picked[0], picked[0].dense()[:, :, :1]], 2)  # eager, on shared blocks
    torch.testing.assert_close(longer.dense()[:, :, :-1], before[0][[1, 1, 0]], rtol=0, atol=0)
    torch.testing.assert_close(longer.dense()[:, :, -1], before[0][[1, 1, 0], :, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_swapped_and_saved_caches_come_back(name: str, tmp_path: Path) -> None:
    model = model_of(Form(), kv_dtype=name)
    _, past = generate(model, prompt(), 4)
    before = [tensor.dense() for tensor in flat(past)]
    paged_inductor.save(past, tmp_path / "cache.kv")
    loaded = paged_inductor.load(tmp_path / "cache.kv")
    assert all(torch.equal(tensor.dense(), values) for tensor, values in zip(flat(loaded), before, strict=True))
    token = torch.full((2, 1), 7)
    with torch.no_grad():
        assert torch.equal(model(token, loaded)[0], model(token, past)[0])
    del loaded
    configure(swap_host="1MiB")
    runtime, group = manager(), past[0][0]._view.group
    with runtime.locked():
        assert runtime.swap.out(group, group.pool.num_used, ()) > 0
    assert all(torch.equal(tensor.dense(), values) for tensor, values in zip(flat(past), before, strict=True))
    paged_inductor.trim()
    assert all(torch.equal(tensor.dense(), values) for tensor, values in zip(flat(past), before, strict=True))


def test_under_the_sanitizer() -> None:
    configure(sanitize=True)
    tokens, past = generate(model_of(Form(), kv_dtype="fp8_e4m3"), prompt(), 4)
    del past
    configure(sanitize=False)
    again, _ = generate(model_of(Form(), kv_dtype="fp8_e4m3", label="again"), prompt(), 4)
    assert torch.equal(tokens, again)


def test_the_option_of_the_process_and_of_a_program() -> None:
    configure(kv_dtype="int8")
    _, past = generate(model_of(Form(), label="process"), prompt(), 2)
    assert past[0][0]._view.group.sites[0].stored_as == torch.int8
    _, past = generate(model_of(Form(), label="program", kv_dtype=None), prompt(), 2)
    assert past[0][0]._view.group.sites[0].stored_as is None
    with pytest.raises(ConfigurationError, match="kv_dtype='int4' is not allowed: choose one of 'fp8_e4m3', 'int8'"):
        configure(kv_dtype="int4")
    with pytest.raises(ConfigurationError, match="kv_dtype='fp8' is not allowed"):
        page(Decoder(Form()), kv_dtype="fp8")


def test_verification_wants_a_tolerance() -> None:
    with pytest.raises(ConfigurationError, match="rounded tokens differ from dense ones"):
        page(Decoder(Form()), kv_dtype="int8", verify=True)
    generate(model_of(Form(), kv_dtype="int8", verify=True, verify_tolerance=0.2), prompt(), 3)
