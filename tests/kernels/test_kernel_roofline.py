"""The model of bytes against the kernels themselves: the sanitizer sees every address that they touch."""

from collections.abc import Iterator

import pytest
import torch

from paged_cases import PagedBatch, build
from paged_inductor import kernels
from paged_inductor.kernels import decode, roofline
from paged_inductor.kernels.launch import LaunchConfig
from paged_inductor.kernels.problem import attention_problem
from paged_inductor.kernels.roofline import GPUS, Layer, Work
from tests.kernel_sanitizer import KernelSanitizer, Traffic

BLOCK, DIM, V_DIM, HEADS = 8, 16, 24, 2


@pytest.fixture
def traffic(kernel_sanitizer: KernelSanitizer) -> Iterator[Traffic]:
    with kernel_sanitizer.traffic() as traffic:
        yield traffic


def layer(group: int = 1, itemsize: int = 4) -> Layer:
    return Layer(HEADS * group, HEADS, DIM, V_DIM, (DIM + V_DIM) * itemsize, itemsize, BLOCK)


def batch(lengths: list[int], dtype: torch.dtype = torch.float32) -> PagedBatch:
    return build(lengths, heads=HEADS, dim=DIM, v_dim=V_DIM, block_size=BLOCK, dtype=dtype)


@pytest.mark.parametrize(
    ("lengths", "q_len", "window"),
    [([40], 1, None), ([33, 7], 1, None), ([50, 9], 3, 12), ([40, 20], 18, None), ([45], 20, 9)],
)
def test_attention_touches_what_the_model_says(
    lengths: list[int], q_len: int, window: int | None, traffic: Traffic
) -> None:
    pages = batch(lengths)
    offset = max(lengths) - q_len
    kernels.attention(pages.queries(3, q_len), *pages.pages, scale=0.3, causal_offset=offset, window=window)
    work = roofline.attention(layer(group=3), lengths, q_len, window=window)
    assert traffic.bytes == (work.bytes_read, work.bytes_written)


def test_split_decode_touches_its_scratch_too(traffic: Traffic) -> None:
    pages = batch([40, 25], torch.float16)
    q = pages.queries(2, 1)
    problem = attention_problem(q, *pages.pages, 0.3, None, None, None)
    out = torch.empty(problem.out_shape, dtype=q.dtype)
    for launch in decode.plan(problem, out, LaunchConfig(16, 16, 4, 1), 2, torch.empty):
        launch.run()
    half = layer(group=2, itemsize=2)
    work = roofline.attention(half, [40, 25], 1) + roofline.split_scratch(half, 2, 1, 2)
    assert traffic.bytes == (work.bytes_read, work.bytes_written)
    assert roofline.split_scratch(half, 2, 1, 1) == Work(0, 0)


@pytest.mark.parametrize(("lengths", "count"), [([17, 9], 1), ([16, 8], 1), ([30, 5], 12), ([9], 0)])
def test_a_write_touches_what_the_model_says(lengths: list[int], count: int, traffic: Traffic) -> None:
    pages = batch(lengths)
    new = [torch.randn(len(lengths), HEADS, count, dim) for dim in (DIM, V_DIM)]
    kernels.cache_write_kv(pages.k_arena, pages.v_arena, *new, pages.block_table, pages.seq_lens)
    work = roofline.cache_write(layer(), lengths, count)
    assert traffic.bytes == (work.bytes_read, work.bytes_written)


def test_a_copy_touches_what_the_model_says(traffic: Traffic) -> None:
    arena = batch([40]).k_arena
    kernels.copy_blocks(arena, torch.tensor([1, 2]), torch.tensor([3, 4]))
    work = roofline.copy_blocks(HEADS * BLOCK * DIM * 4, 2)
    assert traffic.bytes == (work.bytes_read, work.bytes_written)


def test_a_gather_touches_what_the_model_says(traffic: Traffic) -> None:
    pages = batch([30, 11])
    kernels.gather(pages.v_arena, pages.block_table, pages.seq_lens, 26)
    work = roofline.gather(V_DIM * 4, HEADS, [30, 11], 26, BLOCK)
    assert traffic.bytes == (work.bytes_read, work.bytes_written)


def test_counts_of_a_case_done_by_hand() -> None:
    """2 rows of 1000 and 24 tokens, heads 32/8 x 128, bfloat16, one query, blocks of 16."""
    work = roofline.attention(Layer.plain(32, 8, 128, 2), [1000, 24], 1)
    keys_and_values = 1024 * 8 * 128 * 2 * 2
    queries = 2 * 32 * 128 * 2
    assert work == Work(keys_and_values + queries + (63 + 2 + 2) * 4, queries, 2 * 1024 * 32 * 256)
    assert roofline.attention(Layer.plain(1, 1, 64, 2), [3], 3).flops == 2 * 6 * 128  # a triangle of six pairs
    assert roofline.attention(Layer.plain(1, 1, 64, 2), [3], 3, causal=False).flops == 2 * 9 * 128


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    h200 = GPUS["H200"]
    model = Layer.plain(32, 8, 128, 2)
    decode_step = roofline.attention(model, [65536], 1)
    assert roofline.floor_seconds(decode_step, h200, torch.bfloat16) == decode_step.bytes / 4.8e12
    prompt = roofline.attention(model, [65536], 65536)
    assert roofline.floor_seconds(prompt, h200, torch.bfloat16) == prompt.flops / 989.4e12
