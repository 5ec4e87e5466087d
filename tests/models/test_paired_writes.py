"""K and V of a layer are written by one kernel, unless something between their writes would notice."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_inductor.ops import library

from .zoo import Decoder, Form, generate

Past = tuple[Tensor, Tensor] | None
WRITES = ("cache_write", "cache_write_kv")


def both(past: Past, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (k, v) if past is None else (torch.cat([past[0], k], 2), torch.cat([past[1], v], 2))


def plain(x: Tensor, past: Past) -> tuple[Tensor, Any]:
    k, v = both(past, x.cos(), x.sin())
    return F.scaled_dot_product_attention(x, k, v), (k, v)


def keys_changed_behind_their_write(x: Tensor, past: Past) -> tuple[Tensor, Any]:
    new = x.cos()
    k = new.clone() if past is None else torch.cat([past[0], new], 2)
    new.mul_(2.0)
    v = x.sin() if past is None else torch.cat([past[1], x.sin()], 2)
    return F.scaled_dot_product_attention(x, k, v) + new.mean(), (k, v)


def values_made_of_the_keys_that_are_cached(x: Tensor, past: Past) -> tuple[Tensor, Any]:
    k = x.cos() if past is None else torch.cat([past[0], x.cos()], 2)
    new = x.sin() * k.mean()
    v = new if past is None else torch.cat([past[1], new], 2)
    return F.scaled_dot_product_attention(x, k, v), (k, v)


def values_of_other_dtype(x: Tensor, past: Past) -> tuple[Tensor, Any]:
    k, v = both(past, x.cos(), x.sin().double())
    return F.scaled_dot_product_attention(x, k, v.float()), (k, v)


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (plain, {"cache_write_kv"}),
        (keys_changed_behind_their_write, {"cache_write"}),
        (values_made_of_the_keys_that_are_cached, {"cache_write"}),
        (values_of_other_dtype, {"cache_write"}),
    ],
)
@pytest.mark.filterwarnings("ignore:paged_inductor")
def test_values_are_right_and_writes_are_paired_where_they_may_be(
    step: Callable[..., Any], kinds: set[str], kernels_serve: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    twins: Any = library.kernels
    for name in WRITES:
        write = getattr(twins, name)
        monkeypatch.setattr(
            twins, name, lambda *args, name=name, write=write, **kw: (seen.add(name), write(*args, **kw)), raising=False
        )
    compiled = torch.compile(step, backend="paged_inductor", options={"inner": "eager"})
    torch.manual_seed(0)
    past, own = None, None
    with torch.no_grad():
        for i in range(4):
            if i == 2:  # of the steps
                seen.clear()
            x = torch.randn(2, 2, 1 if i else 6, 16)
            (got, past), (want, own) = compiled(x, past), step(x, own)
            torch.testing.assert_close(got, want)
    assert seen == kinds


def test_inductor_hands_the_arenas_themselves_to_the_kernels(
    kernels_serve: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of an arena in a step would cost more than the step."""
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(sources.append))
    torch.manual_seed(2)
    model = Decoder(Form(gqa="expand"), layers=2)
    prompt = torch.randint(0, 61, (2, 30))
    step = torch.compile(model, backend="paged_inductor", options={"inductor": {"force_disable_caches": True}})
    assert torch.equal(generate(step, prompt, 8)[0], generate(model, prompt, 8)[0])
    calls = r"torch\.ops\.paged_inductor\.(\w+)\.default\((.*)\)"
    found = re.findall(calls, sources[-1])
    assert [name for name, _ in found] == ["cache_write_kv", "attention"] * 2
    written = [arguments.split(", ")[:2] for name, arguments in found if name == "cache_write_kv"]
    read = [re.findall(r"arg\d+_1", arguments)[:2] for name, arguments in found if name == "attention"]
    assert written == read
    assert len({arena for pair in written for arena in pair}) == 4
