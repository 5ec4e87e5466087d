"""Whole-block copies inside arenas, and the dense view of a batch's pages; one launch each."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .arguments import pointer
from .common import load_block_ids
from .launch import INTERPRETED, Allocator, Launch
from .rounding import cdiv, next_power_of_2

TILE_ELEMENTS = 4096
WORD_BYTES = 8  # divides every block: of 8 slots at least
TILE_WORDS = 2048


@triton.jit
def copy_blocks_kernel(
    arenas_ptr,
    block_words_ptr,
    src_ids_ptr,
    dst_ids_ptr,
    num_arenas,
    IS_ALIGNED: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    arena = pid % num_arenas
    src_id = tl.load(src_ids_ptr + pid // num_arenas).to(tl.int64)
    dst_id = tl.load(dst_ids_ptr + pid // num_arenas).to(tl.int64)
    arena_ptr = tl.load(arenas_ptr + arena).to(tl.pointer_type(tl.int64))
    block_words = tl.load(block_words_ptr + arena)
    if IS_ALIGNED:
        arena_ptr = tl.multiple_of(arena_ptr, 16)
        block_words = tl.multiple_of(block_words, 2)
    word_offs = tl.program_id(1) * TILE_WORDS + tl.arange(0, TILE_WORDS)  # [TILE_WORDS]
    word_mask = word_offs < block_words
    tile = tl.load(arena_ptr + src_id * block_words + word_offs, mask=word_mask)
    tl.store(arena_ptr + dst_id * block_words + word_offs, tile, mask=word_mask)


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
    scales_ptr,
    scales_block_stride,
    scales_head_stride,
    scales_slot_stride,
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
    HAS_SCALES: tl.constexpr,
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
    if HAS_SCALES:
        scale_offs = block_ids * scales_block_stride + tokens % BLOCK_SIZE * scales_slot_stride  # [TILE_T]
        scales = tl.load(scales_ptr + head * scales_head_stride + scale_offs, mask=token_mask, other=0.0)
        tile = (tile.to(tl.float32) * scales[:, None]).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + batch * out_batch_stride + head * out_head_stride
    out_ptrs += keys.to(tl.int64)[:, None] * out_key_stride + d_offs[None, :] * out_dim_stride
    tl.store(out_ptrs, tile, mask=(keys < kv_len)[:, None] & d_mask)


def plan_copy_blocks(arenas: Sequence[Tensor], src_ids: Tensor, dst_ids: Tensor) -> Launch:
    """The launch that copies block src_ids[i] to block dst_ids[i] in each of the arenas."""
    sizes = tuple(arena[0].numel() * arena.element_size() for arena in arenas)
    addresses = tuple(arena.data_ptr() for arena in arenas)
    arenas_row, block_words_row = _directory(addresses, sizes, src_ids.device)
    arguments = {
        "arenas_ptr": arenas_row,
        "block_words_ptr": block_words_row,
        "src_ids_ptr": src_ids,
        "dst_ids_ptr": dst_ids,
        "num_arenas": len(arenas),
        "IS_ALIGNED": all(number % 16 == 0 for number in sizes + addresses),
        "TILE_WORDS": TILE_WORDS,
    }
    tiles = cdiv(max(sizes, default=0) // WORD_BYTES, TILE_WORDS)
    return Launch(copy_blocks_kernel, (src_ids.shape[0] * len(arenas), tiles), arguments)


@lru_cache(maxsize=64)
def _directory(addresses: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses and words per block [2, arenas] on the device: a group's arenas change only when it grows."""
    with torch.inference_mode(False):
        return torch.tensor([addresses, [size // WORD_BYTES for size in sizes]], dtype=torch.int64, device=device)


def plan_gather(
    arena: Tensor, block_table: Tensor, seq_lens: Tensor, kv_len: int, out: Tensor, scales: Tensor | None = None
) -> Launch:
    """The launch that writes the dense `out` [B, H_kv, kv_len, D]."""
    tile_d = next_power_of_2(arena.shape[3])
    tile_t = min(next_power_of_2(kv_len), TILE_ELEMENTS // tile_d)
    arguments = pointer("arena", arena, ("block", "head", "slot", "dim"))
    arguments |= pointer("out", out, ("batch", "head", "key", "dim"))
    arguments |= {
        "num_kv_heads": arena.shape[1],
        "BLOCK_SIZE": arena.shape[2],
        "HEAD_DIM": arena.shape[3],
        "TILE_T": tile_t,
        "TILE_D": tile_d,
        "block_table_ptr": block_table,
        "table_batch_stride": block_table.stride(0),
        "table_block_stride": block_table.stride(1),
        "seq_lens_ptr": seq_lens,
        "kv_len": kv_len,
        "HAS_SCALES": scales is not None,
    }
    arguments |= pointer("scales", scales, ("block", "head", "slot"))
    tiles = cdiv(kv_len, tile_t)
    return Launch(gather_kernel, (out.shape[0] * out.shape[1], tiles), arguments)


def copy_blocks(arenas: Tensor | Sequence[Tensor], src_ids: Tensor, dst_ids: Tensor) -> None:
    """Copy whole blocks, arena[dst_ids[i]] = arena[src_ids[i]], in one launch for all arenas; ids int32 or int64 [n].

    An arena, or its scales, is of any dtype and shape [num_blocks, ...] whose blocks lie one behind the other in
    memory. The caller keeps destinations distinct, none of them a source or block 0. Raises KernelInputError or
    KernelTypeError.
    """
    arenas = checks.copy(arenas, src_ids, dst_ids)
    if not arenas:
        return
    checks.launchable(arenas[0], INTERPRETED)
    plan_copy_blocks(arenas, src_ids, dst_ids).run()


def gather(
    arena: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_len: int,
    *,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    allocate: Allocator = torch.empty,
) -> Tensor:
    """Dense copy [B, H_kv, kv_len, D] of a batch's pages, zeros at virtual padding.

    An arena of float8_e4m3fn or int8 has `scales` (see `cache_write`), and its copy any float `dtype`, by default
    float32; other arenas keep theirs.
    `allocate(shape, dtype=, device=)` provides the output. Raises KernelInputError or KernelTypeError.
    """
    batch, width = checks.table(block_table, seq_lens, checks.arena("arena", arena))
    checks.context_length(kv_len, width, arena.shape[2], least=0)
    checks.scales("scales", scales, arena)
    dtype = checks.gathered("dtype", dtype, arena)
    checks.launchable(arena, INTERPRETED, arena)
    out = allocate((batch, arena.shape[1], kv_len, arena.shape[3]), dtype=dtype, device=arena.device)
    plan_gather(arena, block_table, seq_lens, kv_len, out, scales).run()
    return out
