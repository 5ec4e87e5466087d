"""Split-KV decode attention: each program reads a share of one row's pages, a second kernel merges."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import autotune, configs, ordered, prefill
from .attend import attend_packed
from .common import exponential, finite_max
from .launch import Allocator, Launch, LaunchConfig, device_limits
from .problem import AttentionProblem, pointer

MAX_QUERIES = 16
MERGE_TILE = 64


@triton.jit(do_not_specialize=["kv_len", "causal_offset", "window"])
def decode_kernel(
    q_ptr,
    q_batch_stride,
    q_head_stride,
    q_query_stride,
    q_dim_stride,
    k_arena_ptr,
    k_arena_block_stride,
    k_arena_head_stride,
    k_arena_slot_stride,
    k_arena_dim_stride,
    v_arena_ptr,
    v_arena_block_stride,
    v_arena_head_stride,
    v_arena_slot_stride,
    v_arena_dim_stride,
    mask_ptr,
    mask_batch_stride,
    mask_head_stride,
    mask_query_stride,
    mask_key_stride,
    block_table_ptr,
    table_batch_stride,
    table_block_stride,
    seq_lens_ptr,
    kv_len,
    score_scale,
    softcap,
    sinks_ptr,
    causal_offset,
    window,
    packed_rows,
    num_kv_heads,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    MIN_SHARE_TILES: tl.constexpr,
):
    num_tiles = tl.cdiv(packed_rows, TILE_M)
    pid = tl.program_id(0)
    split = tl.program_id(1)
    first_row = pid % num_tiles * TILE_M
    kv_head = pid // num_tiles % num_kv_heads
    batch = pid // num_tiles // num_kv_heads
    out, row_max, row_sum = attend_packed(
        q_ptr,
        q_batch_stride,
        q_head_stride,
        q_query_stride,
        q_dim_stride,
        k_arena_ptr,
        k_arena_block_stride,
        k_arena_head_stride,
        k_arena_slot_stride,
        k_arena_dim_stride,
        v_arena_ptr,
        v_arena_block_stride,
        v_arena_head_stride,
        v_arena_slot_stride,
        v_arena_dim_stride,
        mask_ptr,
        mask_batch_stride,
        mask_head_stride,
        mask_query_stride,
        mask_key_stride,
        block_table_ptr,
        table_batch_stride,
        table_block_stride,
        seq_lens_ptr,
        kv_len,
        score_scale,
        softcap,
        sinks_ptr,
        causal_offset,
        window,
        packed_rows,
        batch,
        kv_head,
        first_row,
        split,
        NUM_SHARES,
        MIN_SHARE_TILES,
        GROUP,
        HEAD_DIM,
        V_HEAD_DIM,
        BLOCK_SIZE,
        TILE_M,
        TILE_N,
        TILE_D,
        TILE_DV,
        IS_CAUSAL,
        HAS_WINDOW,
        HAS_MASK,
        HAS_BIAS,
        HAS_SOFTCAP,
        HAS_SINKS,
    )
    rows = first_row + tl.arange(0, TILE_M)  # [TILE_M]
    row_mask = rows < packed_rows
    dv_offs = tl.arange(0, TILE_DV)  # [TILE_DV]
    # partial [B * H_kv * packed_rows, NUM_SPLITS, Dv]
    flat = ((pid // num_tiles).to(tl.int64) * packed_rows + rows) * NUM_SPLITS + split  # [TILE_M]
    partial_ptrs = partial_ptr + flat[:, None] * V_HEAD_DIM + dv_offs[None, :]
    tl.store(partial_ptrs, out, mask=row_mask[:, None] & (dv_offs < V_HEAD_DIM)[None, :])
    tl.store(partial_max_ptr + flat, row_max, mask=row_mask)
    tl.store(partial_sum_ptr + flat, row_sum, mask=row_mask)


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
    TILE_DV: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid % packed_rows
    kv_head = pid // packed_rows % num_kv_heads
    batch = pid // packed_rows // num_kv_heads
    splits = tl.arange(0, NUM_SPLITS)  # [NUM_SPLITS]
    dv_offs = tl.program_id(1) * TILE_DV + tl.arange(0, TILE_DV)  # [TILE_DV]
    dv_mask = dv_offs < V_HEAD_DIM

    split_max = tl.load(partial_max_ptr + pid * NUM_SPLITS + splits)  # [NUM_SPLITS]
    split_sum = tl.load(partial_sum_ptr + pid * NUM_SPLITS + splits)  # [NUM_SPLITS]
    weights = split_sum * exponential(split_max - finite_max(tl.max(split_max, 0)), HAS_BIAS)  # [NUM_SPLITS]
    partial_ptrs = partial_ptr + (pid * NUM_SPLITS + splits)[:, None] * V_HEAD_DIM + dv_offs[None, :]
    partial = tl.load(partial_ptrs, mask=dv_mask[None, :], other=0.0)  # [NUM_SPLITS, TILE_DV]
    total = tl.sum(weights, 0)
    out = tl.sum(partial * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)  # [TILE_DV]

    head = kv_head * GROUP + row % GROUP
    out_ptrs = out_ptr + batch * out_batch_stride + head * out_head_stride + row // GROUP * out_query_stride
    tl.store(out_ptrs + dv_offs * out_dim_stride, out.to(out_ptr.dtype.element_ty), mask=dv_mask)


def plan(
    problem: AttentionProblem,
    out: Tensor,
    config: LaunchConfig,
    num_splits: int,
    allocate: Allocator,
    in_order: bool = False,
) -> list[Launch]:
    """The launches that write `out` [B, H_q, Q, Dv]; a single split is the one-pass kernel.

    in_order: cut each row by its own length and merge its shares one by one (see `ordered`).
    """
    if num_splits == 1 and not in_order:
        return [prefill.plan(problem, out, config)]
    num_tiles = triton.cdiv(problem.packed_rows, config.tile_m)
    num_rows = problem.batch * problem.num_kv_heads * problem.packed_rows
    new = {"dtype": torch.float32, "device": out.device}
    partial: dict[str, object] = {
        "partial_ptr": allocate((num_rows, num_splits, problem.v_head_dim), **new),
        "partial_max_ptr": allocate((num_rows, num_splits), **new),
        "partial_sum_ptr": allocate((num_rows, num_splits), **new),
    }
    arguments = problem.kernel_arguments()
    split = arguments | partial | {"TILE_M": config.tile_m, "TILE_N": config.tile_n, "NUM_SPLITS": num_splits}
    split |= {"NUM_SHARES": num_splits, "MIN_SHARE_TILES": 0}
    shared = ("num_kv_heads", "packed_rows", "GROUP", "V_HEAD_DIM", "HAS_BIAS")
    merge = {name: arguments[name] for name in shared} | partial | {"TILE_DV": MERGE_TILE}
    merge |= pointer("out", out, ("batch", "head", "query", "dim"))
    merge_with, count = merge_kernel, "NUM_SPLITS"
    if in_order:
        split |= {"NUM_SHARES": ordered.MAX_SPLITS, "MIN_SHARE_TILES": ordered.SPLIT_TOKENS // config.tile_n}
        merge_with, count = ordered.merge_in_order_kernel, "num_splits"
    grid = (num_tiles * problem.num_kv_heads * problem.batch, num_splits)
    merge_grid = (num_rows, triton.cdiv(problem.v_head_dim, MERGE_TILE))
    return [
        Launch(decode_kernel, grid, split, config.num_warps, config.num_stages),
        Launch(merge_with, merge_grid, merge | {count: num_splits}, num_warps=2),
    ]


def decode(
    problem: AttentionProblem,
    out: Tensor,
    allocate: Allocator,
    choose: autotune.Choose = autotune.choose,
    in_order: bool = False,
) -> None:
    """Write the attention of `problem` into `out`; scratch comes from `allocate`, the configuration from `choose`."""
    limits = device_limits(problem.q.device)

    def run(config: LaunchConfig) -> None:
        if in_order:
            num_splits = ordered.num_splits(problem)
        else:
            num_splits = configs.choose_num_splits(problem, limits, config.tile_m)
        for launch in plan(problem, out, config, num_splits, allocate, in_order):
            launch.run()

    candidates = configs.decode_candidates(problem, limits)
    run(choose(("decode", *problem.tuning_key()), candidates, run))
