"""Attention of one tile of packed queries over one row's pages: visible range, split, online softmax.

Positions inside are *row positions*: token t of a row sits at logical key t + row_start. With a mask tensor,
virtual padding is the row positions below zero; without one it is never visited.
"""

import triton
import triton.language as tl

from .common import dot, exponential, finite_max, load_block_ids, load_checked, tanh, to_exponent_base


@triton.jit
def attend_tiles(
    acc,
    row_sum,
    row_max,
    q,
    k_ptrs,
    v_ptrs,
    mask_ptrs,
    block_table_ptr,
    last_key,
    row_mask,
    d_mask,
    dv_mask,
    tile_begin,
    tile_end,
    key_end,
    row_start,
    window,
    score_scale,
    softcap,
    k_arena_block_stride,
    k_arena_slot_stride,
    v_arena_block_stride,
    v_arena_slot_stride,
    table_block_stride,
    mask_key_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    CHECK_D: tl.constexpr,
    CHECK_DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    CHECK_KEYS: tl.constexpr,
):
    """Fold the row positions [tile_begin, tile_end) into an online softmax.

    CHECK_KEYS=False promises that every query sees every key of these tiles.
    """
    for tile in range(tile_begin, tile_end, TILE_N):
        tokens = tile + tl.arange(0, TILE_N)  # [TILE_N]
        in_range = tokens < key_end  # [TILE_N]
        in_pages = in_range
        if HAS_MASK:
            in_pages = in_range & (tokens >= 0)
        slots = tokens % BLOCK_SIZE  # [TILE_N]
        block_ids = load_block_ids(
            block_table_ptr, table_block_stride, tokens, in_pages, BLOCK_SIZE, CHECK_KEYS
        )  # [TILE_N]

        k_offs = block_ids * k_arena_block_stride + slots * k_arena_slot_stride  # [TILE_N]
        # [TILE_D, TILE_N]
        k = load_checked(k_ptrs + k_offs[None, :], in_pages[None, :], d_mask, CHECK_KEYS, CHECK_D)
        scores = dot(q, k) * score_scale  # [TILE_M, TILE_N]
        if HAS_SOFTCAP:
            scores = tanh(scores) * softcap

        if CHECK_KEYS:
            visible = in_range[None, :]
            if IS_CAUSAL:
                visible = visible & (tokens[None, :] <= last_key[:, None])
            if HAS_WINDOW:
                visible = visible & (tokens[None, :] > last_key[:, None] - window)
            if HAS_MASK:
                key_offs = (tokens + row_start).to(tl.int64) * mask_key_stride  # [TILE_N]
                mask = tl.load(mask_ptrs + key_offs[None, :], mask=row_mask & in_range[None, :], other=0)
                if HAS_BIAS:
                    scores += mask.to(tl.float32)
                else:
                    visible = visible & (mask != 0)
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))  # [TILE_M]
        shift = finite_max(new_max)
        weights = exponential(scores - shift[:, None], HAS_BIAS)  # [TILE_M, TILE_N]
        rescale = exponential(row_max - shift, HAS_BIAS)  # [TILE_M]
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max

        v_offs = block_ids * v_arena_block_stride + slots * v_arena_slot_stride  # [TILE_N]
        # [TILE_N, TILE_DV]
        v = load_checked(v_ptrs + v_offs[:, None], in_pages[:, None], dv_mask, CHECK_KEYS, CHECK_DV)
        acc = acc * rescale[:, None] + dot(weights.to(v.dtype), v)  # [TILE_M, TILE_DV]
    return acc, row_sum, row_max


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
    num_splits,
    MIN_SPLIT_TILES: tl.constexpr,
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
):
    """One split of the attention of the packed rows [first_row, first_row + TILE_M) of one KV head.

    Packed row m is query m // GROUP of head kv_head * GROUP + m % GROUP. Returns the normalised output
    [TILE_M, TILE_DV] with its softmax maximum and sum [TILE_M] (-inf and 0 where nothing was visible).
    A single log-sum-exp would not do: around finfo.min it has no bits left for the sum.
    """
    batch = batch.to(tl.int64)
    rows = first_row + tl.arange(0, TILE_M)  # [TILE_M]
    row_mask = (rows < packed_rows)[:, None]  # [TILE_M, 1]
    queries = (rows // GROUP).to(tl.int64)  # [TILE_M]
    heads = (kv_head * GROUP + rows % GROUP).to(tl.int64)  # [TILE_M]
    d_offs = tl.arange(0, TILE_D)  # [TILE_D]
    dv_offs = tl.arange(0, TILE_DV)  # [TILE_DV]

    q_offs = batch * q_batch_stride + queries * q_query_stride + heads * q_head_stride  # [TILE_M]
    q_ptrs = q_ptr + q_offs[:, None] + d_offs[None, :] * q_dim_stride
    q = tl.load(q_ptrs, mask=row_mask & (d_offs < HEAD_DIM)[None, :], other=0.0)  # [TILE_M, TILE_D]
    k_ptrs = k_arena_ptr + kv_head.to(tl.int64) * k_arena_head_stride + d_offs[:, None] * k_arena_dim_stride
    v_ptrs = v_arena_ptr + kv_head.to(tl.int64) * v_arena_head_stride + dv_offs[None, :] * v_arena_dim_stride
    d_mask = (d_offs < HEAD_DIM)[:, None]  # [TILE_D, 1]
    dv_mask = (dv_offs < V_HEAD_DIM)[None, :]  # [1, TILE_DV]
    mask_ptrs = None
    if HAS_MASK:
        mask_offs = batch * mask_batch_stride + queries * mask_query_stride + heads * mask_head_stride
        mask_ptrs = mask_ptr + mask_offs[:, None]  # [TILE_M, 1]
    block_table_ptr += batch * table_batch_stride

    # row positions that some query of this tile sees: [key_begin, key_end)
    seq_len = tl.load(seq_lens_ptr + batch)
    row_start = kv_len - seq_len
    diagonal = causal_offset - row_start
    first_query = first_row // GROUP
    last_query = (tl.minimum(first_row + TILE_M, packed_rows) - 1) // GROUP
    key_begin = tl.maximum(0, -row_start)  # a window hides the oldest of more tokens than kv_len
    if HAS_MASK:
        key_begin = -row_start
    all_begin = key_begin
    key_end = seq_len
    all_end = seq_len
    if IS_CAUSAL:
        key_end = tl.minimum(key_end, last_query + diagonal + 1)
        all_end = tl.minimum(all_end, first_query + diagonal + 1)
    if HAS_WINDOW:
        all_begin = tl.maximum(key_begin, last_query + diagonal - window + 1)
        key_begin = tl.maximum(key_begin, first_query + diagonal - window + 1)

    # this split's share, whole tiles
    split_tiles = tl.cdiv(tl.cdiv(tl.maximum(key_end - key_begin, 0), TILE_N), num_splits)
    if MIN_SPLIT_TILES > 0:
        split_tiles = tl.maximum(split_tiles, MIN_SPLIT_TILES)
    key_begin += split * split_tiles * TILE_N
    key_end = tl.minimum(key_end, key_begin + split_tiles * TILE_N)

    # tiles that every query sees in full: [inner_begin, inner_end)
    inner_begin = key_begin
    if HAS_WINDOW:
        inner_begin += tl.cdiv(tl.maximum(all_begin - key_begin, 0), TILE_N) * TILE_N
    inner_end = inner_begin
    if not HAS_MASK:
        inner_end += tl.maximum(tl.minimum(all_end, key_end) - inner_begin, 0) // TILE_N * TILE_N

    last_key = (rows // GROUP) + diagonal  # [TILE_M]
    acc = tl.zeros([TILE_M, TILE_DV], dtype=tl.float32)
    row_sum = tl.zeros([TILE_M], dtype=tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    if HAS_SINKS:  # a key of weight exp(sink) and no value, which the first split has seen
        sinks = tl.load(sinks_ptr + heads, mask=rows < packed_rows, other=0.0).to(tl.float32)  # [TILE_M]
        has_sink = (row_sum + split) == 0.0
        row_max = tl.where(has_sink, to_exponent_base(sinks, HAS_BIAS), row_max)
        row_sum = tl.where(has_sink, 1.0, row_sum)
    # phases: window edge, inner, causal or ragged edge
    for phase in tl.static_range(3):
        if phase == 0:
            tile_begin, tile_end = key_begin, tl.minimum(inner_begin, key_end)
        elif phase == 1:
            tile_begin, tile_end = inner_begin, inner_end
        else:
            tile_begin, tile_end = inner_end, key_end
        if phase == 2 or (phase == 1 and not HAS_MASK) or (phase == 0 and HAS_WINDOW):
            acc, row_sum, row_max = attend_tiles(
                acc,
                row_sum,
                row_max,
                q,
                k_ptrs,
                v_ptrs,
                mask_ptrs,
                block_table_ptr,
                last_key,
                row_mask,
                d_mask,
                dv_mask,
                tile_begin,
                tile_end,
                key_end,
                row_start,
                window,
                score_scale,
                softcap,
                k_arena_block_stride,
                k_arena_slot_stride,
                v_arena_block_stride,
                v_arena_slot_stride,
                table_block_stride,
                mask_key_stride,
                BLOCK_SIZE=BLOCK_SIZE,
                TILE_N=TILE_N,
                CHECK_D=HEAD_DIM != TILE_D,
                CHECK_DV=V_HEAD_DIM != TILE_DV,
                IS_CAUSAL=IS_CAUSAL,
                HAS_WINDOW=HAS_WINDOW,
                HAS_MASK=HAS_MASK,
                HAS_BIAS=HAS_BIAS,
                HAS_SOFTCAP=HAS_SOFTCAP,
                CHECK_KEYS=phase != 1,
            )

    norm = tl.where(row_sum == 0.0, 1.0, row_sum)  # [TILE_M]
    return acc / norm[:, None], row_max, row_sum
