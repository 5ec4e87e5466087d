"""Shared prefixes end to end: the tokens are the dense model's, and blocks are shared exactly where they may be."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import paged_inductor
from paged_inductor.runtime import manager
from paged_inductor.runtime.tenants import Tenant
from paged_inductor.weights import Weights
from tests.models.zoo import Decoder, Form, generate

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_numbers = itertools.count()


def llama() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, **sizes, **heads))


def gpt2() -> transformers.PreTrainedModel:
    """Its attention is written by hand."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    config = transformers.GPT2Config(**COMMON, **sizes, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(config)


class tenant:
    """A tenant of a name that no other test uses."""

    def __init__(self, share: str, **options: Any) -> None:
        self.name = f"prefixes {next(_numbers)}"
        self._context = paged_inductor.tenant(self.name, share=share, **options)

    def __enter__(self) -> Tenant:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 61, (1, count), generator=torch.Generator().manual_seed(seed))


def hits() -> int:
    return paged_inductor.stats().prefix_hits


def blocks(past: Any) -> list[list[int]]:
    """The blocks of each row of a cache."""
    layer = past.layers[0].keys if hasattr(past, "layers") else past[0][0]
    return [list(row.blocks) for row in layer._view.rows]


@pytest.fixture
def decoder() -> tuple[Decoder, Decoder]:
    """A dense decoder, and a paged one."""
    torch.manual_seed(0)
    model = Decoder(Form())
    return model, paged_inductor.page(copy.deepcopy(model), inner="eager")  # type: ignore[return-value]


class Pair:
    """A dense model of transformers, and a paged one that must give the same tokens."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.dense = model.eval()
        self.paged = paged_inductor.page(copy.deepcopy(model), inner="eager")

    def generate(self, ids: Tensor, new_tokens: int = 6, **options: Any) -> tuple[Any, int]:
        """The paged model's result, and how many tokens of prompts were found."""
        options = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True, **options}
        before = hits()
        got = self.paged.generate(ids, **options)
        assert torch.equal(got.sequences, self.dense.generate(ids, **options).sequences)
        return got, hits() - before


@pytest.mark.filterwarnings("ignore")
def test_generate_does_not_compute_what_is_cached() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    prompt = tokens(43)
    with tenant("tenant"):
        first, found = pair.generate(prompt)
        assert found == 0
        second, found = pair.generate(prompt)
        assert found == 42  # one token must be computed
        assert blocks(second.past_key_values)[0][:2] == blocks(first.past_key_values)[0][:2]
        found = pair.generate(torch.cat([prompt[:, :21], tokens(9, 1)], 1))[1]
        assert found == 21  # also in the middle of a block
        answer = first.sequences
        del first, second
        assert paged_inductor.stats().blocks_used == 0
        found = pair.generate(torch.cat([answer, tokens(9, 2)], 1))[1]  # the next turn, after the cache was dropped
        assert found == 48
        assert pair.generate(prompt, num_beams=2)[1] == 2 * 42
        options = {"output_hidden_states": True}  # all positions are asked for
        assert pair.generate(prompt, **options)[1] == 0


@pytest.mark.filterwarnings("ignore")
def test_the_partly_filled_block_of_a_dropped_cache_is_found() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    with tenant("tenant"):
        first = pair.generate(tokens(37))[0]
        said = first.sequences  # 43 tokens, of which the last one was not given to the model
        last = blocks(first.past_key_values)[0][2]
        del first
        books = paged_inductor.stats()
        assert (books.blocks_used, books.cached_blocks) == (0, 3)
        again, found = pair.generate(torch.cat([said, tokens(9, 1)], 1))
        assert found == 42
        assert blocks(again.past_key_values)[0][2] != last  # it was copied, not written to
        assert pair.generate(torch.cat([said[:, :40], tokens(9, 2)], 1))[1] == 40  # and still says what it said
        assert pair.generate(torch.cat([tokens(32), tokens(5, 3)], 1))[1] == 32
        assert pair.generate(said.repeat(2, 1))[1] == 2 * 42
        del again
        before = paged_inductor.stats().cached_blocks
        assert pair.generate(torch.cat([said, tokens(9, 1)], 1))[1] == 51
        assert paged_inductor.stats().cached_blocks == before  # what is known is not kept twice
    with tenant("system"):
        assert pair.generate(said)[1] == 0
    assert paged_inductor.stats().cached_blocks == before
    paged_inductor.check_integrity()
    paged_inductor.reset()
    assert paged_inductor.stats().cached_blocks == 0


def test_nothing_is_known_after_a_reset(decoder: tuple[Decoder, Decoder]) -> None:
    _, paged = decoder
    with tenant("tenant"):
        _, past = generate(paged, tokens(40), 1)
        _, other = generate(paged, tokens(40, 1), 1)
        del other
        gc.collect()
        assert paged_inductor.stats().cached_blocks == 3
        paged_inductor.reset()
        del past
        assert paged_inductor.stats().cached_blocks == 0


@pytest.mark.filterwarnings("ignore")
def test_generate_with_attention_written_by_hand() -> None:
    torch.manual_seed(0)
    pair = Pair(gpt2())
    with tenant("tenant"):
        assert [pair.generate(tokens(43))[1] for _ in range(2)] == [0, 42]


def answer(model: Any, ids: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Any]:
    """All tokens of an ordinary loop around a model of transformers, and its cache."""
    with torch.no_grad():
        out = model(ids, *args, **options)
        cache = out.past_key_values
        for _ in range(6):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], 1)
            out = model(token, past_key_values=cache)
            assert out.past_key_values is cache
    return ids, cache


@pytest.mark.filterwarnings("ignore")
def test_outputs_of_every_position_are_whole() -> None:
    """Asked for where no argument tells: in the model's configuration."""
    torch.manual_seed(0)
    pair = Pair(llama())
    options = {"use_cache": True, "logits_to_keep": 1}
    with tenant("tenant"), torch.no_grad():
        for _ in range(2):
            pair.paged(tokens(43), **options)
        assert hits() == 42
        for model in (pair.paged, pair.dense):
            model.config.output_hidden_states = True
        for _ in range(2):
            got, expected = (model(tokens(43), **options).hidden_states for model in (pair.paged, pair.dense))
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"use_cache": True}, {}, {"attention_mask": torch.ones(1, 43, dtype=torch.int64)}])
def test_a_loop_whose_model_makes_the_cache_does_not_compute_what_is_cached(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    found = []
    with tenant("tenant"):
        for prompt in (tokens(43), tokens(43), torch.cat([tokens(21), tokens(22, 1)], 1)):
            before = hits()
            got, cache = answer(pair.paged, prompt, logits_to_keep=1, **options)
            expected, other = answer(pair.dense, prompt, logits_to_keep=1, **options)
            assert torch.equal(got, expected)
            assert type(cache) is type(other) and len(cache.layers) == 2
            found.append(hits() - before)
            queried = paged_inductor.stats().prefix_queries
            del cache
        assert found == [0, 42, 21]
        assert paged_inductor.stats().blocks_used == 0  # the empty cache that is kept holds nothing
        if options:  # every logit is wanted, or no cache
            for others in ({}, {"logits_to_keep": 1, "use_cache": False}):
                got = pair.paged(tokens(43), **{**options, **others})
                torch.testing.assert_close(got.logits, pair.dense(tokens(43), **{**options, **others}).logits)
            assert paged_inductor.stats().prefix_queries == queried


@pytest.mark.filterwarnings("ignore")
def test_generate_and_loops_share() -> None:
    """One passes position ids, the other one lets the model count them."""
    torch.manual_seed(0)
    pair = Pair(llama())
    assert paged_inductor.register_prefix(pair.paged, tokens(40)) == 32
    with tenant("tenant"):
        first = pair.generate(tokens(40))[0].past_key_values
        got, other = answer(pair.paged, tokens(40), logits_to_keep=1)
        assert torch.equal(got, answer(pair.dense, tokens(40))[0])
        assert blocks(first)[0][:2] == blocks(other)[0][:2]
        del first
        before = hits()
        got, _ = answer(pair.paged, torch.cat([tokens(32), tokens(9, 1)], 1), logits_to_keep=1)
        assert torch.equal(got, answer(pair.dense, torch.cat([tokens(32), tokens(9, 1)], 1))[0])
        assert hits() - before == 32
        shifted = {"position_ids": torch.arange(3, 43)[None]}
        got, third = answer(pair.paged, tokens(40), logits_to_keep=1, **shifted)
        assert torch.equal(got[:, :41], answer(pair.dense, tokens(40), **shifted)[0][:, :41])
        assert not set(blocks(third)[0]) & set(blocks(other)[0])


@pytest.mark.filterwarnings("ignore")
def test_an_empty_cache_without_layers_is_filled() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    prompt = tokens(43)
    with tenant("tenant"):
        for expected in (0, 42, 42):
            before = hits()
            got, cache = answer(pair.paged, prompt, None, None, transformers.DynamicCache(), logits_to_keep=1)
            assert torch.equal(got, answer(pair.dense, prompt)[0])
            assert hits() - before == expected
        pair.paged.model.layers[0].self_attn.scaling = pair.dense.model.layers[0].self_attn.scaling = 3.0
        cache = transformers.DynamicCache()
        got, _ = answer(pair.paged, prompt, past_key_values=cache, logits_to_keep=1)  # begun anew
        assert torch.equal(got, answer(pair.dense, prompt)[0])
        assert cache.get_seq_length() == 49 and len(cache.layers) == 2


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "Falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},  # it picks heads by a list
    "GptOss": {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2, **EXPERTS},
    "Mixtral": {"num_key_value_heads": 2, "intermediate_size": 48, **EXPERTS},
    "Phi3": {"num_key_value_heads": 2, "intermediate_size": 48},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_models_with_experts_or_writes_in_place_share(name: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, name + "Config")(**COMMON, **sizes, **OTHERS[name])
    pair = Pair(getattr(transformers, name + "ForCausalLM")(config))
    with tenant("tenant"):
        assert [pair.generate(tokens(43))[1] for _ in range(2)] == [0, 42]
        assert pair.generate(torch.cat([tokens(21), tokens(9, 1)], 1))[1] == 21
        if name == "GptOss":
            with torch.no_grad():
                for model in (pair.dense, pair.paged):
                    model.model.layers[0].mlp.experts.gate_up_proj_bias.add_(1)  # what is added in place
            assert [pair.generate(tokens(43))[1] for _ in range(2)] == [0, 42]


@pytest.mark.filterwarnings("ignore")
def test_generate_with_padding() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    with tenant("tenant"):
        batch = tokens(43).repeat(2, 1)
        mask = torch.ones_like(batch)
        mask[0, :5] = 0
        assert pair.generate(batch, attention_mask=mask)[1] == 0
        assert pair.generate(batch, attention_mask=mask)[1] == 2 * 42
        other = torch.cat([batch[:, :37], tokens(6, 1).repeat(2, 1)], 1)
        assert pair.generate(other, attention_mask=mask)[1] == 2 * 37
        mask[0, 5] = 0
        assert pair.generate(batch, attention_mask=mask)[1] == 2 * 5  # the hidden tokens that it had before


def gemma3() -> transformers.PreTrainedModel:
    """A layer with a window and one without: two groups of equal layers, whose blocks come from one pool."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 8}
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**COMMON, **sizes, **heads, layer_types=layers)
    return transformers.Gemma3ForCausalLM(config)


@pytest.mark.filterwarnings("ignore")
def test_layers_of_two_groups_do_not_take_each_others_blocks() -> None:
    torch.manual_seed(0)
    pair = Pair(gemma3())
    kept = []
    with tenant("tenant"):
        for _ in range(2):
            kept.append(pair.generate(tokens(40))[0].past_key_values)
    first, second = ([layer.keys._view.rows[0].blocks for layer in cache.layers] for cache in kept)
    assert first[1][:2] == second[1][:2]  # the layer that keeps all shares its full blocks
    assert not set(first[0]) & {*first[1], *second[1]}


def test_memory_that_another_tensor_had_before_is_another_weight() -> None:
    """`tensor.data = ...` keeps the tensor and its version, and may well come by an address that it had before."""
    weight = torch.nn.Parameter(torch.zeros(16, 32))
    weights = Weights({"weight": 0})
    seen, addresses = set(), set()
    for _ in range(20):
        weight.data = torch.zeros(16, 32)
        addresses.add(weight.data_ptr())
        seen.add(weights.digest([weight]))
        assert weights.digest([weight]) in seen
        assert Weights({"weight": 0}).digest([weight]) in seen
    assert len(seen) == 20
    if len(addresses) == 20:
        pytest.skip("no address came twice")


def test_memory_that_weights_gave_up_is_neither_kept_nor_read() -> None:
    weight, other = (torch.nn.Parameter(torch.randn(32, 32)) for _ in range(2))
    weights = Weights({"weight": 0, "other": 1})
    given = [weight, other]
    first = weights.digest(given)
    storage = StorageWeakRef(weight.untyped_storage())
    weight.data = torch.zeros(4, 4)
    assert storage.expired()
    assert weights.digest(given) != first
    size = other.untyped_storage().nbytes()
    other.untyped_storage().resize_(0)
    weights.look(given)
    assert weights.digest(given) is not None
    other.untyped_storage().resize_(size)
    weights.look(given)
    assert weights.digest(given) is not None


@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_merged_into_their_data_are_others() -> None:
    """As PEFT merges its adapters: torch does not count these writes."""
    torch.manual_seed(0)
    pair = Pair(llama())
    prompt, delta = tokens(43), torch.randn(16, 32)

    def merge(sign: int) -> None:
        for model in (pair.dense, pair.paged):
            model.model.layers[0].self_attn.v_proj.weight.data += sign * delta

    with tenant("tenant"):
        assert [pair.generate(prompt)[1] for _ in range(2)] == [0, 42]
        merge(1)
        assert [pair.generate(prompt)[1] for _ in range(2)] == [0, 42]
        with torch.no_grad():
            past = pair.paged(prompt).past_key_values
        named = [len(row.names.digests) for row in past.layers[0].keys._view.rows]
        merge(1)
        with torch.no_grad():
            for token in tokens(30, 5)[0]:
                past = pair.paged(token[None, None], past_key_values=past).past_key_values
        assert [len(row.names.digests) for row in past.layers[0].keys._view.rows] == named
        merge(-2)
        pair.generate(torch.cat([prompt, tokens(30, 5)], 1))


def test_a_sample_of_weights() -> None:
    """Of any dtype and layout; what is looked at is the memory as it is now."""
    parts = [
        torch.randn(7, 5),
        torch.randn(7, 5).t(),
        torch.randn(1, 5).expand(7, 5),
        torch.randn(()),
        torch.zeros(0, 3),
        torch.randn(64).to(torch.float8_e4m3fn),
        torch.zeros(9, dtype=torch.bool),
        torch.randn(8, 8, dtype=torch.bfloat16)[:, ::2],
    ]
    weights = Weights({str(i): i for i in range(len(parts))})
    first = weights.digest(parts)
    for part in parts:
        weights.look(parts)
        assert weights.digest(parts) == first
        if part.numel():
            before = part.data.clone()
            part.data.view(-1)[:1].fill_(1) if part.is_contiguous() else part.data[:1, :1].fill_(1)
            weights.look(parts)
            assert weights.digest(parts) != first
            part.data.copy_(before) if part.stride() != (0, 1) else part.data[:1].copy_(before[:1])
    weights.look(parts)
    assert weights.digest(parts) == first


@pytest.mark.filterwarnings("ignore")
def test_other_weights_are_another_model() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    prompt = tokens(43)
    with tenant("tenant"):
        pair.generate(prompt)
        for model in (pair.dense, pair.paged):
            with torch.no_grad():
                model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        assert pair.generate(prompt)[1] == 0
        assert pair.generate(prompt)[1] == 42
        for model in (pair.dense, pair.paged):
            weight = model.model.layers[1].self_attn.v_proj.weight
            model.model.layers[1].self_attn.v_proj.weight = torch.nn.Parameter(weight * 1.5)
        # the weights that are known are gone: what was found is not used, as the tokens tell
        pair.generate(prompt)
        pair.generate(prompt)
        for model in (pair.dense, pair.paged):
            model.model.layers[1].self_attn.k_proj.weight.data.mul_(1.5)
        assert pair.generate(prompt)[1] == 0
        for model in (pair.dense, pair.paged):
            model.model.layers[1].self_attn.k_proj.weight.data[5, 1:3] = 2.0  # the sample does not see it
        paged_inductor.forget_prefixes()
        assert pair.generate(prompt)[1] == 0
        for model in (pair.dense, pair.paged):
            model.model.layers[0].self_attn.scaling *= 3  # no weight, but another way to compute
        pair.generate(prompt)
        for model in (pair.dense, pair.paged):
            with torch.no_grad():
                model.lm_head.weight.mul_(-1)  # no key and no value depends on it
        assert pair.generate(prompt)[1] == 42


@pytest.mark.filterwarnings("ignore")
def test_registered_prefixes() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    system = tokens(40)
    assert paged_inductor.register_prefix(pair.paged, system[0]) == 32
    mine = torch.cat([system, tokens(20, 1)], 1)
    with tenant("system"):
        assert pair.generate(mine)[1] == 32
        assert pair.generate(mine)[1] == 32  # its own tokens are not kept
    with tenant("global"):
        assert pair.generate(mine)[1] == 32
        assert pair.generate(mine)[1] == 59
    with tenant("system", salt="other"):
        assert pair.generate(mine)[1] == 0
    with tenant("none"):
        assert pair.generate(mine)[1] == 0
    assert paged_inductor.register_prefix(pair.paged, system) == 32
    with pytest.raises(paged_inductor.PrefixError, match="none of these 9 tokens can be kept"):
        paged_inductor.register_prefix(pair.paged, tokens(9))
    with pytest.raises(paged_inductor.PrefixError, match=r"of shape \[2, 40\]"):
        paged_inductor.register_prefix(pair.paged, system.repeat(2, 1))


@pytest.mark.filterwarnings("ignore")
def test_a_text_is_registered_as_the_ids_of_prompts_that_begin_with_it() -> None:
    torch.manual_seed(0)
    pair = Pair(llama())
    words = {"<s>": 1, **{f"w{i}": i for i in range(2, 60)}}
    slow = Tokenizer(WordLevel(words, unk_token="<s>"))
    slow.pre_tokenizer = Whitespace()
    slow.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=slow)
    system = " ".join(f"w{i}" for i in range(2, 41))
    prompt = fast(system + " w50 w51", return_tensors="pt").input_ids
    assert prompt[0, :3].tolist() == [1, 2, 3]  # with the special token
    for passed, tokenizer in [
        (system, fast),
        (system, slow),  # has `encode` only, which returns an object
        (system, fast.encode),
        (fast(system), None),
        (fast(system, return_tensors="pt"), None),
    ]:
        paged_inductor.reset()
        assert paged_inductor.register_prefix(pair.paged, passed, tokenizer=tokenizer) == 32
        with tenant("system"):
            assert pair.generate(prompt)[1] == 32
    with pytest.raises(paged_inductor.PrefixError, match="got text, and no tokenizer"):
        paged_inductor.register_prefix(pair.paged, system)


def test_loops_that_pass_the_whole_prompt_share_the_memory(decoder: tuple[Decoder, Decoder]) -> None:
    dense, paged = decoder
    prompt = tokens(40)
    with tenant("tenant"):
        (first, past), (second, other) = generate(paged, prompt, 5), generate(paged, prompt, 5)
        third, chunked = generate(paged, prompt, 5, (7, 20))
    expected, _ = generate(dense, prompt, 5)
    assert torch.equal(first, expected) and torch.equal(second, expected) and torch.equal(third, expected)
    full = blocks(past)[0][:2]
    assert blocks(other)[0][:2] == full == blocks(chunked)[0][:2]
    assert len({blocks(p)[0][2] for p in (past, other, chunked)}) == 3
    assert paged_inductor.stats().blocks_used == 2 + 3


def test_rows_of_one_batch_share_also_where_nothing_is_kept(decoder: tuple[Decoder, Decoder]) -> None:
    dense, paged = decoder
    prompt = torch.cat([tokens(40), tokens(40), tokens(40, 1)])
    with tenant("none"):
        got, past = generate(paged, prompt, 3)
        first, second, third = blocks(past)
        assert first[:2] == second[:2]
        assert not {*first, *second} & set(third)
        _, other = generate(paged, prompt, 3)
        assert not {b for row in blocks(past) for b in row} & {b for row in blocks(other) for b in row}
    assert torch.equal(got, generate(dense, prompt, 3)[0])
    del past, other
    assert paged_inductor.stats().cached_blocks == 0


def test_salts_and_policies_separate_tenants(decoder: tuple[Decoder, Decoder]) -> None:
    _, paged = decoder
    prompt = tokens(40)
    held: dict[str, list[int]] = {}
    kept = []
    for name, share, salt in [
        ("mine", "tenant", None),
        ("yours", "tenant", None),
        ("global", "global", None),
        ("global too", "global", None),
        ("global, salted", "global", "x"),
        ("system", "system", None),
        ("none", "none", None),
    ]:
        with tenant(share, salt=salt) as who:
            _, past = generate(paged, prompt, 2)
            kept.append((past, who))
            held[name] = blocks(past)[0]
    assert held.pop("global too")[:2] == held["global"][:2]
    for one, other in itertools.combinations(held.values(), 2):
        assert not set(one) & set(other)
    size = kept[0][0][0][0]._view.group.block_bytes
    used = [who.used // size for _, who in kept]
    assert used == [3, 3, 1, 1, 3, 3, 3]  # two blocks are charged to nobody in particular
    books = paged_inductor.stats()
    assert manager().tenants.common.used == books.bytes_common == 2 * size
    parts = [books.tenants[who.name].bytes_common for _, who in kept]
    assert parts == [0, 0, size, size, 0, 0, 0]  # charged once, fairly
    samples = {
        sample.labels.get("tenant"): sample.value
        for family in paged_inductor.MetricsCollector().collect()
        for sample in family.samples
        if sample.name == "paged_inductor_tenant_common_bytes"
    }
    assert [samples[who.name] for _, who in kept] == parts
    alone = kept.pop(3)[1].name
    assert paged_inductor.stats().tenants[alone].bytes_common == 0
    assert paged_inductor.stats().tenants[kept[2][1].name].bytes_common == 2 * size  # whoever is left has it all


@pytest.mark.filterwarnings("ignore")
def test_what_is_shared_is_not_overwritten(decoder: tuple[Decoder, Decoder]) -> None:
    """By writes into a cache, and by what is appended to a shorter one."""
    dense, paged = decoder
    prompt = tokens(32)
    with tenant("tenant"), torch.no_grad():
        _, past = paged(prompt)
        _, other = paged(prompt)
        assert blocks(past) == blocks(other)
        before = other[0][0].dense()
        past[0][0][:, :, 3] = 7.0
        past[0][0].zero_()
        assert torch.equal(other[0][0].dense(), before)
        del past, other
        _, again = paged(prompt)
        assert torch.equal(again[0][0].dense(), before)
        short = [tuple(tensor[:, :, :20] for tensor in layer) for layer in again]
        del again
        logits, longer = paged(prompt[:, :5], short)  # in the middle of a block that has a name
        _, once_more = paged(prompt)
        assert torch.equal(once_more[0][0].dense(), before)
        expected, _ = dense(torch.cat([prompt[:, :20], prompt[:, :5]], 1))
        torch.testing.assert_close(logits, expected[:, 20:], rtol=1e-3, atol=1e-3)
        assert blocks(longer)[0][0] == blocks(once_more)[0][0]


def test_cached_blocks_give_way_when_memory_is_short(decoder: tuple[Decoder, Decoder]) -> None:
    dense, paged = decoder
    with tenant("tenant"):
        _, past = generate(paged, tokens(40), 1)
        size = past[0][0]._view.group.block_bytes
        del past
        paged_inductor.reset()
        paged_inductor.configure(kv_budget=8 * size)
        for seed in (0, 1, 2, 1, 3, 0):
            got, past = generate(paged, tokens(40, seed), 3)
            assert torch.equal(got, generate(dense, tokens(40, seed), 3)[0])
            books = paged_inductor.stats()
            assert books.blocks_used + books.cached_blocks <= 8
        assert books.evictions > 0
        assert books.cached_blocks > 0
        with pytest.raises(paged_inductor.KVBudgetExceeded):
            generate(paged, tokens(200), 1)


def test_threads_share_while_memory_is_short(decoder: tuple[Decoder, Decoder]) -> None:
    dense, paged = decoder
    prompts = [tokens(48, 7)[:, :n] for n in (20, 48)] + [torch.cat([tokens(32, 7), tokens(12, n)], 1) for n in (8, 9)]
    expected = [generate(dense, prompt, 6)[0] for prompt in prompts]
    _, past = generate(paged, prompts[0], 1)
    paged_inductor.configure(kv_budget=17 * past[0][0]._view.group.block_bytes)
    del past

    def work(first: int) -> list[bool]:
        with paged_inductor.tenant(f"thread {first % 2}", share="global", salt="threads"):
            order = [(first + i) % len(prompts) for i in range(6)]
            return [torch.equal(generate(paged, prompts[i], 6)[0], expected[i]) for i in order]

    with ThreadPoolExecutor(4) as pool:
        assert all(all(same) for same in pool.map(work, range(4)))
    assert paged_inductor.stats().cached_blocks > 0


PROMPTS = [tokens(48, 7)[:, :n] for n in (5, 17, 32, 48)] + [
    torch.cat([tokens(48, 7)[:, :n], tokens(20, 8)], 1) for n in (10, 16, 33)
]


@given(st.lists(st.tuples(st.sampled_from(range(7)), st.sampled_from(["a", "b", "c"]), st.booleans()), max_size=8))
@settings(max_examples=max(6, settings.default.max_examples // 8))
def test_any_calls_of_several_tenants_give_the_dense_models_tokens(calls: list[tuple[int, str, bool]]) -> None:
    dense, paged, expected = _known_answers()
    paged_inductor.reset()
    paged_inductor.configure(kv_budget=14 * 16 * 256)
    kept: list[tuple[str, Any]] = []
    shares = {"a": ("global", "1"), "b": ("global", "2"), "c": ("tenant", "1")}
    for which, name, keep in calls:
        share, salt = shares[name]
        with paged_inductor.tenant(f"drawn {name}", share=share, salt=salt):
            try:
                got, past = generate(paged, PROMPTS[which], 4)
            except paged_inductor.KVBudgetExceeded:
                kept.clear()
                continue
        assert torch.equal(got, expected[which])
        if keep:
            kept.append((name, past))
        del past
        paged_inductor.check_integrity()
        for (one, mine), (other, yours) in itertools.combinations(kept, 2):
            assert one == other or not set(blocks(mine)[0]) & set(blocks(yours)[0])


_answers: list[Any] = []


def _known_answers() -> tuple[Decoder, Decoder, list[Tensor]]:
    if not _answers:
        torch.manual_seed(0)
        dense = Decoder(Form())
        paged = paged_inductor.page(copy.deepcopy(dense), inner="eager")
        _answers.extend((dense, paged, [generate(dense, prompt, 4)[0] for prompt in PROMPTS]))
    return _answers[0], _answers[1], _answers[2]


@pytest.fixture(autouse=True)
def no_answers() -> Iterator[None]:
    yield
    _answers.clear()
