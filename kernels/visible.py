"""Which row positions a tile of queries sees, and which of them one split takes.

A query's *diagonal* is the row position of the last key that it sees causally: its own position.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_begin(diagonal, chunk):
    """First row position of a diagonal's chunk; a query before the row's first token belongs to no chunk of it."""
    return tl.maximum(diagonal, 0) // chunk * chunk


@triton.jit
def first_visible(diagonal, row_start, window, chunk, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """First row position that each query sees: logical key 0, or where its window or its chunk begins."""
    first_key = diagonal * 0 - row_start
    if HAS_WINDOW:
        first_key = tl.maximum(first_key, diagonal - window + 1)
    if HAS_CHUNK:
        first_key = tl.maximum(first_key, chunk_begin(diagonal, chunk))
    return first_key


@triton.jit
def visible_range(
    lowest,
    highest,
    row_start,
    seq_len,
    kv_len,
    window,
    chunk,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Row positions that some query of a tile sees, and those that all see: begin, end, all_begin, all_end.

    lowest, highest: the least and the greatest diagonal of the tile's queries. With a mask, positions without a
    token count, too: it decides about them.
    """
    begin = -row_start
    end = kv_len - row_start
    if not HAS_MASK:
        begin = tl.maximum(begin, 0)
        end = tl.minimum(end, seq_len)
    all_begin = begin
    all_end = end
    if IS_CAUSAL:
        end = tl.minimum(end, highest + 1)
        all_end = tl.minimum(all_end, lowest + 1)
    if HAS_WINDOW or HAS_CHUNK:
        all_begin = tl.maximum(begin, first_visible(highest, row_start, window, chunk, HAS_WINDOW, HAS_CHUNK))
        begin = tl.maximum(begin, first_visible(lowest, row_start, window, chunk, HAS_WINDOW, HAS_CHUNK))
    return begin, end, all_begin, all_end


@triton.jit
def prefix_range(first_key, diagonal, prefix_len, IS_CAUSAL: tl.constexpr):
    """`visible_range` within the first prefix_len tokens, for queries of several rows: first_key, diagonal [TILE_M]."""
    begin = tl.maximum(tl.min(first_key, 0), 0)
    end = prefix_len
    all_begin = tl.max(first_key, 0)
    all_end = prefix_len
    if IS_CAUSAL:
        end = tl.minimum(end, tl.max(diagonal, 0) + 1)
        all_end = tl.minimum(all_end, tl.min(diagonal, 0) + 1)
    return begin, end, all_begin, all_end


@triton.jit
def split_share(begin, end, split, num_splits, MIN_SPLIT_TILES: tl.constexpr, TILE_N: tl.constexpr):
    """The share of [begin, end) that falls to a split, in whole tiles; empty where begin >= end."""
    tiles = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), TILE_N), num_splits)
    if MIN_SPLIT_TILES > 0:
        tiles = tl.maximum(tiles, MIN_SPLIT_TILES)
    begin += split * tiles * TILE_N
    return begin, tl.minimum(end, begin + tiles * TILE_N)
