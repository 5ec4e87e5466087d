"""Decode whose results depend on a row alone: splits of a fixed size, merged one after the other.

What makes a row's result depend on its batch is the number of splits, which the batch and the longest row choose, and
the tree in which a merge adds up as many partial results as the launch has splits. Here a row's keys are cut into
shares by its own length, a row of a longer batch merely has empty shares behind its own, and adding those changes no
bit. Configurations are the static ones, because tuned ones are keyed by batch and length.
"""

import triton
import triton.language as tl

from .common import exponential, finite_max
from .problem import AttentionProblem
from .rounding import cdiv

SPLIT_TOKENS = 512  # keys of a share, at least; a power of two, and so a whole number of tiles
MAX_SPLITS = 64  # rows of more than MAX_SPLITS * SPLIT_TOKENS keys have larger shares


def num_splits(problem: AttentionProblem) -> int:
    """Shares that the longest possible row of a problem has, as a power of two."""
    wanted = min(MAX_SPLITS, cdiv(problem.span, SPLIT_TOKENS))
    return 1 << max(0, wanted - 1).bit_length()


@triton.jit(do_not_specialize=["num_splits"])
def merge_in_order_kernel(
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
    num_splits,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid % packed_rows
    kv_head = pid // packed_rows % num_kv_heads
    batch = pid // packed_rows // num_kv_heads
    dv_offs = tl.program_id(1) * TILE_DV + tl.arange(0, TILE_DV)  # [TILE_DV]
    dv_mask = dv_offs < V_HEAD_DIM

    # a maximum is exact in any order
    row_max = tl.full([], float("-inf"), dtype=tl.float32)
    for split in range(num_splits):
        row_max = tl.maximum(row_max, tl.load(partial_max_ptr + pid * num_splits + split))
    shift = finite_max(row_max)

    total = tl.zeros([], dtype=tl.float32)
    acc = tl.zeros([TILE_DV], dtype=tl.float32)
    for split in range(num_splits):
        index = pid * num_splits + split
        split_max = tl.load(partial_max_ptr + index)
        weight = tl.load(partial_sum_ptr + index) * exponential(split_max - shift, HAS_BIAS)
        partial = tl.load(partial_ptr + index * V_HEAD_DIM + dv_offs, mask=dv_mask, other=0.0)  # [TILE_DV]
        total += weight
        acc += partial * weight
    out = acc / tl.where(total == 0.0, 1.0, total)  # [TILE_DV]

    head = kv_head * GROUP + row % GROUP
    out_ptrs = out_ptr + batch * out_batch_stride + head * out_head_stride + row // GROUP * out_query_stride
    tl.store(out_ptrs + dv_offs * out_dim_stride, out.to(out_ptr.dtype.element_ty), mask=dv_mask)
