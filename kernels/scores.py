"""From scaled products to softmax weights: soft caps, position biases, masks, the running maximum and sum."""

import triton
import triton.language as tl

from .common import exponential, finite_max, tanh


@triton.jit
def bend_scores(
    scores,
    tokens,
    diagonal,
    slopes,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Scores [TILE_M, TILE_N] under a soft cap, then with a bias that falls with the distance to the query."""
    if HAS_SOFTCAP:
        scores = tanh(scores) * softcap
    if HAS_ALIBI:
        scores += slopes[:, None] * (tokens[None, :] - diagonal[:, None]).to(tl.float32)
    return scores


@triton.jit
def hide_scores(
    scores,
    tokens,
    in_range,
    first_key,
    diagonal,
    mask_ptrs,
    mask_key_stride,
    row_mask,
    IS_CAUSAL: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Scores with -inf where a query does not see a key, and with the mask's bias where it does."""
    visible = in_range[None, :]  # [1, TILE_N]
    if IS_CAUSAL:
        visible = visible & (tokens[None, :] <= diagonal[:, None])
    if HAS_FIRST:
        visible = visible & (tokens[None, :] >= first_key[:, None])
    if HAS_MASK:
        key_offs = tokens.to(tl.int64) * mask_key_stride  # [TILE_N]
        mask = tl.load(mask_ptrs + key_offs[None, :], mask=row_mask & in_range[None, :], other=0)
        if HAS_BIAS:
            scores += mask.to(tl.float32)
        else:
            visible = visible & (mask != 0)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def fold_scores(scores, row_max, row_sum, HAS_BIAS: tl.constexpr):
    """One step of the online softmax: weights [TILE_M, TILE_N], and what rescales all that was summed before."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))  # [TILE_M]
    shift = finite_max(new_max)
    weights = exponential(scores - shift[:, None], HAS_BIAS)  # [TILE_M, TILE_N]
    rescale = exponential(row_max - shift, HAS_BIAS)  # [TILE_M]
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)
