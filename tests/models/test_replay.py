"""`mode="reduce-overhead"`: a step's launches do not depend on the cache's length, and its inputs stay where they are.

As on a GPU, but for the kernels themselves. That CUDA graphs replay such a step is tested on one (tests/gpu).
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

import paged_inductor
from paged_inductor import PagedTensor, stats
from paged_inductor.replay import Replay
from paged_inductor.runtime import schedule
from paged_inductor.runtime.shared_prefix import PrefixSharing, few_lengths

from .replaying import MODE, Recordings, addresses, changes
from .zoo import Decoder, Form, generate

pytestmark = pytest.mark.usefixtures("kernels_serve")

SMALL = Form(heads_q=2, heads_kv=1, mask="none_or_is_causal")


def test_few_lengths() -> None:
    rounded = [few_lengths(8 * blocks, 8) // 8 for blocks in range(26)]
    assert rounded == [0, 1, 2, 3, 4, 4, *[6] * 2, *[8] * 4, *[12] * 4, *[16] * 8, 24, 24]


def test_the_recordings_of_these_tests_run_no_python_again() -> None:
    ran: list[int] = []

    def launches(x: Tensor, n: int) -> Tensor:
        ran.append(n)
        return (x + len(ran)).view(-1) * n

    graph = Graph()
    graph.output(graph.call_function(launches, (graph.placeholder("x"), graph.placeholder("n"))))
    step = Recordings(GraphModule(torch.nn.Module(), graph))
    results = [step(torch.tensor([[x]]), n) for x, n in ((3, 2), (5, 2), (5, 3), (7, 2))]
    assert [int(result) for result in results] == [8, 12, 21, 16]  # as the first call with each number did it
    assert ran == [2, 3]


def test_fifty_steps_with_inputs_that_stay_in_place(calls: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(1)
    model = Decoder(SMALL, layers=1)
    prompt = torch.randint(0, 61, (1, 7))
    expected, _ = generate(model, prompt, 52)
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    growths = stats().arena_growths
    tokens, past = generate(step, prompt, 52)
    assert torch.equal(tokens, expected)
    assert isinstance(past[0][0], PagedTensor)
    assert len(calls) == 51  # the first step is captured for its length alone
    integers = [tuple(value for value in inputs if isinstance(value, int)) for inputs in calls]
    shared, widths, blocks = zip(*integers)  # and no length among them
    assert set(shared) == {0}
    tables = [addresses(inputs, lambda value: value.dtype == torch.int32) for inputs in calls]
    arenas = [addresses(inputs, lambda value: value.dim() == 4) for inputs in calls]
    lengths = [addresses(inputs, lambda value: value.dim() == 0) for inputs in calls]
    assert set(widths) == {8} and changes(tables) == 0
    assert changes(lengths) == 0 and len(lengths[0]) == 1
    assert changes(arenas) == changes(blocks) <= stats().arena_growths - growths
    assert stats().graph_recordings == len(set(zip(widths, arenas)))


def test_rows_that_share_blocks_have_few_recordings(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many blocks are shared is a number that recordings are made for."""
    monkeypatch.setattr(schedule, "sharing", PrefixSharing(pass_bytes=1))
    paged_inductor.configure(block_size=8)
    torch.manual_seed(1)
    model = Decoder(SMALL, layers=1)
    step = torch.compile(model, backend="paged_inductor", options=MODE)

    def samples(forward: Any, prompt: Tensor) -> Tensor:
        with torch.no_grad():
            past = [tuple(x.repeat_interleave(3, 0) for x in pair) for pair in forward(prompt, None)[1]]
            tokens = [torch.tensor([[1], [2], [3]])]
            for _ in range(4):
                logits, past = forward(tokens[-1], past)
                tokens.append(logits[:, -1:].argmax(-1))
        return torch.cat(tokens, 1)

    for length in range(44, 60, 3):
        prompt = torch.randint(0, 61, (1, length))
        assert torch.equal(samples(step, prompt), samples(model, prompt))
    prefixes = {value for inputs in calls for value in inputs if isinstance(value, int)} & set(range(24, 64, 8))
    assert prefixes == {32, 48}  # of 5, 6 and 7 blocks in common


def test_a_table_that_grows_is_counted(calls: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(1)
    paged_inductor.configure(block_size=8)
    model = Decoder(SMALL, layers=1)
    prompt = torch.randint(0, 61, (1, 120))
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    tokens, _ = generate(step, prompt, 12)
    assert torch.equal(tokens, generate(model, prompt, 12)[0])
    integers = [[value for value in inputs if isinstance(value, int)] for inputs in calls]
    widths = [width for _, width, _ in integers]
    assert widths == [16] * 7 + [32] * 4  # 128 tokens fill 16 blocks of 8
    assert stats().graph_recordings >= 2


def test_a_second_cache_is_served_by_the_first_ones_recordings(calls: list[tuple[Any, ...]]) -> None:
    model = Decoder(SMALL, layers=1)
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    prompt = torch.randint(0, 61, (1, 20))
    generate(step, prompt, 4)
    recorded = stats().graph_recordings
    tokens, _ = generate(step, prompt[:, :9], 4)
    assert torch.equal(tokens, generate(model, prompt[:, :9], 4)[0])
    assert stats().graph_recordings == recorded


MASKED = [
    Form(heads_q=1, heads_kv=1, mask="bool"),
    Form(layout="BSHD", heads_q=2, heads_kv=1, gqa="expand", mask="is_causal_or_bool"),
]


@pytest.mark.parametrize("form", MASKED, ids=str)
def test_masks_that_are_proven_are_no_hindrance(form: Form, calls: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(3)
    model = Decoder(form, layers=1)
    prompt = torch.randint(0, 61, (2, 5))
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    assert torch.equal(generate(step, prompt, 4)[0], generate(model, prompt, 4)[0])
    assert len(calls) == 3


def test_several_tokens_a_step(calls: list[tuple[Any, ...]]) -> None:
    """As in assisted decoding: the causal bound moves with the end of the cache."""
    torch.manual_seed(4)
    model = Decoder(Form(heads_q=2, heads_kv=1, mask="bool"), layers=1)
    prompt = torch.randint(0, 61, (1, 21))
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    with torch.no_grad():
        past, own = None, None
        for tokens in prompt.split(3, 1):
            logits, past = step(tokens, past)
            expected, own = model(tokens, own)
            torch.testing.assert_close(logits, expected)
    assert len(calls) == 5


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_padded_batch_is_replayed_with_masks_as_long_as_the_table(kind: str, calls: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(5)
    model = Decoder(Form(heads_q=2, heads_kv=1, mask=kind))
    prompt = torch.randint(0, 61, (2, 6))
    padding = torch.ones(2, 140, dtype=torch.bool)
    padding[0, :2] = False
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    past, own = None, None
    with torch.no_grad():
        for i, tokens in enumerate((prompt, *torch.randint(0, 61, (134, 2, 1)))):
            visible = padding[:, : 6 + i]  # grows with the cache
            logits, past = step(tokens, past, visible)
            expected, own = model(tokens, own, visible)
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert len(calls) == 133
    integers = {tuple(value for value in inputs if isinstance(value, int)) for inputs in calls}
    assert {width for _, width, _ in integers} == {8, 16}  # the table grew once; no length is among them
    shapes = {tuple(value.shape) for inputs in calls for value in inputs if isinstance(value, Tensor)}
    assert {shape for shape in shapes if shape[:3] == (2, 1, 1)} == {(2, 1, 1, 128), (2, 1, 1, 256)}
    assert not any((2, length) in shapes for length in range(20, 140))  # nor what the masks are made of
    assert stats().graph_recordings <= 2 + stats().arena_growths


def test_several_masked_tokens_a_step(calls: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(5)
    model = Decoder(Form(heads_q=2, heads_kv=1, mask="bool"), layers=1)
    tokens, padding = torch.randint(0, 61, (2, 30)), torch.ones(2, 30, dtype=torch.bool)
    padding[1, :4] = False
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    past, own = None, None
    with torch.no_grad():
        for i in range(0, 30, 3):
            logits, past = step(tokens[:, i : i + 3], past, padding[:, : i + 3])
            expected, own = model(tokens[:, i : i + 3], own, padding[:, : i + 3])
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert len(calls) == 8


class Learned(Decoder):
    """Adds to the scores what was learned for each key."""

    def _mask(self, seen: int, length: int, padding: Tensor | None) -> tuple[Tensor | None, bool]:
        mask, is_causal = super()._mask(seen, length, padding)
        assert mask is not None
        return mask + self.positions.weight[: seen + length, 0], is_causal


def test_a_mask_that_is_made_of_parameters(calls: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(5)
    model = Learned(Form(heads_q=2, heads_kv=1, mask="float"), layers=1)
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    past, own = None, None
    with torch.no_grad():
        for part in torch.randint(0, 61, (2, 10)).split((6, 1, 1, 1, 1), 1):
            logits, past = step(part, past)
            expected, own = model(part, own)
            torch.testing.assert_close(logits, expected)
    assert len(calls) == 3 and stats().graph_recordings <= 2


def prompts_of(model: torch.nn.Module, count: int) -> Tensor:
    """Two rows of tokens for a model of transformers, whose weights are made so large that its tokens vary."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return torch.randint(3, 97, (2, count))


def test_windows_and_counts_of_tokens_beside_full_layers(calls: list[tuple[Any, ...]]) -> None:
    """The masks of windows have one length and change all the same; a cache's count of tokens goes in and out."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16, "max_position_embeddings": 64}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).eval().requires_grad_(False)
    prompt = prompts_of(model, 20)
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    tokens = paged_inductor.page(model, **MODE).generate(prompt, **options)
    assert torch.equal(tokens, expected)
    assert len(calls) >= 11
    assert stats().graph_recordings <= 2 + stats().arena_growths


@pytest.mark.parametrize("padded", [False, True])
def test_windows_alone_in_fifty_steps(padded: bool, calls: list[tuple[Any, ...]]) -> None:
    """Mistral's masks are made of the count of tokens seen, of which the full window is a part that stays as it is."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 12}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads)).eval().requires_grad_(False)
    prompt = prompts_of(model, 7)
    mask = torch.ones_like(prompt)
    mask[1, : 3 * padded] = 0
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    options |= {"min_new_tokens": 52, "max_new_tokens": 52}
    expected = model.generate(prompt, **options)
    growths = stats().arena_growths
    tokens = paged_inductor.page(model, **MODE).generate(prompt, **options)
    assert torch.equal(tokens, expected)
    assert len(calls) == 50  # the first step is captured for its length alone
    full = calls[-40:]  # of one graph
    growths = stats().arena_growths - growths
    assert len({tuple(type(value) for value in inputs) for inputs in full}) == 1
    assert changes([addresses(inputs, lambda value: value.dim() == 0) for inputs in full]) == 0
    arenas = [addresses(inputs, lambda value: value.dim() == 4 and value.is_floating_point()) for inputs in full]
    assert len(arenas[0]) == 4 and changes(arenas) <= growths
    assert changes([tuple(value for value in inputs if isinstance(value, int)) for inputs in full]) <= growths
    assert stats().graph_recordings <= 4 + growths  # of four graphs


def test_masks_that_every_layer_makes(calls: list[tuple[Any, ...]]) -> None:
    """MPT's layers make their masks themselves, all alike: the host makes one."""
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
    model = MptForCausalLM(MptConfig(**sizes, use_cache=True)).eval()
    prompt = prompts_of(model.requires_grad_(False), 7)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(prompt, **options)
    tokens = paged_inductor.page(model, **MODE).generate(prompt, **options)
    assert torch.equal(tokens, expected)
    assert len(calls) == 8
    masks = [value for value in calls[-1] if isinstance(value, Tensor) and value.shape[2:] == (1, 128)]
    assert len(masks) == 1


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_caches_of_an_encoder_are_read(kind: str, calls: list[tuple[Any, ...]]) -> None:
    """One recording serves all lengths of what was encoded; learned positions (T5) are a mask."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    bart = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    bart |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}
    sizes = {"t5": t5, "bart": bart}[kind]
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, vocab_size=97, **sizes)).eval()
    prompts_of(model.requires_grad_(False), 1)
    dense = copy.deepcopy(model)
    paged_inductor.page(model, **MODE)
    recordings = []
    for length in (7, 9, 12, 11):
        source = torch.randint(3, 97, (2, length))
        mask = torch.ones_like(source)
        mask[1, -2:] = 0
        options = {"attention_mask": mask, "min_new_tokens": 10, "max_new_tokens": 10, "do_sample": False}
        assert torch.equal(model.generate(source, **options), dense.generate(source, **options))
        recordings.append(stats().graph_recordings)
    assert len(calls) >= 4 * 8
    assert recordings[1] == recordings[-1]


class Sliding(Decoder):
    """Keeps the last tokens only, and sees all that it kept."""

    def forward(self, tokens: Tensor, past: Any = None, padding: Tensor | None = None) -> Any:
        logits, presents = super().forward(tokens, past, padding)
        return logits, [(k[:, :, -9:], v[:, :, -9:]) for k, v in presents]


def test_what_a_window_dropped_is_not_seen_again(calls: list[tuple[Any, ...]]) -> None:
    """Rows hold tokens that their cache does not show any more; without a mask, only its length says so."""
    torch.manual_seed(6)
    model = Sliding(SMALL, layers=1)
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    past, own = None, None
    with torch.no_grad():
        for tokens in torch.randint(0, 61, (2, 44)).split((4, *[1] * 40), 1):
            logits, past = step(tokens, past)
            expected, own = model(tokens, own)
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert len(calls) >= 38 and stats().graph_recordings <= 2 + stats().arena_growths


class Counting(Decoder):
    """Returns how many tokens it has seen, too."""

    def forward(self, tokens: Tensor, past: Any = None, padding: Tensor | None = None) -> Any:
        logits, presents = super().forward(tokens, past, padding)
        return logits, presents, presents[0][0].shape[2] * 2


def test_numbers_made_of_the_length_are_returned_by_the_host(calls: list[tuple[Any, ...]]) -> None:
    model = Counting(SMALL, layers=1)
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    past = None
    with torch.no_grad():
        for i, tokens in enumerate(torch.randint(0, 61, (1, 12)).split((7, 1, 1, 1, 1, 1), 1)):
            logits, past, count = step(tokens, past)
            assert count == 2 * (7 + i)
    assert len(calls) == 4 and stats().graph_recordings <= 2


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(Exception, match="mode='fast' is not allowed: choose one of 'default', .*'reduce-overhead'"):
        paged_inductor.page(torch.nn.Linear(1, 1), mode="fast")


def test_arenas_and_lengths_are_static_for_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Inductor would not record a step that writes to arenas, or would copy them before every replay."""
    from torch._inductor import compile_fx

    class Found(Exception):
        pass

    def inner(gm: torch.fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        static = [examples[i] for i in options["static_input_idxs"]]
        assert [x.dim() for x in examples if isinstance(x, Tensor) and x.dtype == torch.int32] == [2, 1, 1]
        arenas = [x for x in static if x.dim() == 4]
        lengths = [x for x in static if x.dim() == 0]
        raise Found(len(arenas), len(lengths), len([x for x in static if x.dtype == torch.int32]))

    def compile_with(gm: torch.fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        if not options.get("config_patches", {"triton.cudagraphs": True})["triton.cudagraphs"]:
            return gm.forward
        return compiler(gm, examples, **{"inner_compile": inner, **options})  # calls itself without the patches

    compiler = compile_fx.compile_fx
    monkeypatch.setattr(compile_fx, "compile_fx", compile_with)
    model = Decoder(SMALL, layers=2)
    step = torch.compile(model, backend="paged_inductor", options={"mode": "reduce-overhead"})
    with pytest.raises(Exception, match=re.escape("(4, 1, 0)")):
        generate(step, torch.randint(0, 61, (1, 7)), 3)


def test_threads_have_lengths_of_their_own(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one thread's step could read the other's length, and CUDA graphs are recorded per thread."""
    made: list[Replay] = []
    create = Replay.__init__

    def kept(self: Replay, state: Any) -> None:
        made.append(self)
        create(self, state)

    monkeypatch.setattr(Replay, "__init__", kept)
    step = torch.compile(Decoder(SMALL, layers=1), backend="paged_inductor", options=MODE)
    generate(step, torch.randint(0, 61, (1, 7)), 3)
    (replay,) = made
    with ThreadPoolExecutor(1) as threads:
        elsewhere = threads.submit(replay._buffers).result()
    (mine,), (other,) = replay._buffers().values(), elsewhere.values()
    assert mine.data_ptr() != other.data_ptr()
    assert int(mine) == 9  # tokens before the last step


def cropped_by_top_left(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """A causal mask that does not move with the cache: only the first key is seen."""
    k, v = (x * 0.5, x * 2) if past is None else (torch.cat([past[0], x * 0.5], 2), torch.cat([past[1], x * 2], 2))
    return torch.nn.functional.scaled_dot_product_attention(x, k, v, is_causal=True), (k, v)


def rounded_position(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """The length plus a tensor that would round it."""
    seen = 0 if past is None else past[0].shape[2]
    y = x + (torch.zeros(1, dtype=torch.bfloat16) + seen * 7).to(x.dtype) * 1e-3
    k, v = (y, y * 2) if past is None else (torch.cat([past[0], y], 2), torch.cat([past[1], y * 2], 2))
    return torch.nn.functional.scaled_dot_product_attention(y, k, v), (k, v)


def bias_in_lower_precision(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """A mask that is made where products are rounded, which it would not be outside."""
    k, v = (x * 0.5, x * 2) if past is None else (torch.cat([past[0], x * 0.5], 2), torch.cat([past[1], x * 2], 2))
    with torch.autocast("cpu", torch.bfloat16):
        bias = torch.arange(k.shape[2]).float()[:, None] @ torch.full((1, 1), 0.0173)
    return torch.nn.functional.scaled_dot_product_attention(x, k, v, bias.float().view(1, 1, 1, -1)), (k, v)


def length_in_many_ways(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """Sums, differences, products and quotients of tensors and the length, which can all be had from a tensor."""
    seen = 0 if past is None else past[0].shape[2]
    position = torch.arange(seen, seen + x.shape[2], dtype=torch.int32) * 2
    slow = torch.sub(seen // 3, position.to(torch.int64).view(-1, 1)) + (seen + 5) * 3
    y = x + (slow * 1e-3).cos() + (x[..., :1] * (seen - 1)).sin()
    k, v = (y, y * 2) if past is None else (torch.cat([past[0], y], 2), torch.cat([past[1], y * 2], 2))
    return torch.nn.functional.scaled_dot_product_attention(y, k, v), (k, v)


def one_value_for_all_keys(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """A mask of one value, which would show the keys in front of the row's first, too."""
    seen = 0 if past is None else past[0].shape[2]
    k, v = (x * 0.5, x * 2) if past is None else (torch.cat([past[0], x * 0.5], 2), torch.cat([past[1], x * 2], 2))
    mask = (torch.arange(seen, seen + 1) * 0.1).view(1, 1)
    return torch.nn.functional.scaled_dot_product_attention(x, k, v, mask), (k, v)


def rows_that_are_written_to(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """A slice of a table, which changes with it."""
    seen = 0 if past is None else past[0].shape[2]
    table = torch.zeros(16, 16)
    table[seen : seen + x.shape[2]].copy_(x[0, 0])
    k, v = (x * 0.5, x * 2) if past is None else (torch.cat([past[0], x * 0.5], 2), torch.cat([past[1], x * 2], 2))
    return torch.nn.functional.scaled_dot_product_attention(x + table.sum(0), k, v), (k, v)


def rows_of_the_last_but_one_dimension(x: Tensor, past: Any) -> tuple[Tensor, Any]:
    """A slice of a table, as one that has an ellipsis."""
    seen = 0 if past is None else past[0].shape[2]
    table = torch.linspace(-1, 1, 256).view(1, 16, 16)
    y = x + table[..., seen : seen + x.shape[2], :]
    k, v = (y, y * 2) if past is None else (torch.cat([past[0], y], 2), torch.cat([past[1], y * 2], 2))
    return torch.nn.functional.scaled_dot_product_attention(y, k, v), (k, v)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (cropped_by_top_left, "the causal bound of .* does not move"),
        (rounded_position, "needs the cache's length on the host"),
        (bias_in_lower_precision, "needs the cache's length on the host"),
        (one_value_for_all_keys, "is as long as the cache"),
        (rows_that_are_written_to, "needs the cache's length on the host"),
        (length_in_many_ways, ""),
        (rows_of_the_last_but_one_dimension, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_uses_of_the_length(function: Callable[..., Any], why: str, calls: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(6)
    step = torch.compile(function, backend="paged_inductor", options=MODE)
    past, own = None, None
    for i in range(6):
        x = torch.randn(1, 2, 1 if i else 6, 16)
        with torch.no_grad(), pytest.warns(match=why) if why and i == 2 else contextlib.nullcontext():
            out, past = step(x, past)
        expected, own = function(x, own)
        torch.testing.assert_close(out, expected)
    assert len(calls) == (0 if why else 4)
