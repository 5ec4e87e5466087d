"""The mask prover: exact answers for known spellings, soundness by brute force for random mask programs."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx import Node

from paged_inductor.passes.masks import MaskSpec, prove_mask
from strategies import BELOW, DRESSED, SHAPES, Recorder, below, dressed, masks, rows_columns, sizes

GRID = [(1, 0), (1, 2), (1, 5), (2, 0), (3, 0), (4, 0), (2, 3), (4, 1), (5, 4), (3, 7)]
INF, MIN = math.inf, torch.finfo(torch.float32).min
relaxed = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def prove(rec: Recorder, mask: Node | None, is_causal: bool = False) -> MaskSpec:
    return prove_mask(mask, is_causal, rec.value(rec.q), rec.value(rec.kv))


def weights(mask: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What SDPA multiplies V with. Rows in which everything is -inf are zero."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -INF)
    return torch.softmax(scores + mask.double(), -1).nan_to_num(0.0)


def seen(spec: MaskSpec, values: dict, q: int, kv: int) -> torch.Tensor:
    """Which keys the spec's bounds let through, evaluated for concrete sizes."""
    i, j = torch.arange(q)[:, None], torch.arange(kv)[None, :]
    keys = torch.ones(q, kv, dtype=torch.bool)
    if spec.causal_offset is not None:
        offset = int(spec.causal_offset.xreplace(values))
        keys &= j <= i + offset
        if spec.window is not None:
            keys &= j > i + offset - int(sympy.sympify(spec.window).xreplace(values))
    return keys


def check(rec: Recorder, mask: Node, spec: MaskSpec) -> int:
    """Compares everything that spec claims with the program's own result; returns the number of sizes
    tried."""
    assert spec.window is None or spec.causal_offset is not None
    assert spec.tensor in (None, mask) and spec.proof.startswith("passed on") == (spec.tensor is mask)
    tried = 0
    for size, value in rec.runs(mask, GRID):
        q, kv = size["q"], size["q"] + size["past"]
        values = {rec.symbols[n].node.expr: sympy.Integer(v) for n, v in size.items()}
        keys = seen(spec, values, q, kv)
        value = value.expand(torch.broadcast_shapes(value.shape, (2, 1, q, kv)))
        scores = torch.randn(q, kv, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        if not torch.isnan(value).any():  # NaN masks are NaN whatever is skipped
            claimed = keys if spec.tensor is None else torch.where(keys, scores, -INF)
            ours = weights(claimed, scores) if spec.tensor is None else weights(value, claimed)
            torch.testing.assert_close(ours.expand(value.shape), weights(value, scores), rtol=0, atol=1e-12)
        else:
            assert spec.tensor is mask
        if spec.padding:
            visible = value if value.dtype == torch.bool else value > -INF
            vector = (visible | ~keys).all(1, keepdim=True).all(2, keepdim=True)
            assert torch.equal(visible, (keys & vector).expand_as(visible))
        tried += 1
    return tried


# --- random programs -------------------------------------------------------------------------------


def test_no_claim_about_a_random_program_is_wrong() -> None:
    tally: Counter[str] = Counter()

    @settings(relaxed, max_examples=120)
    @given(st.data(), sizes)
    def run(data: st.DataObject, size: object) -> None:
        rec = Recorder(size.q, size.past)
        mask = data.draw(masks(rec))
        spec = prove(rec, mask)
        tally["tried"] += check(rec, mask, spec) > 0
        tally["proven"] += spec.tensor is None
        tally["bounded"] += spec.causal_offset is not None
        tally["padding"] += spec.padding

    run()
    # Most random programs are no causal mask; these shares fall when the prover stops understanding what it
    # did.
    assert tally["tried"] > 100
    assert tally["proven"] > 0.2 * tally["tried"], tally
    assert tally["bounded"] > 0.15 * tally["tried"], tally
    assert tally["padding"] > 0.05 * tally["tried"], tally


@settings(relaxed, max_examples=80)
@given(
    size=sizes,
    how=st.sampled_from(BELOW),
    shape=st.sampled_from(SHAPES),
    dress=st.sampled_from(DRESSED),
    window=st.sampled_from([None, 1, 2, 6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_spelling_of_causal_and_window_is_proven(size, how, shape, dress, window, dtype) -> None:
    rec = Recorder(size.q, size.past)
    mask = below(rec, how, shape, rec.past)
    if window is not None:
        i, j = rows_columns(rec, shape, rec.past)
        mask = rec(operator.and_, mask, rec(operator.gt, j, rec(operator.sub, i, window)))
    mask = dressed(rec, dress, mask, dtype)
    spec = prove(rec, mask)
    assert spec.tensor is None, spec
    assert spec.padding is False
    if size.q == 1 and window is None:
        assert spec == MaskSpec(None, None, False, None, "every key visible")
    elif size.q is None:
        past = rec.value(rec.past)
        assert spec.causal_offset == (past.node.expr if size.past is None else past)
        assert spec.window == window
    assert check(rec, mask, spec) >= 1


# --- exact answers through Dynamo ------------------------------------------------------------------


def capture(fn: Callable, *args: object, dynamic: bool = True) -> list[MaskSpec]:
    """prove_mask of every attention in fn(*args), which is compiled."""
    specs: list[MaskSpec] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable:
        for node in gm.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                q, k = (a.meta["example_value"] for a in node.args[:2])
                mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
                spec = prove_mask(mask, node.kwargs.get("is_causal", False), q.shape[-2], k.shape[-2])
                assert spec.tensor is None or spec.tensor is mask
                specs.append(spec)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    return specs


def spec_of(make: Callable, *extra: object, dynamic: bool = False, q: int = 5, kv: int = 9, **options) -> MaskSpec:
    def attend(query: torch.Tensor, key: torch.Tensor, *extra: object) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, key, attn_mask=make(q_(query), q_(key), *extra), **options)

    (spec,) = capture(attend, torch.randn(2, 3, q, 8), torch.randn(2, 3, kv, 8), *extra, dynamic=dynamic)
    return spec


def q_(x: torch.Tensor) -> int:
    return x.shape[2]


def meaning(spec: MaskSpec) -> tuple:
    offset = None if spec.causal_offset is None else int(spec.causal_offset)
    return offset, spec.window, spec.padding, spec.tensor is None


def grid(q: int, k: int, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(q)[:, None] + shift, torch.arange(k)[None, :]


def true(*size: int) -> torch.Tensor:
    return torch.ones(*size, dtype=torch.bool)


KNOWN = {
    "tril": (lambda q, k: true(q, k).tril(diagonal=4), (4, None)),
    "triu of -inf": (lambda q, k: torch.full((q, k), -INF).triu(5), (4, None)),
    "triu function": (lambda q, k: torch.triu(torch.full((q, k), -INF), diagonal=1), (0, None)),
    "minimum": (lambda q, k: torch.full((q, k), MIN).triu(1), (0, None)),
    "one minus": (lambda q, k: (1.0 - torch.ones(q, k).tril()) * MIN, (0, None)),
    "tril is zero": (
        lambda q, k: torch.zeros(q, k).masked_fill(torch.tril(torch.ones(q, k)) == 0, -INF), (0, None)),
    "where": (lambda q, k: torch.where(torch.ge(*grid(q, k, 4)), 0.0, -INF), (4, None)),
    "fill twice": (
        lambda q, k: torch.zeros(q, k).masked_fill(grid(q, k)[0] < grid(q, k)[1], -INF)
        .masked_fill(grid(q, k)[1] <= grid(q, k)[0] - 3, -INF), (0, 3)),
    "sum": (lambda q, k: torch.full((q, k), -INF).triu(1) + torch.full((q, k), -INF).tril(-3), (0, 3)),
    "band": (lambda q, k: true(q, k).tril(2).triu(-1), (2, 4)),
    "distance": (lambda q, k: (grid(q, k)[0] - grid(q, k)[1]).abs() <= 3, (3, 7)),
    "window only": (lambda q, k: grid(q, k)[1] > grid(q, k)[0] - 3, (8, 11)),
    "hstack": (
        lambda q, k: torch.hstack((torch.zeros(q, k - q), torch.full((q, q), -INF).triu(1))),
        (4, None),
    ),
    "pad": (lambda q, k: F.pad(true(q, q).tril(), (k - q, 0), value=True), (4, None)),
    "slice": (lambda q, k: true(32, 32).tril()[k - q : k, :k], (4, None)),
    "negative slice": (lambda q, k: true(k, k).tril()[-q:], (4, None)),
    "lookup": (lambda q, k: true(k, k).tril()[None, None, torch.arange(q) + 4], (4, None)),
    "index_select": (lambda q, k: true(k, k).tril().index_select(0, torch.arange(4, 4 + q)), (4, None)),
    "transposed": (lambda q, k: true(k, q).triu(-4).T, (4, None)),
    "permuted": (lambda q, k: true(1, q, k).tril(4).permute(1, 2, 0)[..., 0], (4, None)),
    "unit views": (
        lambda q, k: true(q, k).tril(4).view(1, q, 1, k).transpose(1, 2).expand(2, -1, -1, -1),
        (4, None)),
    "bidirectional": (lambda q, k: (grid(q, k)[0] >= 0)[None, None].expand(2, 1, q, k), (None, None)),
    "all zeros": (lambda q, k: torch.zeros(2, 1, q, k), (None, None)),
    "one chunk": (lambda q, k: torch.eq(*(x // 16 for x in grid(q, k))), (None, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_spelling(name: str) -> None:
    make, expected = KNOWN[name]
    assert meaning(spec_of(make)) == (*expected, False, True)


@pytest.mark.parametrize("name", ["hstack", "slice", "negative slice", "pad"])
def test_symbolic_offset(name: str) -> None:
    def attend(query: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        key = torch.cat([past, query], 2)
        mask = KNOWN[name][0](q_(query), q_(key))
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)

    (spec,) = capture(attend, torch.randn(2, 3, 5, 8), torch.randn(2, 3, 4, 8))
    assert spec.tensor is None and spec.window is None
    assert spec.causal_offset.is_Symbol and spec.proof == f"causal, offset {spec.causal_offset}"


def test_no_mask_and_is_causal() -> None:
    assert prove_mask(None, False, 5, 9) == MaskSpec(None, None, False, None, "none")
    assert meaning(prove_mask(None, True, 5, 9)) == (0, None, False, True)
    assert meaning(prove_mask(None, True, 1, 9)) == (0, None, False, True)  # top left: one key
    assert meaning(prove_mask(None, True, 3, 1)) == (None, None, False, True)


def chunked(q: int, k: int) -> torch.Tensor:
    i, j = grid(q, k)
    return (j <= i) & (i // 3 == j // 3)


def written_later(q: int, k: int) -> torch.Tensor:
    m = true(q, k).tril()
    m[:, 0] = False
    return m


def written_through_a_view(q: int, k: int) -> torch.Tensor:
    m = torch.zeros(2, 1, q, k)
    m.view(2, q, k)[0].fill_(-INF)
    return m


PASSED_ON = {
    "finite": (lambda q, k: torch.full((q, k), -1e9).triu(1), "float bias"),
    "fully masked rows": (lambda q, k: torch.full((q, k), MIN).triu(0), "finite minimum"),
    "nan": (lambda q, k: torch.zeros(q, k) * -INF, "NaN"),
    "alibi": (lambda q, k: torch.sub(*grid(q, k)) * -0.5, "bias"),
    "every other": (lambda q, k: torch.sub(*grid(q, k)) % 2 == 0, "not a causal"),
    "remainder": (lambda q, k: (grid(q, k)[1] % 3 <= 1).expand(q, k), "not a causal"),
    "prefix": (lambda q, k: (grid(q, k)[1] < 3).expand(q, k), "not a causal"),
    "overflow": (lambda q, k: grid(q, k)[1] + (2**63 - 3) > grid(q, k)[0], "overflow"),
    "narrow overflow": (
        lambda q, k: torch.arange(k, dtype=torch.int8) * 20 >= grid(q, k)[0].to(torch.int8),
        "overflow",
    ),
    "rounding": (lambda q, k: torch.arange(k, dtype=torch.bfloat16) + 256 > grid(q, k)[0] + 256, "overflow"),
    "written": (written_later, "in place"),
    "written view": (written_through_a_view, "in place"),
    "unknown op": (lambda q, k: torch.ones(q, k).cumsum(0) > 0, "cumsum"),
    "random": (lambda q, k: torch.rand(q, k) > 0.5, "rand"),
    "flip": (lambda q, k: true(q, k).tril().flip(0), "flip"),
    "no key": (lambda q, k: torch.zeros(q, k, dtype=torch.bool), "not a causal"),
    "per batch": (
        lambda q, k: (torch.arange(2)[:, None, None, None] + grid(q, k)[0]) >= grid(q, k)[1],
        "not a causal",
    ),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_passed_on_without_claims(name: str) -> None:
    make, reason = PASSED_ON[name]
    spec = spec_of(make)
    assert meaning(spec) == (None, None, False, False), spec
    assert spec.proof.startswith("passed on: ") and reason in spec.proof


def test_implied_bounds_stay_beside_the_tensor() -> None:
    spec = spec_of(chunked)
    assert meaning(spec) == (0, None, False, False)
    assert "not a causal or window pattern (causal, offset 0" in spec.proof
    bias = torch.randn(5, 9)
    spec = spec_of(lambda q, k, bias: torch.where(torch.ge(*grid(q, k)), bias, -INF), bias)
    assert meaning(spec) == (0, None, False, False) and spec.proof.startswith("passed on: float bias from graph input")
    spec = spec_of(lambda q, k, bias: torch.where(torch.ge(*grid(q, k)), bias, MIN), bias)
    assert meaning(spec) == (None, None, False, False)  # the bias may be -inf in a whole row


def test_padding_vectors() -> None:
    pad = torch.ones(2, 9, dtype=torch.int64)
    both = lambda q, k, pad: torch.ge(*grid(q, k, 4)) & pad.bool()[:, None, None, :]  # noqa: E731
    assert meaning(spec_of(both, pad)) == (4, None, True, False)
    alone = lambda q, k, pad: (pad != 0)[:, None, None]  # noqa: E731
    assert meaning(spec_of(alone, pad)) == (None, None, True, False)
    filled = lambda q, k, pad: torch.zeros(2, 1, q, k).masked_fill(pad[:, None, None] == 0, -INF).triu(1)  # noqa: E731
    assert spec_of(filled, pad).padding is False  # triu clears the padding below the diagonal
    soft = lambda q, k, pad: torch.where(both(q, k, pad), 0.0, MIN)  # noqa: E731
    assert meaning(spec_of(soft, pad)) == (None, None, False, False)
    either = lambda q, k, pad: torch.ge(*grid(q, k, 4)) | pad.bool()[:, None, None, :]  # noqa: E731
    assert meaning(spec_of(either, pad)) == (None, None, False, False)


def test_lookups_by_data_are_passed_on() -> None:
    table, position = torch.ones(16, 9, dtype=torch.bool).tril(), torch.arange(5)
    spec = spec_of(lambda q, k, table, position: table[None, None, position], table, position)
    assert meaning(spec) == (None, None, False, False) and "graph input" in spec.proof
    spec = spec_of(lambda q, k, position: torch.arange(k) <= position[:, None], position)
    assert meaning(spec) == (None, None, False, False)


def test_is_causal_with_a_mask_is_never_proven() -> None:
    rec = Recorder(4, 0)
    mask = below(rec, "le", "view", 0)
    assert prove(rec, mask, is_causal=True).tensor is mask


def test_lengths_must_be_known_equal() -> None:
    rec = Recorder(1, None)
    mask = below(rec, "le", "view", rec.past)
    other = sympy.Symbol("other", integer=True, nonnegative=True)
    past = rec.symbols["past"].node.expr
    length = rec.env.create_symintnode(other, hint=8)
    assert "not known to equal" in prove_mask(mask, False, 1, length).proof
    spec = prove_mask(mask, False, 1, length, {other: past + 1})
    assert spec == MaskSpec(None, None, False, None, "every key visible")


# --- Hugging Face ----------------------------------------------------------------------------------


def hugging_face(monkeypatch: pytest.MonkeyPatch, padded: bool, **config: object) -> list[list[MaskSpec]]:
    """The specs of each graph of a tiny model's greedy generation."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = "Mistral" if "sliding_window" in config else "Llama"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "vocab_size": 50, "pad_token_id": 0}
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**sizes, **heads, **config)
    ).eval()
    graphs: list[list[MaskSpec]] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable:
        specs = []
        for node in gm.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                q, k = (a.meta["example_value"] for a in node.args[:2])
                specs.append(prove_mask(node.kwargs["attn_mask"], node.kwargs["is_causal"], q.shape[2], k.shape[2]))
        graphs.append(specs)
        return gm.forward

    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=backend)
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 7]])
    attention = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]) if padded else torch.ones_like(ids)
    with torch.no_grad():
        model.generate(ids, attention_mask=attention, max_new_tokens=5, do_sample=False)
    return graphs


def test_llama_with_left_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = hugging_face(monkeypatch, padded=True)
    assert len(graphs) == 3 and all(len(specs) == 2 for specs in graphs)
    prefill, first, later = (specs[0] for specs in graphs)
    assert meaning(prefill) == (0, None, True, False)
    assert meaning(first) == (None, None, True, False)
    assert meaning(later) == (None, None, True, False)
    assert later.proof == "passed on: padding vector"


def test_mistral_with_a_sliding_window(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = hugging_face(monkeypatch, padded=True, sliding_window=3)
    assert meaning(graphs[0][0]) == (0, 3, True, False)
    assert all(spec.padding for specs in graphs for spec in specs)
