"""The inner compilers and the Triton kernels, end to end: same tokens, and no copy of an arena in generated code."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

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


@pytest.mark.parametrize("around", ["torch.compile", "page"])
def test_a_compiler_around_a_paged_model_traces_nothing_but_models(around: str) -> None:
    """What `page` does before each call reads the books and the tenant: no business of a tracer, which keeps values."""

    class Around(torch.nn.Module):
        def __init__(self, inside: torch.nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, tokens: torch.Tensor, past: Any = None) -> Any:
            return self.inside(tokens, past)

    torch.manual_seed(1)
    model = paged_inductor.page(Decoder(Form(gqa="expand"), layers=1), inner="eager")
    prompt = torch.randint(0, 61, (2, 7))
    expected, _ = generate(model, prompt, 20)
    compiled = torch.compile(model, backend="eager")
    step = compiled if around == "torch.compile" else paged_inductor.page(Around(model), inner="eager")
    clear_compilation_metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Dynamo's, when it traces what keeps its results
        tokens, past = generate(step, prompt, 20)
    assert torch.equal(tokens, expected)
    assert isinstance(past[0][0], PagedTensor)
    traced = {str(frame.co_name) for frame in get_compilation_metrics()}
    assert all(re.fullmatch(r"forward(_\d+)?", name) for name in traced), traced


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
