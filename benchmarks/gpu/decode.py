"""Decode: bytes per second against a device-to-device copy, and time against dense SDPA; shared prefixes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_inductor import kernels
from paged_inductor.kernels import roofline

from .bench import Bench, Cell, NotMeasured, microseconds, rate, ratio, require_close
from .pages import Pages, dense, has_option, new_pages

__all__ = [
    "CASES",
    "SHARED",
    "TINY",
    "TINY_SHARED",
    "Case",
    "Shared",
    "copy_bandwidth",
    "layer_of",
    "run",
    "run_shared",
]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    kv: str = "bfloat16"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Shared:
    """`batch` rows that share `shared` of their `context` tokens."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    shared: int
    dtype: str = "bfloat16"


CASES = [
    Case(heads, 8, 128, batch, context, kv)
    for heads, batch, context, kv in itertools.product(
        (32, 64), (8, 64, 1), (8192, 32768, 1024, 131072), ("bfloat16", "float8_e4m3fn")
    )
]
SHARED = [Shared(32, 8, 128, 16, 8192 + 64, 8192), Shared(32, 8, 128, 64, 2048 + 64, 2048)]
TINY = [
    Case(4, 2, 16, 2, 70, "float32", "float32"),
    Case(2, 2, 32, 1, 33, "float32", "float32"),
    Case(4, 2, 16, 2, 40, "float8_e4m3fn", "float32"),
]
TINY_SHARED = [Shared(4, 2, 16, 3, 40, 32, "float32")]


def copy_bandwidth(bench: Bench) -> float | None:
    """Bytes per second, read and written, of a copy from device memory to device memory."""
    source = torch.empty(2**20 if bench.tiny else 2**30, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds(lambda: target.copy_(source))
    return None if seconds is None else 2 * source.numel() / seconds


def layer_of(case: Case | Shared, pages: Pages) -> roofline.Layer:
    itemsize = getattr(torch, case.dtype).itemsize
    token = 2 * case.head_dim * pages.k_arena.element_size() + (8 if pages.options else 0)
    return roofline.Layer(case.heads, case.kv_heads, case.head_dim, case.head_dim, token, itemsize, 16)


def check(q: Tensor, pages: Pages, out: Tensor) -> None:
    """Compare the last row with SDPA in float32."""
    row = q.shape[0] - 1
    k, v = dense(pages, row, torch.float32)
    want = F.scaled_dot_product_attention(q[row:].float(), k, v, enable_gqa=True)
    require_close(out[row:], want, TOLERANCE[q.dtype])


def sdpa_seconds(q: Tensor, case: Case, bench: Bench) -> float | None:
    """The faster of two dense spellings on contiguous K and V of equal lengths."""
    if bench.left < 60 and not bench.tiny:
        return None
    size = (case.batch, case.kv_heads, case.context, case.head_dim)
    bench.need(2 * torch.Size(size).numel() * q.element_size())
    k, v = (torch.randn(size, dtype=q.dtype, device=q.device) for _ in range(2))
    packed = q.view(case.batch, case.kv_heads, -1, case.head_dim)
    times = [
        bench.seconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)),
        bench.seconds(lambda: F.scaled_dot_product_attention(packed, k, v)),
    ]
    return None if None in times else min(times)  # type: ignore[type-var]


def run(case: Case, bench: Bench) -> Cell:
    """One query per row, all rows equally long."""
    dtype, kv = getattr(torch, case.dtype), getattr(torch, case.kv)
    bench.need(2 * case.batch * case.context * case.kv_heads * case.head_dim * kv.itemsize)
    pages = new_pages(case.batch, case.context, case.kv_heads, case.head_dim, kv, bench.device)
    q = torch.randn(case.batch, case.heads, 1, case.head_dim, dtype=dtype, device=bench.device)

    def call() -> Tensor:
        return kernels.attention(q, *pages.arguments, scale=case.head_dim**-0.5, **pages.options)

    check(q, pages, call())
    seconds = bench.seconds(call)
    work = roofline.attention(layer_of(case, pages), [case.context] * case.batch, 1)
    floor = roofline.floor_seconds(work, bench.gpu, dtype) if bench.gpu else None
    cell: Cell = {
        "us": microseconds(seconds),
        "launched_us": microseconds(bench.launched_seconds(call)),
        "gb_s": rate(work.bytes, seconds, 1e9),
        "of_copy": ratio(rate(work.bytes, seconds, 1), bench.copy_bandwidth),
        "of_floor": ratio(floor, seconds),
    }
    if kv == dtype:
        del pages
        try:
            cell["sdpa_over_paged"] = ratio(sdpa_seconds(q, case, bench), seconds)
        except NotMeasured as why:
            cell["sdpa_over_paged"], cell["sdpa_why"] = None, str(why)
    return cell


def run_shared(case: Shared, bench: Bench) -> Cell:
    """The same rows, told and not told that they share their first pages."""
    if not has_option("shared_prefix"):
        raise NotMeasured("these kernels know no shared prefix")
    dtype = getattr(torch, case.dtype)
    size = (case.batch, case.context, case.kv_heads, case.head_dim)
    pages = new_pages(*size, dtype, bench.device, shared=case.shared)
    q = torch.randn(case.batch, case.heads, 1, case.head_dim, dtype=dtype, device=bench.device)

    def call(**options: int) -> Tensor:
        return kernels.attention(q, *pages.arguments, scale=case.head_dim**-0.5, **options)

    check(q, pages, call(shared_prefix=case.shared))
    seconds = bench.seconds(lambda: call(shared_prefix=case.shared))
    # Rows whose pages are equal share them in the caches: what others pay is rows with pages of their own.
    apart = new_pages(*size, dtype, bench.device)
    unshared = bench.seconds(lambda: kernels.attention(q, *apart.arguments, scale=case.head_dim**-0.5))
    return {
        "us": microseconds(seconds),
        "speedup": ratio(unshared, seconds),
        "speedup_on_equal_pages": ratio(bench.seconds(call), seconds),
    }
