"""Prefill: operations per second against SDPA's flash and cuDNN kernels on contiguous tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paged_inductor import kernels
from paged_inductor.kernels import roofline

from .bench import Bench, Cell, microseconds, rate, ratio, require_close
from .pages import dense, new_pages

__all__ = ["CASES", "TINY", "Case", "run"]

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Case:
    """`queries` new tokens of each row over `context` tokens, these included."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    queries: int
    context: int
    dtype: str = "bfloat16"


CASES = [
    Case(32, 8, 128, 4, 4096, 4096),
    Case(32, 8, 128, 1, 16384, 16384),
    Case(64, 8, 128, 2, 4096, 4096),
    Case(32, 8, 128, 16, 1024, 1024),
    Case(32, 32, 64, 4, 4096, 4096),
    Case(32, 8, 128, 4, 512, 8192),
]
TINY = [Case(4, 2, 16, 2, 20, 20, "float32"), Case(4, 2, 16, 1, 18, 40, "float32")]


def run(case: Case, bench: Bench) -> Cell:
    """Causal attention of the last queries of every row. Peers run only where the whole row is new."""
    dtype = getattr(torch, case.dtype)
    pages = new_pages(case.batch, case.context, case.kv_heads, case.head_dim, dtype, bench.device)
    q = torch.randn(case.batch, case.heads, case.queries, case.head_dim, dtype=dtype, device=bench.device)
    offset = case.context - case.queries

    def call() -> Tensor:
        return kernels.attention(q, *pages.arguments, scale=case.head_dim**-0.5, causal_offset=offset)

    out = call()
    last = q[-1:, :, -8:].float()  # the last queries see the most
    k, v = dense(pages, case.batch - 1, torch.float32)
    seen = torch.ones(8, case.context, dtype=torch.bool, device=bench.device).tril(case.context - 8)
    want = F.scaled_dot_product_attention(last, k, v, seen, enable_gqa=True)
    require_close(out[-1:, :, -8:], want, 1e-5 if dtype == torch.float32 else 1e-2)
    seconds = bench.seconds(call)
    layer = roofline.Layer.plain(case.heads, case.kv_heads, case.head_dim, dtype.itemsize)
    work = roofline.attention(layer, [case.context] * case.batch, case.queries)
    floor = roofline.floor_seconds(work, bench.gpu, dtype) if bench.gpu else None
    cell: Cell = {
        "us": microseconds(seconds),
        "tflop_s": rate(work.flops, seconds, 1e12),
        "of_floor": ratio(floor, seconds),
    }
    if case.queries == case.context:
        size = (case.batch, case.kv_heads, case.context, case.head_dim)
        keys, values = (torch.randn(size, dtype=dtype, device=bench.device) for _ in range(2))
        for name, backend in BACKENDS.items():
            cell |= _peer(name, backend, (q, keys, values), seconds, work.flops, bench)
    return cell


def _peer(
    name: str,
    backend: SDPBackend,
    operands: tuple[Tensor, Tensor, Tensor],
    seconds: float | None,
    flops: int,
    bench: Bench,
) -> Cell:
    """Operations per second of one backend of SDPA, and its time over the paged kernel's."""

    def call() -> Tensor:
        with sdpa_kernel([SDPBackend.MATH] if bench.tiny else [backend]):
            return F.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True)

    try:
        own = bench.seconds(call)
    except RuntimeError as error:  # not every build and device has every backend
        return {f"{name}_over_paged": None, f"{name}_why": str(error).splitlines()[0][:120]}
    return {f"{name}_tflop_s": rate(flops, own, 1e12), f"{name}_over_paged": ratio(own, seconds)}
