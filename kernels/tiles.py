"""The loops of attention: over tiles of a row's tokens, and over positions that hold none."""

import triton
import triton.language as tl

from .common import dot, load_block_ids, load_checked, operand, unpaired
from .scores import bend_scores, fold_scores, hide_scores


@triton.jit
def attend_tiles(
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
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_E: tl.constexpr,
    CHECK_D: tl.constexpr,
    CHECK_E: tl.constexpr,
    CHECK_DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    V_IS_K: tl.constexpr,
    V_PAIRS: tl.constexpr,
    CHECK_KEYS: tl.constexpr,
):
    """Fold the tokens [tile_begin, tile_end) of a row into an online softmax.

    CHECK_KEYS=False promises that every query sees every key of these tiles. V_PAIRS: V is read as words of two
    values; `acc` and `odd_acc` [TILE_M, TILE_DV // 2] are those of even and of odd dims.
    """
    VALUE_DTYPE: tl.constexpr = k_ptrs.dtype.element_ty
    for tile in range(tile_begin, tile_end, TILE_N):
        tokens = tile + tl.arange(0, TILE_N)  # [TILE_N]
        in_range = tokens < key_end  # [TILE_N]
        slots = tokens % BLOCK_SIZE  # [TILE_N]
        block_ids = load_block_ids(
            block_table_ptr, table_block_stride, tokens, in_range, BLOCK_SIZE, CHECK_KEYS
        )  # [TILE_N]

        k_offs = block_ids * k_arena_block_stride + slots * k_arena_slot_stride  # [TILE_N]
        # [TILE_D, TILE_N]
        k = operand(load_checked(k_ptrs + k_offs[None, :], in_range[None, :], d_mask, CHECK_KEYS, CHECK_D), q.dtype)
        scores = dot(q, k)  # [TILE_M, TILE_N]
        if TILE_E > 0:
            # [TILE_E, TILE_N]
            k_rest = load_checked(k_rest_ptrs + k_offs[None, :], in_range[None, :], rest_mask, CHECK_KEYS, CHECK_E)
            scores += dot(q_rest, operand(k_rest, q.dtype))
        if HAS_SCALES:
            scale_offs = block_ids * k_scales_block_stride + slots * k_scales_slot_stride  # [TILE_N]
            scores *= load_checked(k_scales_ptr + scale_offs, in_range, None, CHECK_KEYS, False)[None, :]
        scores = bend_scores(scores * score_scale, tokens, diagonal, slopes, softcap, HAS_SOFTCAP, HAS_ALIBI)
        if CHECK_KEYS:
            scores = hide_scores(
                scores,
                tokens,
                in_range,
                first_key,
                diagonal,
                mask_ptrs,
                mask_key_stride,
                row_mask,
                IS_CAUSAL,
                HAS_FIRST,
                HAS_MASK,
                HAS_BIAS,
            )
        weights, rescale, row_max, row_sum = fold_scores(scores, row_max, row_sum, HAS_BIAS)

        if V_IS_K:
            v = tl.trans(k)  # [TILE_N, TILE_DV]
        else:
            v_offs = block_ids * v_arena_block_stride + slots * v_arena_slot_stride  # [TILE_N]
            v = load_checked(v_ptrs + v_offs[:, None], in_range[:, None], dv_mask, CHECK_KEYS, CHECK_DV)
        if HAS_SCALES:
            scale_offs = block_ids * v_scales_block_stride + slots * v_scales_slot_stride  # [TILE_N]
            weights *= load_checked(v_scales_ptr + scale_offs, in_range, None, CHECK_KEYS, False)[None, :]
        weights = weights.to(q.dtype)
        if V_PAIRS:
            # [TILE_M, TILE_DV // 2]
            acc = acc * rescale[:, None] + dot(weights, operand(unpaired(v, False, VALUE_DTYPE), q.dtype))
            odd_acc = odd_acc * rescale[:, None] + dot(weights, operand(unpaired(v, True, VALUE_DTYPE), q.dtype))
        else:
            acc = acc * rescale[:, None] + dot(weights, operand(v, q.dtype))  # [TILE_M, TILE_DV]
    return acc, odd_acc, row_sum, row_max


@triton.jit
def attend_zeros(
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
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Fold positions that hold no token, whose keys and values are zeros, into an online softmax without values."""
    for tile in range(tile_begin, tile_end, TILE_N):
        tokens = tile + tl.arange(0, TILE_N)  # [TILE_N]
        zeros = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
        scores = bend_scores(zeros, tokens, diagonal, slopes, softcap, False, HAS_ALIBI)
        scores = hide_scores(
            scores,
            tokens,
            tokens < tile_end,
            first_key,
            diagonal,
            mask_ptrs,
            mask_key_stride,
            row_mask,
            IS_CAUSAL,
            HAS_FIRST,
            True,
            HAS_BIAS,
        )
        _, _, row_max, row_sum = fold_scores(scores, row_max, row_sum, HAS_BIAS)
    return row_sum, row_max
