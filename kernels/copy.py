"""Whole-block copies inside an arena, and the dense view of a batch's pages; one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .common import load_block_ids
from .launch import INTERPRETED, Allocator, Launch
from .problem import pointer

TILE_ELEMENTS = 4096


@triton.jit
def copy_blocks_kernel(
    arena_ptr,
    arena_block_stride,
    arena_head_stride,
    arena_slot_stride,
    arena_dim_stride,
    src_ids_ptr,
    dst_ids_ptr,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_D: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    head = pid % num_kv_heads
    src_id = tl.load(src_ids_ptr + pid // num_kv_heads).to(tl.int64)
    dst_id = tl.load(dst_ids_ptr + pid // num_kv_heads).to(tl.int64)
    slots = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)  # [TILE_T]
    d_offs = tl.arange(0, TILE_D)  # [TILE_D]
    mask = (slots < BLOCK_SIZE)[:, None] & (d_offs < HEAD_DIM)[None, :]  # [TILE_T, TILE_D]
    tile_ptrs = arena_ptr + head * arena_head_stride
    tile_ptrs += slots[:, None] * arena_slot_stride + d_offs[None, :] * arena_dim_stride
    tile = tl.load(tile_ptrs + src_id * arena_block_stride, mask=mask)
    tl.store(tile_ptrs + dst_id * arena_block_stride, tile, mask=mask)


@triton.jit(do_not_specialize=["kv_len"])
def gather_kernel(
    arena_ptr,
    arena_block_stride,
    arena_head_stride,
    arena_slot_stride,
    arena_dim_stride,
    block_table_ptr,
    table_batch_stride,
    table_block_stride,
    seq_lens_ptr,
    out_ptr,
    out_batch_stride,
    out_head_stride,
    out_key_stride,
    out_dim_stride,
    kv_len,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_D: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    batch = pid // num_kv_heads
    head = pid % num_kv_heads
    seq_len = tl.load(seq_lens_ptr + batch)
    keys = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)  # [TILE_T]
    tokens = keys - (kv_len - seq_len)  # [TILE_T]
    token_mask = (tokens >= 0) & (tokens < seq_len)
    d_offs = tl.arange(0, TILE_D)  # [TILE_D]
    d_mask = (d_offs < HEAD_DIM)[None, :]  # [1, TILE_D]
    table_ptr = block_table_ptr + batch * table_batch_stride
    # [TILE_T]
    block_ids = load_block_ids(table_ptr, table_block_stride, tokens, token_mask, BLOCK_SIZE, True)
    arena_offs = block_ids * arena_block_stride + tokens % BLOCK_SIZE * arena_slot_stride  # [TILE_T]
    arena_ptrs = arena_ptr + head * arena_head_stride
    arena_ptrs += arena_offs[:, None] + d_offs[None, :] * arena_dim_stride
    tile = tl.load(arena_ptrs, mask=token_mask[:, None] & d_mask, other=0.0)  # [TILE_T, TILE_D]
    out_ptrs = out_ptr + batch * out_batch_stride + head * out_head_stride
    out_ptrs += keys.to(tl.int64)[:, None] * out_key_stride + d_offs[None, :] * out_dim_stride
    tl.store(out_ptrs, tile, mask=(keys < kv_len)[:, None] & d_mask)


def tile_arguments(arena: Tensor, reach: int) -> dict[str, object]:
    """Arena arguments and tile extents of a kernel that visits `reach` tokens."""
    tile_d = triton.next_power_of_2(arena.shape[3])
    tile_t = min(triton.next_power_of_2(reach), TILE_ELEMENTS // tile_d)
    sizes = {"num_kv_heads": arena.shape[1], "BLOCK_SIZE": arena.shape[2], "HEAD_DIM": arena.shape[3]}
    tiles = {"TILE_T": tile_t, "TILE_D": tile_d}
    return pointer("arena", arena, ("block", "head", "slot", "dim")) | sizes | tiles


def plan_copy_blocks(arena: Tensor, src_ids: Tensor, dst_ids: Tensor) -> Launch:
    """The launch that copies block src_ids[i] to block dst_ids[i]."""
    num_kv_heads, block_size = arena.shape[1:3]
    arguments = tile_arguments(arena, block_size) | {"src_ids_ptr": src_ids, "dst_ids_ptr": dst_ids}
    tiles = triton.cdiv(block_size, arguments["TILE_T"])
    return Launch(copy_blocks_kernel, (src_ids.shape[0] * num_kv_heads, tiles), arguments)


def plan_gather(arena: Tensor, block_table: Tensor, seq_lens: Tensor, kv_len: int, out: Tensor) -> Launch:
    """The launch that writes the dense `out` [B, H_kv, kv_len, D]."""
    arguments = tile_arguments(arena, kv_len) | pointer("out", out, ("batch", "head", "key", "dim"))
    arguments |= {
        "block_table_ptr": block_table,
        "table_batch_stride": block_table.stride(0),
        "table_block_stride": block_table.stride(1),
        "seq_lens_ptr": seq_lens,
        "kv_len": kv_len,
    }
    tiles = triton.cdiv(kv_len, arguments["TILE_T"])
    return Launch(gather_kernel, (out.shape[0] * out.shape[1], tiles), arguments)


def copy_blocks(arena: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Copy whole blocks inside an arena: arena[dst_ids[i]] = arena[src_ids[i]], ids int32 or int64 [n].

    The caller keeps destinations distinct, none of them a source or block 0. Raises KernelInputError or
    KernelTypeError.
    """
    checks.copy(checks.arena("arena", arena), src_ids, dst_ids)
    checks.launchable(arena, INTERPRETED)
    plan_copy_blocks(arena, src_ids, dst_ids).run()


def gather(
    arena: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_len: int,
    *,
    allocate: Allocator = torch.empty,
) -> Tensor:
    """Dense copy [B, H_kv, kv_len, D] of a batch's pages, zeros at virtual padding.

    `allocate(shape, dtype=, device=)` provides the output. Raises KernelInputError or KernelTypeError.
    """
    batch, width = checks.table(block_table, seq_lens, checks.arena("arena", arena))
    checks.context_length(kv_len, width, arena.shape[2])
    checks.launchable(arena, INTERPRETED)
    out = allocate((batch, arena.shape[1], kv_len, arena.shape[3]), dtype=arena.dtype, device=arena.device)
    plan_gather(arena, block_table, seq_lens, kv_len, out).run()
    return out
