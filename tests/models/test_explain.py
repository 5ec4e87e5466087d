"""explain(): what would make a site pageable, the report as JSON, and its picture."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paged_inductor
from paged_inductor import Explanation, MissingExtraError
from paged_inductor.passes import advice, attention, by_hand, caches, heads, rewrite, score_form

from .zoo import Decoder, Form, generate

COLOURS = {"paged": "#2e9e5b", "cache only": "#e0a526", "dense": "#c94f4f"}


class Odd(nn.Module):
    """One attention reads its cache, one reads it backwards, one has no cache."""

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        k, v = torch.cat([past[0], x], 2), torch.cat([past[1], x], 2)
        backwards = F.scaled_dot_product_attention(x, k.flip(2), v)
        alone = F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(x, k, v) + backwards + alone, (k, v)


def explained(model: nn.Module) -> Explanation:
    torch.manual_seed(0)
    if isinstance(model, Decoder):
        paged_inductor.page(model, inner="eager", label="explained")
        generate(model, torch.randint(0, 61, (2, 7)), 3)
    else:
        paged_inductor.page(model, inner="eager", label="explained")
        x = torch.randn(1, 2, 3, 8)
        past = (torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
        with torch.no_grad():
            for _ in range(3):
                _, past = model(x, past)
    return paged_inductor.explain(model)


def test_every_site_that_is_not_paged_has_advice() -> None:
    found = explained(Odd())
    assert len(found.sites) == 3 * len(found.graphs)
    for site in found.sites:
        assert bool(site.advice) == bool(site.reason)
        assert site.paged or site.advice
    wanted = {site.reason.split()[0]: site.advice for site in found.graphs[0].sites if not site.paged}
    assert wanted["flip"].startswith("hand K and V from the cache")
    assert wanted["l_args_0_"].startswith("return K and V from the call")
    text = str(found)
    assert text.count("to page more: return K and V") == 1


def test_a_graph_that_is_left_alone_has_advice() -> None:
    model = paged_inductor.page(Decoder(Form()).requires_grad_(True), inner="eager", label="gradients")
    model(torch.randint(0, 61, (1, 5)))
    (graph,) = paged_inductor.explain(model).graphs
    assert "gradients" in graph.note and "torch.no_grad()" in graph.advice


def test_models_of_one_class_and_past_settings_are_kept_apart() -> None:
    torch.manual_seed(0)
    prompt = torch.randint(0, 61, (1, 7))
    plain, rounded = Decoder(Form()), Decoder(Form(), head_dim=64)
    paged_inductor.page(plain, inner="eager")
    paged_inductor.page(rounded, inner="eager", kv_dtype="int8")
    generate(plain, prompt, 3)
    assert str(paged_inductor.explain(rounded)).startswith("no graph was compiled")
    generate(rounded, prompt, 3)
    assert {site.rounded for site in paged_inductor.explain(plain).sites} == {""}
    assert {site.rounded for site in paged_inductor.explain(rounded).sites} == {"int8"}
    paged_inductor.page(paged_inductor.unpage(rounded), inner="eager", kv_dtype="fp8_e4m3")
    assert paged_inductor.explain(rounded).graphs == ()
    generate(rounded, prompt, 3)
    found = paged_inductor.explain(rounded)
    assert {site.rounded for site in found.sites} == {"float8_e4m3fn"}
    assert 'tokens are rounded: kv_dtype="fp8_e4m3"' in str(found)
    assert len(paged_inductor.explain(plain).graphs) == 3


def test_every_kind_of_reason_is_in_the_table() -> None:
    """What the passes give as reasons, read from their sources."""
    reasons = []
    for module in (attention, by_hand, caches, heads, rewrite, score_form):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            returned = isinstance(node, ast.Return) and node.value is not None
            stored = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("reason")
            if returned or stored:
                reasons += _texts(node.value)
    reasons = [reason for reason in reasons if reason.count(" ") >= 2]
    assert len(reasons) > 30
    assert [reason for reason in reasons if not any(fragment in reason for fragment, _ in advice.ADVICE)] == []


def _texts(node: ast.expr) -> list[str]:
    """The texts among the values of an expression, with X for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)]
        case ast.IfExp() | ast.BoolOp():
            return [text for part in ast.iter_child_nodes(node) for text in _texts(part)]
    return []


def test_json_is_versioned_and_complete() -> None:
    found = explained(Decoder(Form()))
    report = json.loads(found.as_json())
    assert report["version"] == 1 and len(report["graphs"]) == len(found.graphs) == 3
    step = report["graphs"][1]
    assert step["groups"] == 1 and step["note"] == step["advice"] == ""
    assert {name for name, _, _ in step["passes"]} >= {"MatchAppends", "ProveMasks", "Rewrite"}
    site = step["sites"][1]
    assert site["layer"] == "layers.1" and site["paged"] and site["bytes_per_token"] == 2 * 2 * 8 * 4
    caches = {cache["name"]: cache for cache in step["caches"]}
    assert [caches[name]["role"] for name in site["reads"]] == ["key", "value"]
    assert {cache["layer"] for cache in caches.values()} == {"layers.0", "layers.1"}
    assert all(cache["kind"] == "append" and cache["bytes_per_token"] == 64 for cache in caches.values())


@pytest.mark.parametrize("make", [lambda: Decoder(Form()), Odd, lambda: Decoder(Form(), layers=12)])
def test_the_picture_is_drawn(make, tmp_path: Path) -> None:
    found = explained(make())
    found.plot(tmp_path / "caches.svg")
    text = (tmp_path / "caches.svg").read_text()
    assert f"graph 1 of {len(found.graphs)}" in text
    Explanation(()).plot(tmp_path / "legend.svg")
    legend = (tmp_path / "legend.svg").read_text()
    more = {name: text.count(colour) > legend.count(colour) for name, colour in COLOURS.items()}
    odd = make is Odd
    assert more == {"paged": True, "cache only": odd, "dense": odd}


def test_an_explanation_of_nothing_is_drawn(tmp_path: Path) -> None:
    Explanation(()).plot(tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").stat().st_size > 0


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'paged-inductor\[plot\]'"):
        Explanation(()).plot(tmp_path / "x.png")
