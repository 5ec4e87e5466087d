"""The kernels on device tensors against their float64 twins, in poisoned pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paged_inductor import kernels
from paged_inductor.kernels import reference

from .pages import Pages, new_pages, poisoned

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# dtype, query heads, KV heads, (D, Dv), queries, what is asked for
VARIANTS = [
    (BF16, 8, 2, (128, 128), 1, ""),
    (F16, 4, 4, (64, 64), 1, "window"),
    (F32, 6, 2, (64, 64), 3, "causal"),
    (BF16, 8, 1, (80, 80), 16, "causal"),
    (BF16, 4, 2, (192, 128), 1, ""),
    (BF16, 2, 1, (256, 256), 2, "softcap causal"),
    (F16, 8, 2, (64, 64), 1, "sinks window"),
    (BF16, 4, 2, (128, 128), 1, "bool"),
    (F32, 4, 2, (32, 32), 2, "bias"),
    (BF16, 8, 2, (128, 128), 70, "causal"),
    (F16, 4, 2, (64, 64), 33, "window"),
    (F32, 2, 2, (96, 96), 40, "causal"),
    (BF16, 4, 1, (128, 128), 40, "bias sinks"),
    (BF16, 4, 2, (256, 256), 20, "softcap causal"),
]


def lengths(device: torch.device, queries: int) -> list[int]:
    """Ragged rows; on a GPU long enough for many splits."""
    return [4100, 700, 17, 2048] if device.type == "cuda" else [max(45, queries + 5), 12]


def options(asked: str, q: Tensor, kv_len: int) -> dict[str, Any]:
    """The arguments of an attention call for the words of a variant."""
    batch, heads, queries, _ = q.shape
    generator = torch.Generator().manual_seed(1)
    given: dict[str, Any] = {"scale": q.shape[3] ** -0.5}
    if "causal" in asked or "window" in asked:
        given["causal_offset"] = kv_len - queries
    if "window" in asked:
        given["window"] = max(9, kv_len // 3)
    if "softcap" in asked:
        given["softcap"] = 5.0
    if "sinks" in asked:
        given["sinks"] = torch.randn(heads, generator=generator).mul(3).to(q)
    if "bool" in asked:
        given["mask"] = torch.rand(batch, 1, queries, kv_len, generator=generator).to(q.device) < 0.6
    if "bias" in asked:
        given["mask"] = torch.randn(1, heads, queries, kv_len, generator=generator).to(q)
    return given


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dims", "queries", "asked"), VARIANTS, ids=str)
def test_attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    queries: int,
    asked: str,
    device: torch.device,
) -> None:
    pages = new_pages(lengths(device, queries), kv_heads, dims, dtype, device)
    q = torch.randn(len(pages.seq_lens), heads, queries, dims[0], device=device).to(dtype)
    given = options(asked, q, pages.kv_len)
    out = kernels.attention(q, *pages.arguments, **given, allocate=poisoned)
    want = reference.attention(q, *pages.arguments, **given, compute_dtype=torch.float64)
    torch.testing.assert_close(out, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def row(pages: Pages, i: int) -> tuple[Any, ...]:
    """One row's arguments in a batch of its own."""
    length = int(pages.seq_lens[i])
    table = pages.block_table[i : i + 1, : -(-length // pages.k_arena.shape[2])].contiguous()
    return pages.k_arena, pages.v_arena, table, pages.seq_lens[i : i + 1], length


@pytest.mark.parametrize(("dtype", "queries"), [(BF16, 1), (F32, 4)], ids=str)
def test_deterministic_attention_depends_on_a_row_alone(dtype: torch.dtype, queries: int, device: torch.device) -> None:
    pages = new_pages(lengths(device, queries), 2, (128, 128), dtype, device)
    q = torch.randn(len(pages.seq_lens), 8, queries, 128, device=device).to(dtype)
    fixed = {"scale": 0.1, "deterministic": True, "allocate": poisoned}
    together = kernels.attention(q, *pages.arguments, **fixed)
    assert torch.equal(kernels.attention(q, *pages.arguments, **fixed), together)
    for i in range(len(pages.seq_lens)):
        assert torch.equal(kernels.attention(q[i : i + 1], *row(pages, i), **fixed)[0], together[i])


@pytest.mark.parametrize("count", [1, 37])
def test_writes(count: int, device: torch.device) -> None:
    pages = new_pages([100, 40, 37], 2, (64, 48), torch.bfloat16, device)
    new = [torch.randn(3, 2, count, dim, device=device).to(torch.bfloat16) for dim in (64, 48)]
    twins = [pages.k_arena.clone(), pages.v_arena.clone()]
    kernels.cache_write_kv(pages.k_arena, pages.v_arena, *new, pages.block_table, pages.seq_lens)
    reference.cache_write_kv(*twins, *new, pages.block_table, pages.seq_lens)
    for arena, twin in zip((pages.k_arena, pages.v_arena), twins):
        assert torch.equal(arena.view(torch.int16), twin.view(torch.int16))


def test_copies_and_gathers(device: torch.device) -> None:
    pages = new_pages([100, 40], 2, (64, 64), torch.float16, device)
    got = kernels.gather(*pages.arguments[1:2], pages.block_table, pages.seq_lens, 90, allocate=poisoned)
    assert torch.equal(got, reference.gather(pages.v_arena, pages.block_table, pages.seq_lens, 90))
    twin = pages.k_arena.clone()
    sources, destinations = (torch.tensor(ids, device=device) for ids in ([1, 2], [5, 3]))
    kernels.copy_blocks(pages.k_arena, sources, destinations)
    reference.copy_blocks(twin, sources, destinations)
    assert torch.equal(pages.k_arena.view(torch.int16), twin.view(torch.int16))


def test_offsets_past_int32(device: torch.device) -> None:
    """A pool of more than 2**31 elements."""
    if device.type == "cpu":
        pytest.skip("in tests/kernels")
    last = 2**21 + 1
    if torch.cuda.mem_get_info(device)[0] < last * 4200:
        pytest.skip("takes 8.3 GiB of device memory")
    arena = torch.zeros(last + 1, 8, 16, 16, dtype=torch.float16, device=device)
    table = torch.tensor([[last]], dtype=torch.int32, device=device)
    lens = torch.tensor([5], dtype=torch.int32, device=device)
    new = torch.randn(1, 8, 5, 16, device=device).half()
    kernels.cache_write(arena, new, table, lens)
    assert torch.equal(kernels.gather(arena, table, lens, 5), new)
    out = kernels.attention(new[:, :, :1], arena, arena, table, lens, 5, scale=0.25)
    want = reference.attention(new[:, :, :1], arena, arena, table, lens, 5, scale=0.25)
    torch.testing.assert_close(out, want, rtol=3e-3, atol=3e-3)
