"""Random pages of the sizes that a case asks for, and their dense copies."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paged_inductor import kernels

from .bench import NotMeasured

__all__ = ["Pages", "dense", "has_option", "new_pages"]


@dataclass(frozen=True)
class Pages:
    """K and V in blocks that lie in random order. options: scales, if they are quantised."""

    k_arena: Tensor
    v_arena: Tensor
    block_table: Tensor
    seq_lens: Tensor
    kv_len: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What an attention call takes after q."""
        return self.k_arena, self.v_arena, self.block_table, self.seq_lens, self.kv_len


def has_option(name: str) -> bool:
    """Whether this version of the kernels knows an argument of attention."""
    return name in inspect.signature(kernels.attention).parameters


def new_pages(
    batch: int,
    context: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 16,
    shared: int = 0,
) -> Pages:
    """`batch` rows of `context` tokens, the first `shared` of which are the same pages in all rows."""
    width, common = -(-context // block_size), shared // block_size
    own = width - common
    ids = torch.randperm(common + batch * own, device=device).add_(1).to(torch.int32)
    table = torch.cat([ids[:common].expand(batch, -1), ids[common:].view(batch, own)], 1).contiguous()
    size = (len(ids) + 1, kv_heads, block_size, head_dim)
    quantised = dtype.itemsize == 1
    if quantised and not has_option("k_scales"):
        raise NotMeasured("these kernels store no quantised KV")
    arenas, options = [], {}
    for name in ("k", "v"):
        arena = torch.empty(size, dtype=dtype, device=device)
        for part in arena.split(max(1, 2**24 // arena[0].numel())):  # no second arena in another dtype
            part.copy_(torch.randn(part.shape, device=device))
        arenas.append(arena)
        if quantised:
            options[f"{name}_scales"] = torch.full(size[:3], 0.5, dtype=torch.float32, device=device)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    return Pages(*arenas, table, lens, context, options)


def dense(pages: Pages, row: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of one row, [1, H_kv, S, D] in `dtype`, by plain indexing."""
    found = []
    for name, arena in (("k", pages.k_arena), ("v", pages.v_arena)):
        ids = pages.block_table[row].long()
        scales = pages.options.get(f"{name}_scales")
        if scales is None:
            values = arena[ids].to(dtype)  # [W, H_kv, block_size, D]
        else:  # as bytes: not every build can index float8
            values = arena.view(torch.uint8)[ids].view(arena.dtype).to(dtype) * scales[ids][..., None].to(dtype)
        found.append(values.transpose(0, 1).flatten(1, 2)[None, :, : pages.kv_len])
    return found[0], found[1]
