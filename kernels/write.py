"""Writes of new tokens into pages, one launch for one arena or for a layer's K and V."""

import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .arguments import pointer
from .common import load_block_ids, quantized
from .launch import INTERPRETED, Launch
from .rounding import cdiv, next_power_of_2

TILE_ELEMENTS, WARP_ELEMENTS = 4096, 1024  # of a tile, and of one that a warp writes alone


@triton.jit
def write_tile(
    arena_ptr,
    arena_block_stride,
    arena_head_stride,
    arena_slot_stride,
    arena_dim_stride,
    new_ptr,
    new_batch_stride,
    new_head_stride,
    new_token_stride,
    new_dim_stride,
    scales_ptr,
    scales_block_stride,
    scales_head_stride,
    scales_slot_stride,
    batch,
    head,
    first_new,
    tokens,
    block_ids,
    token_mask,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
    QUANTIZED_MAX: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
):
    """Store the new tokens of a tile, each with its scale where they are quantised."""
    d_offs = tl.arange(0, TILE_D)  # [TILE_D]
    mask = token_mask[:, None] & (d_offs < HEAD_DIM)[None, :]  # [TILE_T, TILE_D]
    sources = (tokens - first_new).to(tl.int64)  # [TILE_T]
    new_ptrs = new_ptr + batch * new_batch_stride + head * new_head_stride
    new_ptrs += sources[:, None] * new_token_stride + d_offs[None, :] * new_dim_stride
    new = tl.load(new_ptrs, mask=mask, other=0.0)
    arena_offs = block_ids * arena_block_stride + tokens % BLOCK_SIZE * arena_slot_stride  # [TILE_T]
    arena_ptrs = arena_ptr + head * arena_head_stride
    arena_ptrs += arena_offs[:, None] + d_offs[None, :] * arena_dim_stride
    if QUANTIZED_MAX > 0:
        new, scales = quantized(new, arena_ptr.dtype.element_ty, QUANTIZED_MAX, LEAST_AMAX)
        scale_offs = block_ids * scales_block_stride + tokens % BLOCK_SIZE * scales_slot_stride  # [TILE_T]
        tl.store(scales_ptr + head * scales_head_stride + scale_offs, scales, mask=token_mask)
    tl.store(arena_ptrs, new, mask=mask)


@triton.jit(do_not_specialize=["num_new"])
def cache_write_kernel(
    k_arena_ptr,
    k_arena_block_stride,
    k_arena_head_stride,
    k_arena_slot_stride,
    k_arena_dim_stride,
    k_new_ptr,
    k_new_batch_stride,
    k_new_head_stride,
    k_new_token_stride,
    k_new_dim_stride,
    k_scales_ptr,
    k_scales_block_stride,
    k_scales_head_stride,
    k_scales_slot_stride,
    v_arena_ptr,
    v_arena_block_stride,
    v_arena_head_stride,
    v_arena_slot_stride,
    v_arena_dim_stride,
    v_new_ptr,
    v_new_batch_stride,
    v_new_head_stride,
    v_new_token_stride,
    v_new_dim_stride,
    v_scales_ptr,
    v_scales_block_stride,
    v_scales_head_stride,
    v_scales_slot_stride,
    block_table_ptr,
    table_batch_stride,
    table_block_stride,
    seq_lens_ptr,
    num_new,
    num_kv_heads,
    HAS_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
    QUANTIZED_MAX: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    batch = pid // num_kv_heads
    head = pid % num_kv_heads
    seq_len = tl.load(seq_lens_ptr + batch)
    first_new = seq_len - num_new
    tokens = first_new + tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)  # [TILE_T]
    token_mask = (tokens >= 0) & (tokens < seq_len)
    table_ptr = block_table_ptr + batch * table_batch_stride
    # [TILE_T]
    block_ids = load_block_ids(table_ptr, table_block_stride, tokens, token_mask, BLOCK_SIZE, True)
    token_mask = token_mask & (block_ids != 0)
    write_tile(
        k_arena_ptr,
        k_arena_block_stride,
        k_arena_head_stride,
        k_arena_slot_stride,
        k_arena_dim_stride,
        k_new_ptr,
        k_new_batch_stride,
        k_new_head_stride,
        k_new_token_stride,
        k_new_dim_stride,
        k_scales_ptr,
        k_scales_block_stride,
        k_scales_head_stride,
        k_scales_slot_stride,
        batch,
        head,
        first_new,
        tokens,
        block_ids,
        token_mask,
        BLOCK_SIZE,
        HEAD_DIM,
        TILE_D,
        QUANTIZED_MAX,
        LEAST_AMAX,
    )
    if HAS_V:
        write_tile(
            v_arena_ptr,
            v_arena_block_stride,
            v_arena_head_stride,
            v_arena_slot_stride,
            v_arena_dim_stride,
            v_new_ptr,
            v_new_batch_stride,
            v_new_head_stride,
            v_new_token_stride,
            v_new_dim_stride,
            v_scales_ptr,
            v_scales_block_stride,
            v_scales_head_stride,
            v_scales_slot_stride,
            batch,
            head,
            first_new,
            tokens,
            block_ids,
            token_mask,
            BLOCK_SIZE,
            V_HEAD_DIM,
            TILE_DV,
            QUANTIZED_MAX,
            LEAST_AMAX,
        )


def plan(
    k_arena: Tensor,
    v_arena: Tensor | None,
    k_new: Tensor,
    v_new: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Launch:
    """The launch that writes one arena, or two where `v_arena` and `v_new` are given."""
    batch, num_kv_heads, num_new, head_dim = k_new.shape
    block_size = k_arena.shape[2]
    v_head_dim = v_arena.shape[3] if v_arena is not None else head_dim
    tile_d, tile_dv = next_power_of_2(head_dim), next_power_of_2(v_head_dim)
    tile_t = min(next_power_of_2(num_new), max(1, TILE_ELEMENTS // max(tile_d, tile_dv)))
    arguments = {
        "block_table_ptr": block_table,
        "table_batch_stride": block_table.stride(0),
        "table_block_stride": block_table.stride(1),
        "seq_lens_ptr": seq_lens,
        "num_new": num_new,
        "num_kv_heads": num_kv_heads,
        "HAS_V": v_arena is not None,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "TILE_T": tile_t,
        "TILE_D": tile_d,
        "TILE_DV": tile_dv,
        "QUANTIZED_MAX": checks.QUANTIZED_MAX.get(k_arena.dtype, 0.0),
        "LEAST_AMAX": checks.LEAST_AMAX,
    }
    for name, arena, new, scales in (("k", k_arena, k_new, k_scales), ("v", v_arena, v_new, v_scales)):
        arguments |= pointer(f"{name}_arena", arena, ("block", "head", "slot", "dim"))
        arguments |= pointer(f"{name}_new", new, ("batch", "head", "token", "dim"))
        arguments |= pointer(f"{name}_scales", scales, ("block", "head", "slot"))
    num_warps = 1 if tile_t * max(tile_d, tile_dv) <= WARP_ELEMENTS else 4
    grid = (batch * num_kv_heads, cdiv(num_new, tile_t))
    return Launch(cache_write_kernel, grid, arguments, num_warps)


def cache_write(
    arena: Tensor, new: Tensor, block_table: Tensor, seq_lens: Tensor, *, scales: Tensor | None = None
) -> None:
    """Write new [B, H_kv, n, D] into the pages of each row, in place.

    Row b's tokens go to row positions seq_lens[b] - n .. seq_lens[b] - 1; `seq_lens` already counts them.
    Positions below zero (virtual padding) are skipped. A write that the table sends to block 0, the zero page, is
    dropped. The caller owns every block written and shares none of them.

    An arena of float8_e4m3fn or int8 takes `new` of any float dtype and `scales` float32 [num_blocks, H_kv,
    block_size]: a token's scale is its largest magnitude over the largest that the arena's dtype holds, written in
    the same launch. Raises KernelInputError or KernelTypeError.
    """
    batch, _ = checks.table(block_table, seq_lens, checks.arena("arena", arena))
    checks.write("new", arena, new, batch)
    checks.scales("scales", scales, arena)
    checks.launchable(arena, INTERPRETED, arena)
    plan(arena, None, new, None, block_table, seq_lens, scales).run()


def cache_write_kv(
    k_arena: Tensor,
    v_arena: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """`cache_write` of a layer's K and V in one launch; their head dims may differ."""
    batch, _ = checks.table(block_table, seq_lens, checks.arena("k_arena", k_arena))
    checks.arena("v_arena", v_arena)
    checks.pair(k_arena, v_arena)
    checks.write("k_new", k_arena, k_new, batch)
    checks.write("v_new", v_arena, v_new, batch)
    checks.same("token count", "v_new", v_new.shape[2], "k_new", k_new.shape[2])
    checks.scales("k_scales", k_scales, k_arena)
    checks.scales("v_scales", v_scales, v_arena)
    checks.launchable(k_arena, INTERPRETED, k_arena)
    plan(k_arena, v_arena, k_new, v_new, block_table, seq_lens, k_scales, v_scales).run()
