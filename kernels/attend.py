"""Attention of one tile of packed queries over one row's pages: pointers, phases, online softmax.

Positions inside are *row positions*: token t of a row sits at logical key t + row_start. With a mask tensor, virtual
padding is the row positions below zero, and unwritten positions of a static buffer are those from seq_len on; without
one neither is ever visited.
"""

import triton
import triton.language as tl

from .common import to_exponent_base
from .tiles import attend_tiles, attend_zeros
from .visible import first_visible, prefix_range, split_share, visible_range


@triton.jit
def unpack_rows(rows, batch, batch_size, packed_rows, IS_PREFIX: tl.constexpr):
    """Batch row, packed row within it and validity of the rows of an M tile; a prefix pass packs the whole batch."""
    batches = batch.to(tl.int64)
    packed = rows
    row_mask = rows < packed_rows
    if IS_PREFIX:
        batches = tl.minimum(rows // packed_rows, batch_size - 1).to(tl.int64)
        packed = rows % packed_rows
        row_mask = rows < packed_rows * batch_size
    return batches, packed, row_mask


@triton.jit
def attend_packed(
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
    num_splits,
    MIN_SPLIT_TILES: tl.constexpr,
    batch_size,
    prefix_len,
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
):
    """One split of the attention of the packed rows [first_row, first_row + TILE_M) of one KV head.

    Packed row m is query m // GROUP of head kv_head * GROUP + m % GROUP. IS_PREFIX: the packed rows of all batch rows,
    one behind the other, over the first prefix_len tokens of row 0, which all share; IS_SUFFIX: one batch row without
    those tokens. ROWS_END: rows end with the last key; else they begin at key row_start. Returns the normalised output
    [TILE_M, TILE_DV] with its softmax maximum and sum [TILE_M] (-inf and 0 where nothing was visible). A single
    log-sum-exp would not do: around finfo.min it has no bits left for the sum.
    """
    HAS_FIRST: tl.constexpr = HAS_WINDOW or HAS_CHUNK or IS_PREFIX
    kv_head = kv_head.to(tl.int64)
    rows = first_row + tl.arange(0, TILE_M)  # [TILE_M]
    batches, rows, is_row = unpack_rows(rows, batch, batch_size, packed_rows, IS_PREFIX)
    row_mask = is_row[:, None]  # [TILE_M, 1]
    queries = (rows // GROUP).to(tl.int64)  # [TILE_M]
    heads = kv_head * GROUP + rows % GROUP  # [TILE_M]
    d_offs = tl.arange(0, TILE_D)  # [TILE_D]
    WORDS: tl.constexpr = TILE_DV // 2 if V_PAIRS else TILE_DV  # of a row of V
    dv_offs = tl.arange(0, WORDS)  # [WORDS]
    d_mask = (d_offs < HEAD_DIM)[:, None]  # [TILE_D, 1]
    if V_PAIRS:  # multiples of 8 words already: this tells the compiler, which then loads 16 bytes at a time
        v_arena_block_stride = v_arena_block_stride // 8 * 8
        v_arena_head_stride = v_arena_head_stride // 8 * 8
        v_arena_slot_stride = v_arena_slot_stride // 8 * 8
    dv_mask = (dv_offs < V_HEAD_DIM // (TILE_DV // WORDS))[None, :]  # [1, WORDS]

    q_offs = batches * q_batch_stride + queries * q_query_stride + heads * q_head_stride  # [TILE_M]
    q_ptrs = q_ptr + q_offs[:, None]  # [TILE_M, 1]
    q = tl.load(q_ptrs + d_offs[None, :] * q_dim_stride, mask=row_mask & (d_offs < HEAD_DIM)[None, :], other=0.0)
    k_arena_ptr += kv_head * k_arena_head_stride
    k_ptrs = k_arena_ptr + d_offs[:, None] * k_arena_dim_stride  # [TILE_D, 1]
    v_ptrs = v_arena_ptr + kv_head * v_arena_head_stride + dv_offs[None, :] * v_arena_dim_stride
    q_rest = None
    k_rest_ptrs = None
    rest_mask = None
    if TILE_E > 0:  # a head dim between powers of two: the dims behind the first TILE_D
        rest_offs = TILE_D + tl.arange(0, TILE_E)  # [TILE_E]
        rest_mask = (rest_offs < HEAD_DIM)[:, None]  # [TILE_E, 1]
        q_rest_ptrs = q_ptrs + rest_offs[None, :] * q_dim_stride
        q_rest = tl.load(q_rest_ptrs, mask=row_mask & (rest_offs < HEAD_DIM)[None, :], other=0.0)
        k_rest_ptrs = k_arena_ptr + rest_offs[:, None] * k_arena_dim_stride  # [TILE_E, 1]
    if HAS_SCALES:
        k_scales_ptr += kv_head * k_scales_head_stride
        v_scales_ptr += kv_head * v_scales_head_stride
    slopes = None
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=is_row, other=0.0).to(tl.float32)  # [TILE_M]
        slopes = to_exponent_base(slopes, HAS_BIAS)
    block_table_ptr += batch.to(tl.int64) * table_batch_stride

    seq_len = tl.load(seq_lens_ptr + batches)
    if ROWS_END:
        row_start = kv_len - seq_len
    diagonal = rows // GROUP + causal_offset - row_start  # [TILE_M]
    first_key = first_visible(diagonal, row_start, window, chunk, HAS_WINDOW, HAS_CHUNK)  # [TILE_M]
    if HAS_HIDDEN:
        hidden = tl.load(hidden_ptr + batches)
        first_key = tl.where(hidden > 0, tl.maximum(first_key, hidden), first_key)
    if IS_PREFIX:
        begin, end, all_begin, all_end = prefix_range(first_key, diagonal, prefix_len, IS_CAUSAL)
    else:
        lowest = first_row // GROUP + causal_offset - row_start
        highest = (tl.minimum(first_row + TILE_M, packed_rows) - 1) // GROUP + causal_offset - row_start
        begin, end, all_begin, all_end = visible_range(
            lowest, highest, row_start, seq_len, kv_len, window, chunk, IS_CAUSAL, HAS_WINDOW, HAS_CHUNK, HAS_MASK
        )
        if HAS_HIDDEN:
            begin = tl.where(hidden > 0, tl.maximum(begin, hidden), begin)

    acc = tl.zeros([TILE_M, WORDS], dtype=tl.float32)
    row_sum = tl.zeros([TILE_M], dtype=tl.float32)
    odd_acc = row_sum  # of no use; Triton 3.6 does not let a function return None
    if V_PAIRS:
        odd_acc = tl.zeros([TILE_M, WORDS], dtype=tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    if HAS_SINKS:  # a key of weight exp(sink) and no value, which the first split has seen
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32)  # [TILE_M]
        has_sink = (row_sum + split) == 0.0
        row_max = tl.where(has_sink, to_exponent_base(sinks, HAS_BIAS), row_max)
        row_sum = tl.where(has_sink, 1.0, row_sum)

    mask_ptrs = None
    if HAS_MASK:
        mask_offs = batches * mask_batch_stride + queries * mask_query_stride + heads * mask_head_stride
        mask_offs += row_start.to(tl.int64) * mask_key_stride
        mask_ptrs = mask_ptr + mask_offs[:, None]  # [TILE_M, 1]
    if HAS_MASK and not IS_PREFIX:
        # virtual padding, then unwritten positions
        for side in tl.static_range(2):
            zeros_begin = begin if side == 0 else tl.maximum(begin, seq_len)
            zeros_end = tl.minimum(end, 0) if side == 0 else end
            tile_begin, tile_end = split_share(zeros_begin, zeros_end, split, num_splits, MIN_SPLIT_TILES, TILE_N)
            if side == 0 or HAS_ZEROS:
                row_sum, row_max = attend_zeros(
                    row_sum,
                    row_max,
                    mask_ptrs,
                    slopes,
                    first_key,
                    diagonal,
                    row_mask,
                    tile_begin,
                    tile_end,
                    softcap,
                    mask_key_stride,
                    TILE_M,
                    TILE_N,
                    IS_CAUSAL,
                    HAS_FIRST,
                    HAS_BIAS,
                    HAS_ALIBI,
                )
        begin = tl.maximum(begin, 0)
        end = tl.minimum(end, seq_len)

    if IS_SUFFIX:
        begin = tl.maximum(begin, prefix_len)

    # this split's tokens, and its tiles that every query sees in full: [inner_begin, inner_end)
    key_begin, key_end = split_share(begin, end, split, num_splits, MIN_SPLIT_TILES, TILE_N)
    inner_begin = key_begin
    if HAS_FIRST:
        inner_begin += tl.cdiv(tl.maximum(all_begin - key_begin, 0), TILE_N) * TILE_N
    inner_end = inner_begin
    if not HAS_MASK:
        inner_end += tl.maximum(tl.minimum(all_end, key_end) - inner_begin, 0) // TILE_N * TILE_N
    # phases: window or chunk edge, inner, causal or ragged edge
    for phase in tl.static_range(3):
        if phase == 0:
            tile_begin, tile_end = key_begin, tl.minimum(inner_begin, key_end)
        elif phase == 1:
            tile_begin, tile_end = inner_begin, inner_end
        else:
            tile_begin, tile_end = inner_end, key_end
        if phase == 2 or (phase == 1 and not HAS_MASK) or (phase == 0 and HAS_FIRST):
            acc, odd_acc, row_sum, row_max = attend_tiles(
                acc,
                odd_acc,
                row_sum,
                row_max,
                q,
                q_rest,
                k_ptrs,
                k_rest_ptrs,
                v_ptrs,
                k_scales_ptr,
                v_scales_ptr,
                mask_ptrs,
                block_table_ptr,
                slopes,
                first_key,
                diagonal,
                row_mask,
                d_mask,
                rest_mask,
                dv_mask,
                tile_begin,
                tile_end,
                key_end,
                score_scale,
                softcap,
                k_arena_block_stride,
                k_arena_slot_stride,
                v_arena_block_stride,
                v_arena_slot_stride,
                k_scales_block_stride,
                k_scales_slot_stride,
                v_scales_block_stride,
                v_scales_slot_stride,
                table_block_stride,
                mask_key_stride,
                BLOCK_SIZE=BLOCK_SIZE,
                TILE_N=TILE_N,
                TILE_E=TILE_E,
                CHECK_D=HEAD_DIM < TILE_D,
                CHECK_E=HEAD_DIM < TILE_D + TILE_E,
                CHECK_DV=V_HEAD_DIM != TILE_DV,
                IS_CAUSAL=IS_CAUSAL,
                HAS_FIRST=HAS_FIRST,
                HAS_MASK=HAS_MASK,
                HAS_BIAS=HAS_BIAS,
                HAS_SOFTCAP=HAS_SOFTCAP,
                HAS_ALIBI=HAS_ALIBI,
                HAS_SCALES=HAS_SCALES,
                V_IS_K=V_IS_K,
                V_PAIRS=V_PAIRS,
                CHECK_KEYS=phase != 1,
            )

    norm = tl.where(row_sum == 0.0, 1.0, row_sum)  # [TILE_M]
    if V_PAIRS:
        acc = tl.interleave(acc, odd_acc)  # [TILE_M, TILE_DV]
    return acc / norm[:, None], row_max, row_sum
