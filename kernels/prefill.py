"""Attention of many queries over paged keys in one pass: prefill, chunked prefill, unsplit decode.

The keys are whatever the pages hold: earlier context and the tokens just written alike.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import autotune, configs
from .arguments import kernel_arguments, pointer
from .attend import attend_packed
from .launch import Launch, LaunchConfig, device_limits
from .problem import AttentionProblem
from .rounding import cdiv


@triton.jit(do_not_specialize=["kv_len", "row_start", "causal_offset", "window"])
def prefill_kernel(
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
    k_scales_ptr,
    k_scales_block_stride,
    k_scales_head_stride,
    k_scales_slot_stride,
    v_scales_ptr,
    v_scales_block_stride,
    v_scales_head_stride,
    v_scales_slot_stride,
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
    row_start,
    hidden_ptr,
    score_scale,
    softcap,
    slopes_ptr,
    sinks_ptr,
    causal_offset,
    window,
    chunk,
    packed_rows,
    num_kv_heads,
    out_ptr,
    out_batch_stride,
    out_head_stride,
    out_query_stride,
    out_dim_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_E: tl.constexpr,
    TILE_DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROWS_END: tl.constexpr,
    HAS_HIDDEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    V_IS_K: tl.constexpr,
    V_PAIRS: tl.constexpr,
):
    num_tiles = tl.cdiv(packed_rows, TILE_M)
    pid = tl.program_id(0)
    # late query tiles see the most keys: start them first
    first_row = (num_tiles - 1 - pid % num_tiles) * TILE_M
    kv_head = pid // num_tiles % num_kv_heads
    batch = pid // num_tiles // num_kv_heads
    out, _, _ = attend_packed(
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
        k_scales_ptr,
        k_scales_block_stride,
        k_scales_head_stride,
        k_scales_slot_stride,
        v_scales_ptr,
        v_scales_block_stride,
        v_scales_head_stride,
        v_scales_slot_stride,
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
        row_start,
        hidden_ptr,
        score_scale,
        softcap,
        slopes_ptr,
        sinks_ptr,
        causal_offset,
        window,
        chunk,
        packed_rows,
        batch,
        kv_head,
        first_row,
        0,
        1,
        0,
        1,
        0,
        GROUP,
        HEAD_DIM,
        V_HEAD_DIM,
        BLOCK_SIZE,
        TILE_M,
        TILE_N,
        TILE_D,
        TILE_E,
        TILE_DV,
        IS_CAUSAL,
        HAS_WINDOW,
        HAS_CHUNK,
        HAS_MASK,
        HAS_BIAS,
        HAS_ZEROS,
        ROWS_END,
        HAS_HIDDEN,
        HAS_SOFTCAP,
        HAS_ALIBI,
        HAS_SINKS,
        HAS_SCALES,
        V_IS_K,
        V_PAIRS,
        False,
        False,
    )
    rows = first_row + tl.arange(0, TILE_M)  # [TILE_M]
    dv_offs = tl.arange(0, TILE_DV)  # [TILE_DV]
    queries = (rows // GROUP).to(tl.int64)  # [TILE_M]
    heads = (kv_head * GROUP + rows % GROUP).to(tl.int64)  # [TILE_M]
    out_offs = batch.to(tl.int64) * out_batch_stride + queries * out_query_stride + heads * out_head_stride
    out_ptrs = out_ptr + out_offs[:, None] + dv_offs[None, :] * out_dim_stride
    out_mask = (rows < packed_rows)[:, None] & (dv_offs < V_HEAD_DIM)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=out_mask)


def plan(problem: AttentionProblem, out: Tensor, config: LaunchConfig) -> Launch:
    """The launch that writes `out` [B, H_q, Q, Dv]."""
    num_tiles = cdiv(problem.packed_rows, config.tile_m)
    arguments = kernel_arguments(problem) | pointer("out", out, ("batch", "head", "query", "dim"))
    arguments |= {"TILE_M": config.tile_m, "TILE_N": config.tile_n}
    grid = (num_tiles * problem.num_kv_heads * problem.batch,)
    return Launch(prefill_kernel, grid, arguments, config.num_warps, config.num_stages)


def prefill(problem: AttentionProblem, out: Tensor, choose: autotune.Choose = autotune.choose) -> None:
    """Write the attention of `problem` into `out`, in the configuration that `choose` picks."""

    def run(config: LaunchConfig) -> None:
        plan(problem, out, config).run()

    candidates = configs.prefill_candidates(problem, device_limits(problem.q.device))
    run(choose(("prefill", *problem.tuning_key()), candidates, run))
