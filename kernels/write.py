"""Writes of new tokens into pages, one launch for one arena or for a layer's K and V."""

import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .common import load_block_ids
from .launch import INTERPRETED, Launch
from .problem import pointer

TILE_ELEMENTS = 4096


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
    batch,
    head,
    first_new,
    num_new,
    tokens,
    block_ids,
    token_mask,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Store the new tokens of a tile, zeros past the last one."""
    d_offs = tl.arange(0, TILE_D)  # [TILE_D]
    mask = token_mask[:, None] & (d_offs < HEAD_DIM)[None, :]  # [TILE_T, TILE_D]
    sources = (tokens - first_new).to(tl.int64)  # [TILE_T]
    new_ptrs = new_ptr + batch * new_batch_stride + head * new_head_stride
    new_ptrs += sources[:, None] * new_token_stride + d_offs[None, :] * new_dim_stride
    new = tl.load(new_ptrs, mask=mask & (sources < num_new)[:, None], other=0.0)
    arena_offs = block_ids * arena_block_stride + tokens % BLOCK_SIZE * arena_slot_stride  # [TILE_T]
    arena_ptrs = arena_ptr + head * arena_head_stride
    arena_ptrs += arena_offs[:, None] + d_offs[None, :] * arena_dim_stride
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
):
    pid = tl.program_id(0).to(tl.int64)
    batch = pid // num_kv_heads
    head = pid % num_kv_heads
    seq_len = tl.load(seq_lens_ptr + batch)
    first_new = seq_len - num_new
    tail_begin = (seq_len - 1) // BLOCK_SIZE * BLOCK_SIZE
    # a tail block that this call opens is zeroed to its end
    opens_tail = (seq_len > 0) & (tail_begin >= first_new)
    write_end = tl.where(opens_tail, tail_begin + BLOCK_SIZE, seq_len)

    tokens = first_new + tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)  # [TILE_T]
    token_mask = (tokens >= 0) & (tokens < write_end)
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
        batch,
        head,
        first_new,
        num_new,
        tokens,
        block_ids,
        token_mask,
        BLOCK_SIZE,
        HEAD_DIM,
        TILE_D,
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
            batch,
            head,
            first_new,
            num_new,
            tokens,
            block_ids,
            token_mask,
            BLOCK_SIZE,
            V_HEAD_DIM,
            TILE_DV,
        )


def plan(
    k_arena: Tensor,
    v_arena: Tensor | None,
    k_new: Tensor,
    v_new: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
) -> Launch:
    """The launch that writes one arena, or two where `v_arena` and `v_new` are given."""
    batch, num_kv_heads, num_new, head_dim = k_new.shape
    block_size = k_arena.shape[2]
    v_head_dim = v_arena.shape[3] if v_arena is not None else head_dim
    tile_d, tile_dv = triton.next_power_of_2(head_dim), triton.next_power_of_2(v_head_dim)
    reach = num_new + block_size - 1
    tile_t = min(triton.next_power_of_2(reach), max(1, TILE_ELEMENTS // max(tile_d, tile_dv)))
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
    }
    for name, arena, new in (("k", k_arena, k_new), ("v", v_arena, v_new)):
        arguments |= pointer(f"{name}_arena", arena, ("block", "head", "slot", "dim"))
        arguments |= pointer(f"{name}_new", new, ("batch", "head", "token", "dim"))
    tiles = triton.cdiv(reach, tile_t) if num_new else 0
    return Launch(cache_write_kernel, (batch * num_kv_heads, tiles), arguments)


def cache_write(arena: Tensor, new: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    """Write new [B, H_kv, n, D] into the pages of each row, in place.

    Row b's tokens go to row positions seq_lens[b] - n .. seq_lens[b] - 1; `seq_lens` already counts them.
    Positions below zero (virtual padding) are skipped. The slots after the last token are zeroed in a block
    whose slot 0 this call writes. A write that the table sends to block 0, the zero page, is dropped. The
    caller owns every block written and shares none of them. Raises KernelInputError or KernelTypeError.
    """
    batch, _ = checks.table(block_table, seq_lens, checks.arena("arena", arena))
    checks.write("new", arena, new, batch)
    checks.launchable(arena, INTERPRETED)
    plan(arena, None, new, None, block_table, seq_lens).run()


def cache_write_kv(
    k_arena: Tensor,
    v_arena: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
) -> None:
    """`cache_write` of a layer's K and V in one launch; their head dims may differ."""
    batch, _ = checks.table(block_table, seq_lens, checks.arena("k_arena", k_arena))
    checks.arena("v_arena", v_arena)
    checks.pair(k_arena, v_arena)
    checks.write("k_new", k_arena, k_new, batch)
    checks.write("v_new", v_arena, v_new, batch)
    checks.same("token count", "v_new", v_new.shape[2], "k_new", k_new.shape[2])
    checks.launchable(k_arena, INTERPRETED)
    plan(k_arena, v_arena, k_new, v_new, block_table, seq_lens).run()
