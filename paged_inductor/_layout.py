"""What the runtime (which lays tables and arenas out) and the operations (which read them) must agree on.

An arena of *packed* pages holds quantised tokens: in each block, for each head, the 8-bit codes of all slots, and
behind them one float32 scale per slot. It has a dimension more than another: [num_blocks, H, 1, block_size, D + 4].
Whoever moves whole blocks (copies, swaps, saves them) moves the scales with them, and need not know.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "KV_DTYPES",
    "ArenaLayout",
    "arena_layout",
    "chunk_blocks",
    "chunks_needed",
    "head_dim",
    "is_packed",
    "unpack",
]

KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
"""What quantised tokens may be stored as, by the names of the option `kv_dtype`."""
_SCALE_BYTES = 4

_CHUNK_TOKENS = 128  # fewer slots computed in vain at a row's end, against more partial results to combine


def chunk_blocks(block_size: int) -> int:
    """Blocks in a chunk, the unit of work of decode on the CPU: 128 tokens' worth, but at least one block."""
    return max(1, _CHUNK_TOKENS // block_size)


def chunks_needed(length: int, block_size: int) -> int:
    """Chunks of a row of `length` tokens."""
    return -(-length // (chunk_blocks(block_size) * block_size))


class ArenaLayout(NamedTuple):
    """How an arena [num_blocks, *sizes] is stored; strides are those of all its dimensions, in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def packed(self) -> bool:
        """Whether it holds quantised tokens with their scales."""
        return len(self.sizes) == 4


def arena_layout(
    heads: int, block_size: int, head_dim: int, dtype: torch.dtype, transposed: bool, packed: bool
) -> ArenaLayout:
    """The layout of an arena of `dtype`. transposed: the slots of a block lie side by side."""
    width = head_dim + _SCALE_BYTES if packed else head_dim
    area = block_size * width
    inner = (1, block_size) if transposed else (width, 1)
    if packed:
        return ArenaLayout((heads, 1, block_size, width), (heads * area, area, area, *inner), dtype)
    return ArenaLayout((heads, block_size, width), (heads * area, area, *inner), dtype)


def is_packed(arena: Tensor) -> bool:
    """Whether an arena holds quantised tokens with their scales."""
    return arena.dim() == 5


def head_dim(arena: Tensor) -> int:
    """Numbers that a head of a token has in an arena of either kind."""
    return arena.shape[-1] - (_SCALE_BYTES if is_packed(arena) else 0)


def unpack(arena: Tensor) -> tuple[Tensor, Tensor]:
    """The codes [num_blocks, H, block_size, D] and the scales float32 [num_blocks, H, block_size] of a packed arena, in
    its own memory."""
    blocks, heads, _, block_size, width = arena.shape
    dim, area = head_dim(arena), block_size * width
    outer = (heads * area, area)
    inner = (1, block_size) if arena.stride(3) < arena.stride(4) else (dim, 1)
    codes = arena.as_strided((blocks, heads, block_size, dim), (*outer, *inner))
    flat = arena.as_strided((blocks, heads, area), (*outer, 1))
    return codes, flat[:, :, block_size * dim :].view(torch.float32)
