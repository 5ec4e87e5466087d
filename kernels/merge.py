"""The second kernel of a split attention: partial softmaxes become one."""

import triton
import triton.language as tl

from .common import exponential, finite_max

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
