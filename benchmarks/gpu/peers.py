"""Other paged attention: FlexAttention's paged path, and torch's varlen_attn with a block table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_inductor import kernels

from .bench import Bench, Cell, NotMeasured, ratio, require_close
from .pages import Pages, dense, new_pages

__all__ = ["CASES", "TINY", "Case", "run"]


@dataclass(frozen=True)
class Case:
    peer: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    dtype: str = "bfloat16"


CASES = [
    Case(peer, 32, 8, 128, batch, context)
    for peer in ("varlen_attn", "flex_attention")
    for batch, context in ((8, 8192), (64, 1024))
]
TINY = [Case("varlen_attn", 2, 2, 16, 2, 40, "float32"), Case("flex_attention", 2, 2, 16, 2, 40, "float32")]
VARLEN_PAGE, FLEX_PAGE = 256, 128  # the page sizes that they are made for


def run(case: Case, bench: Bench) -> Cell:
    """One query per row; each side has its own pages of the same sizes."""
    dtype = getattr(torch, case.dtype)
    make = {"varlen_attn": _varlen, "flex_attention": _flex}[case.peer]
    q = torch.randn(case.batch, case.heads, 1, case.head_dim, dtype=dtype, device=bench.device)
    peer = make(case, q, bench)
    pages = new_pages(case.batch, case.context, case.kv_heads, case.head_dim, dtype, bench.device)
    scale = case.head_dim**-0.5
    seconds = bench.seconds(lambda: kernels.attention(q, *pages.arguments, scale=scale))
    return {"peer_over_paged": ratio(bench.seconds(peer), seconds)}


def _check(q: Tensor, pages: Pages, out: Tensor) -> None:
    k, v = dense(pages, 0, torch.float32)
    require_close(out, F.scaled_dot_product_attention(q[:1].float(), k, v, enable_gqa=True), 1e-2)


def _varlen(case: Case, q: Tensor, bench: Bench) -> Callable[[], Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise NotMeasured(f"varlen_attn of torch {torch.__version__} takes no block_table")
    if bench.tiny:
        raise NotMeasured("varlen_attn has no CPU kernel")
    size = (case.batch, case.context, case.kv_heads, case.head_dim)
    pages = new_pages(*size, q.dtype, bench.device, block_size=VARLEN_PAGE)
    k, v = (arena.transpose(1, 2).contiguous() for arena in (pages.k_arena, pages.v_arena))
    rows, starts = q[:, :, 0], torch.arange(case.batch + 1, dtype=torch.int32, device=bench.device)

    def call() -> Tensor:
        out = varlen_attn(
            rows,
            k,
            v,
            starts,
            None,
            1,
            case.context,
            scale=case.head_dim**-0.5,
            enable_gqa=case.heads != case.kv_heads,
            seqused_k=pages.seq_lens,
            block_table=pages.block_table,
        )
        return out[0] if isinstance(out, tuple) else out

    _check(q, pages, call()[:1, :, None])
    return call


def _flex(case: Case, q: Tensor, bench: Bench) -> Callable[[], Tensor]:
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    size = (case.batch, case.kv_heads, case.context, case.head_dim)
    k, v = (torch.randn(size, dtype=q.dtype, device=q.device) for _ in range(2))
    per_row = -(-case.context // FLEX_PAGE)
    num_pages = case.batch * per_row
    paged = PagedAttention(num_pages, FLEX_PAGE, case.batch, device=str(bench.device))
    cache = [torch.zeros(1, case.kv_heads, num_pages * FLEX_PAGE, case.head_dim).to(q) for _ in range(2)]
    rows = torch.arange(case.batch, device=bench.device)
    positions = torch.arange(case.context, device=bench.device).expand(case.batch, -1)
    for row in rows:
        paged.reserve(row, torch.tensor(case.context, device=bench.device))
    paged.assign(rows, positions, k, v, *cache)

    def everything(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < case.context

    logical = create_block_mask(
        everything, case.batch, None, 1, case.context, device=bench.device, BLOCK_SIZE=(FLEX_PAGE, FLEX_PAGE)
    )
    mask = paged.convert_logical_block_mask(logical)
    attend = flex_attention if bench.tiny else torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        return attend(q, *cache, block_mask=mask, scale=case.head_dim**-0.5, enable_gqa=True)

    want = F.scaled_dot_product_attention(q[:1].float(), k[:1].float(), v[:1].float(), enable_gqa=True)
    require_close(call()[:1], want, 1e-2)
    return call
