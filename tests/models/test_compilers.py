"""The inner compilers and the Triton kernels, end to end: same tokens, and no copy of an arena in generated code."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

import paged_inductor
from paged_inductor import PagedTensor
from paged_inductor.inner import INNER_COMPILERS

from .zoo import Decoder, Form, generate


@pytest.fixture
def formula() -> None:
    """Compiled code."""


@pytest.mark.parametrize("inner", INNER_COMPILERS)
def test_same_tokens_with_every_inner_compiler(inner: str) -> None:
    torch.manual_seed(1)
    model = Decoder(Form(gqa="expand"), layers=1)
    prompt = torch.randint(0, 61, (2, 7))
    expected, _ = generate(model, prompt, 30)
    step = torch.compile(model, backend="paged_inductor", options={"inner": inner})
    tokens, past = generate(step, prompt, 30)
    assert torch.equal(tokens, expected)
    assert isinstance(past[0][0], PagedTensor)


def test_generated_code_writes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer of an arena's size is allocated or copied: Inductor writes the new tokens into the arena itself."""
    import torch._inductor.graph as graph

    sources: list[str] = []
    save = graph.GraphLowering.save_output_code
    monkeypatch.setattr(graph.GraphLowering, "save_output_code", staticmethod(sources.append))
    torch.manual_seed(1)
    model = Decoder(Form(heads_q=6, heads_kv=2, gqa="expand", mask="none_or_is_causal"), layers=2)
    step = torch.compile(model, backend="paged_inductor", options={"inductor": {"force_disable_caches": True}})
    tokens, _ = generate(step, torch.randint(0, 61, (2, 7)), 6)
    monkeypatch.setattr(graph.GraphLowering, "save_output_code", save)
    decode = [code for code in sources if "paged_inductor.decode" in code]
    assert decode, "no decode step was compiled"
    for code in decode:
        arena = re.findall(r"assert_size_stride\((\w+), \((\w+), 2, 16, 8\)", code)
        assert len(arena) == 4, "four arenas are inputs of the graph"
        (blocks,) = {size for _, size in arena}
        allocations = re.findall(r"= empty_strided\w*\((\([^)]*\))", code)
        assert allocations and not any(re.search(rf"\b{blocks}\b", size) for size in allocations)
        assert not any(f"{name}.copy_(" in code or f"aten.clone.default({name}" in code for name, _ in arena)


@pytest.fixture
def triton_on_cpu() -> Iterator[None]:
    paged_inductor.configure(triton_on_cpu=True)
    yield
    paged_inductor.configure(triton_on_cpu=False)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_triton_kernels_end_to_end(inner: str, triton_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, chunked prefill and decode through the Triton kernels, interpreted on CPU tensors."""
    from paged_inductor import kernels

    calls: dict[str, int] = {}

    def counted(name: str) -> None:
        kernel = getattr(kernels, name)

        def call(*args: object, **kwargs: object) -> object:
            calls[name] = calls.get(name, 0) + 1
            return kernel(*args, **kwargs)

        monkeypatch.setattr(kernels, name, call)

    counted("attention")
    counted("cache_write")
    counted("cache_write_kv")
    torch.manual_seed(2)
    model = Decoder(Form(gqa="expand"), layers=1)
    prompt = torch.randint(0, 61, (2, 30))
    expected, _ = generate(model, prompt, 8)
    step = torch.compile(model, backend="paged_inductor", options={"inner": inner})
    tokens, past = generate(step, prompt, 8, chunks=(5, 19))
    assert torch.equal(tokens, expected)
    assert isinstance(past[0][0], PagedTensor)
    assert calls == {"attention": 10, "cache_write_kv": 11}
