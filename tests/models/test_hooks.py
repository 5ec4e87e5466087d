"""Forward hooks of a paged model's parts: those that are there count, whenever they came or went."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import paged_inductor
from tests.models.test_prefixes import Pair, llama, tenant, tokens


def scaled(module: nn.Module, args: Any, out: Any) -> Any:
    return (out[0] * 1.5, *out[1:]) if isinstance(out, tuple) else out * 1.5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", ["none", "tenant"])
def test_hooks_that_come_and_go(share: str) -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    with tenant(share):
        plain, _ = pair.generate(tokens(20))
        handles = [model.model.layers[0].register_forward_hook(scaled) for model in (pair.dense, pair.paged)]
        hooked, found = pair.generate(tokens(20))
        assert not torch.equal(hooked.sequences, plain.sequences)
        more = [
            model.model.norm.register_forward_pre_hook(lambda module, args: (-args[0],))
            for model in (pair.dense, pair.paged)
        ]
        other, again = pair.generate(tokens(20))
        assert not torch.equal(hooked.sequences, other.sequences)
        assert found == again == 0  # hooks see whole prompts
        for handle in (*handles, *more):
            handle.remove()
        last, found = pair.generate(tokens(20))
        assert torch.equal(last.sequences, plain.sequences)
        assert found == (16 if share == "tenant" else 0)
    assert all(site.paged for graph in paged_inductor.explain(pair.paged).graphs for site in graph.sites)


@pytest.mark.filterwarnings("ignore")
def test_other_models_hooks_compile_nothing_anew() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    pair.generate(tokens(20))
    graphs = len(paged_inductor.explain(pair.paged).graphs)
    pair.dense.model.norm.register_forward_hook(lambda module, args, out: None)
    pair.generate(tokens(20))
    assert len(paged_inductor.explain(pair.paged).graphs) == graphs


@pytest.mark.filterwarnings("ignore")
def test_what_transformers_leaves_behind_to_collect_outputs_is_no_hook() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    with tenant("tenant"):
        pair.generate(tokens(43))
        assert pair.generate(tokens(43), output_hidden_states=True)[1] == 0
        assert any(part._forward_hooks for part in pair.paged.modules())
        assert pair.generate(tokens(43))[1] == 42


@pytest.mark.filterwarnings("ignore")
def test_threads_see_a_hook_from_then_on() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    prompts = [tokens(20, seed) for seed in range(4)]
    for hooked in (False, True):
        if hooked:
            for model in (pair.dense, pair.paged):
                model.model.layers[0].register_forward_hook(scaled)
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda ids: pair.paged.generate(ids, max_new_tokens=4, do_sample=False), prompts))
        for ids, mine in zip(prompts, got):
            assert torch.equal(mine, pair.dense.generate(ids, max_new_tokens=4, do_sample=False))


@pytest.mark.filterwarnings("ignore")
def test_hooks_of_all_modules() -> None:
    def negated(module: nn.Module, args: Any, out: Any) -> Any:
        return -out if isinstance(module, nn.Embedding) else None

    torch.manual_seed(0)
    pair = Pair(llama())
    plain, _ = pair.generate(tokens(20))
    handle = nn.modules.module.register_module_forward_hook(negated)
    try:
        hooked, _ = pair.generate(tokens(20))
    finally:
        handle.remove()
    assert not torch.equal(hooked.sequences, plain.sequences)
    assert torch.equal(pair.generate(tokens(20))[0].sequences, plain.sequences)
