"""Partial softmaxes of a split attention, and the kernel that makes one of them."""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ordered
from .arguments import pointer
from .common import exponential, finite_max
from .launch import Allocator, Launch
from .problem import AttentionProblem
from .rounding import cdiv, next_power_of_2

MERGE_TILE = 64


@triton.jit
def merge_kernel(
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    out_ptr,
    out_batch_stride,
    out_head_stride,
    out_query_stride,
    out_dim_stride,
    num_kv_heads,
    packed_rows,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid % packed_rows
    kv_head = pid // packed_rows % num_kv_heads
    batch = pid // packed_rows // num_kv_heads
    splits = tl.arange(0, TILE_SPLITS)  # [TILE_SPLITS]
    split_mask = splits < NUM_SPLITS
    dv_offs = tl.program_id(1) * TILE_DV + tl.arange(0, TILE_DV)  # [TILE_DV]
    dv_mask = dv_offs < V_HEAD_DIM

    flat = pid * NUM_SPLITS + splits  # [TILE_SPLITS]
    split_max = tl.load(partial_max_ptr + flat, mask=split_mask, other=float("-inf"))  # [TILE_SPLITS]
    split_sum = tl.load(partial_sum_ptr + flat, mask=split_mask, other=0.0)  # [TILE_SPLITS]
    weights = split_sum * exponential(split_max - finite_max(tl.max(split_max, 0)), HAS_BIAS)  # [TILE_SPLITS]
    partial_ptrs = partial_ptr + flat[:, None] * V_HEAD_DIM + dv_offs[None, :]
    partial = tl.load(partial_ptrs, mask=split_mask[:, None] & dv_mask[None, :], other=0.0)  # [TILE_SPLITS, TILE_DV]
    total = tl.sum(weights, 0)
    out = tl.sum(partial * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)  # [TILE_DV]

    head = kv_head * GROUP + row % GROUP
    out_ptrs = out_ptr + batch * out_batch_stride + head * out_head_stride + row // GROUP * out_query_stride
    tl.store(out_ptrs + dv_offs * out_dim_stride, out.to(out_ptr.dtype.element_ty), mask=dv_mask)


@dataclass(frozen=True)
class Partials:
    """Scratch of a split call: each split's normalised output, with its softmax's maximum and sum, of every row."""

    num_splits: int
    num_rows: int
    values: Tensor
    maxima: Tensor
    sums: Tensor

    @classmethod
    def allocate(cls, problem: AttentionProblem, num_splits: int, allocate: Allocator) -> Self:
        """Room for `num_splits` partial results of every packed row of every KV head and batch row."""
        rows = problem.batch * problem.num_kv_heads * problem.packed_rows
        new = {"dtype": torch.float32, "device": problem.q.device}
        values = allocate((rows, num_splits, problem.v_head_dim), **new)
        return cls(num_splits, rows, values, allocate((rows, num_splits), **new), allocate((rows, num_splits), **new))

    def arguments(self) -> dict[str, object]:
        """By the kernels' parameter names."""
        return {
            "partial_ptr": self.values,
            "partial_max_ptr": self.maxima,
            "partial_sum_ptr": self.sums,
        }


def plan_merge(problem: AttentionProblem, partials: Partials, out: Tensor, in_order: bool = False) -> Launch:
    """The launch that merges all splits into `out`; in_order: one by one."""
    merge: dict[str, object] = {
        "num_kv_heads": problem.num_kv_heads,
        "packed_rows": problem.packed_rows,
        "GROUP": problem.group,
        "V_HEAD_DIM": problem.v_head_dim,
        "HAS_BIAS": problem.has_bias,
    }
    merge |= partials.arguments()
    merge |= pointer("out", out, ("batch", "head", "query", "dim"))
    if in_order:
        merge |= {"TILE_DV": MERGE_TILE, "num_splits": partials.num_splits}
    else:
        tile_splits = next_power_of_2(partials.num_splits)
        merge |= {"TILE_DV": MERGE_TILE, "NUM_SPLITS": partials.num_splits, "TILE_SPLITS": tile_splits}
    kernel = ordered.merge_in_order_kernel if in_order else merge_kernel
    grid = (partials.num_rows, cdiv(problem.v_head_dim, MERGE_TILE))
    return Launch(kernel, grid, merge, num_warps=2)
