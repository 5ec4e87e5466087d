"""Split-KV decode attention: each program reads a share of one row's pages, a second kernel merges."""

import triton
import triton.language as tl
from torch import Tensor

from . import autotune, configs, ordered, prefill
from .arguments import kernel_arguments
from .attend import attend_packed, unpack_rows
from .launch import Allocator, Launch, LaunchConfig, device_limits
from .merge import Partials, plan_merge
from .problem import AttentionProblem
from .rounding import cdiv

MAX_QUERIES = 16


@triton.jit(do_not_specialize=["kv_len", "row_start", "causal_offset", "window", "prefix_len"])
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
    batch_size,
    prefix_len,
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
    IS_PREFIX: tl.constexpr,
    IS_SUFFIX: tl.constexpr,
    FIRST_SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    MIN_SHARE_TILES: tl.constexpr,
):
    num_tiles = tl.cdiv(packed_rows * batch_size if IS_PREFIX else packed_rows, TILE_M)
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
        split,
        NUM_SHARES,
        MIN_SHARE_TILES,
        batch_size,
        prefix_len,
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
        IS_PREFIX,
        IS_SUFFIX,
    )
    rows = first_row + tl.arange(0, TILE_M)  # [TILE_M]
    batches, rows, row_mask = unpack_rows(rows, batch, batch_size, packed_rows, IS_PREFIX)
    dv_offs = tl.arange(0, TILE_DV)  # [TILE_DV]
    # partial [B * H_kv * packed_rows, NUM_SPLITS, Dv]
    flat = (batches * num_kv_heads + kv_head) * packed_rows + rows  # [TILE_M]
    flat = flat * NUM_SPLITS + FIRST_SPLIT + split
    partial_ptrs = partial_ptr + flat[:, None] * V_HEAD_DIM + dv_offs[None, :]
    tl.store(partial_ptrs, out, mask=row_mask[:, None] & (dv_offs < V_HEAD_DIM)[None, :])
    tl.store(partial_max_ptr + flat, row_max, mask=row_mask)
    tl.store(partial_sum_ptr + flat, row_sum, mask=row_mask)


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
    partials = Partials.allocate(problem, num_splits, allocate)
    return [
        plan_pass(problem, partials, config, num_splits, in_order=in_order),
        plan_merge(problem, partials, out, in_order),
    ]


def plan_pass(
    problem: AttentionProblem,
    partials: Partials,
    config: LaunchConfig,
    num_splits: int,
    first_split: int = 0,
    prefix: bool = False,
    in_order: bool = False,
) -> Launch:
    """The launch that fills the splits from `first_split` on; over the shared prefix, or all that is not shared."""
    rows = problem.packed_rows * problem.batch if prefix else problem.packed_rows
    arguments = kernel_arguments(problem) | partials.arguments()
    arguments |= {
        "batch_size": problem.batch,
        "prefix_len": problem.shared_prefix,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "IS_PREFIX": prefix,
        "IS_SUFFIX": problem.shared_prefix > 0 and not prefix,
        "FIRST_SPLIT": first_split,
        "NUM_SPLITS": partials.num_splits,
        "NUM_SHARES": ordered.MAX_SPLITS if in_order else num_splits,
        "MIN_SHARE_TILES": ordered.SPLIT_TOKENS // config.tile_n if in_order else 0,
    }
    if prefix:  # a sink is one key of each query: the other pass has seen it
        arguments |= {"sinks_ptr": None, "HAS_SINKS": False}
    num_tiles = cdiv(rows, config.tile_m) * (1 if prefix else problem.batch)
    grid = (num_tiles * problem.num_kv_heads, num_splits)
    return Launch(decode_kernel, grid, arguments, config.num_warps, config.num_stages)


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
