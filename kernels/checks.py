"""Argument checks shared by the Triton wrappers and their plain-torch twins.

Nothing here reads device memory: the values in `block_table` and `seq_lens` are the caller's obligation.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import KernelInputError, KernelTypeError

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTIZED_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
QUANTIZED_DTYPES = tuple(QUANTIZED_MAX)
LEAST_AMAX = 1e-30  # of a token of zeros, whose scale must not be zero
ID_DTYPES = (torch.int32, torch.int64)
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 256
MAX_HEAD_DIM = 576
MAX_POSITION = 2**30


def tensor(name: str, value: object, ndim: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Return `value` as a tensor of `ndim` dims and one of `dtypes`, or raise."""
    if not isinstance(value, Tensor):
        raise KernelTypeError(f"{name} is a {type(value).__name__}; pass a torch.Tensor of {ndim} dims")
    if value.dtype not in dtypes:
        allowed = ", ".join(map(str, dtypes))
        raise KernelTypeError(f"{name} has dtype {value.dtype}; allowed: {allowed}; convert it with .to(...)")
    if value.ndim != ndim:
        raise KernelInputError(
            f"{name} has shape {tuple(value.shape)} ({value.ndim} dims); pass {ndim} dims, see its docstring"
        )
    return value


def integer(name: str, value: object, low: int, high: int) -> int:
    """Return `value` as an int within [low, high], or raise."""
    if not isinstance(value, int):
        raise KernelTypeError(f"{name} is a {type(value).__name__}; pass an int (call .item() on a tensor)")
    if not low <= value <= high:
        raise KernelInputError(f"{name} is {value}; allowed: {low} to {high}; pass a value in that range")
    return value


def positive(name: str, value: object) -> float:
    """Return `value` as a finite float above zero, or raise."""
    if not isinstance(value, (int, float)):
        raise KernelTypeError(f"{name} is a {type(value).__name__}; pass a float (call .item() on a tensor)")
    if not 0 < value < math.inf:
        raise KernelInputError(f"{name} is {value}; allowed: finite and above 0; leave it out for none")
    return float(value)


def same(what: str, got_name: str, got: object, want_name: str, want: object) -> None:
    """Raise unless `got == want`."""
    if got != want:
        raise KernelInputError(
            f"{got_name} has {what} {got}, {want_name} has {want}; they must agree: make {got_name} match"
        )


def arena(name: str, value: object) -> Tensor:
    """Check an arena [num_blocks, H_kv, block_size, D]; any strides."""
    checked = tensor(name, value, 4, FLOAT_DTYPES + QUANTIZED_DTYPES)
    block_size, head_dim = checked.shape[2:]
    if block_size & (block_size - 1) or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise KernelInputError(
            f"{name} has block_size {block_size} (shape {tuple(checked.shape)}); allowed: powers of two from "
            f"{MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}; allocate it as [num_blocks, H_kv, block_size, D]"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise KernelInputError(
            f"{name} has head dim {head_dim}; allowed: 1 to {MAX_HEAD_DIM}; leave this attention un-paged"
        )
    return checked


def compute_dtypes(stored: Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes in which tokens of an arena are computed with: its own, or any float for a quantised one."""
    return FLOAT_DTYPES if stored.dtype in QUANTIZED_DTYPES else (stored.dtype,)


def scales(name: str, value: object, stored: Tensor) -> None:
    """Check the scales float32 [num_blocks, H_kv, block_size] of a quantised arena; other arenas have none."""
    if stored.dtype not in QUANTIZED_DTYPES:
        if value is not None:
            raise KernelInputError(f"{name} are given for an arena of {stored.dtype}; allowed: None; leave them out")
        return
    if value is None:
        raise KernelInputError(
            f"{name} is None for an arena of {stored.dtype}; allowed: float32 {tuple(stored.shape[:3])}; pass the "
            "scales that cache_write filled"
        )
    checked = tensor(name, value, 3, (torch.float32,))
    same("shape", name, tuple(checked.shape), "its arena", tuple(stored.shape[:3]))
    same("device", name, checked.device, "its arena", stored.device)


def gathered(name: str, value: object, stored: Tensor) -> torch.dtype:
    """Dtype of a dense copy: the arena's own; of a quantised arena any float, by default float32."""
    allowed = compute_dtypes(stored)
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise KernelTypeError(f"{name} is {value}; allowed: {', '.join(map(str, allowed))}; convert the result")
    assert isinstance(value, torch.dtype)
    return value


def row_counts(name: str, value: object, like_name: str, like: Tensor) -> Tensor:
    """Check one int32 for each row of `like` [B, ...]; the device is the caller's to check."""
    counts = tensor(name, value, 1, (torch.int32,))
    same("batch size", name, counts.shape[0], like_name, like.shape[0])
    if not counts.is_contiguous():
        raise KernelInputError(f"{name} has stride {counts.stride(0)}; allowed: 1; call .contiguous() on it")
    return counts


def table(block_table: object, seq_lens: object, like: Tensor) -> tuple[int, int]:
    """Check block_table [B, W] and seq_lens [B], both int32 on the device of `like`; return (B, W)."""
    blocks = tensor("block_table", block_table, 2, (torch.int32,))
    lens = row_counts("seq_lens", seq_lens, "block_table", blocks)
    same("device", "block_table", blocks.device, "the arena", like.device)
    same("device", "seq_lens", lens.device, "the arena", like.device)
    return blocks.shape[0], blocks.shape[1]


def write(name: str, target: Tensor, new: object, batch: int) -> Tensor:
    """Check the new tokens [B, H_kv, n, D] of one arena."""
    checked = tensor(name, new, 4, compute_dtypes(target))
    same("device", name, checked.device, "the arena", target.device)
    same("batch size", name, checked.shape[0], "block_table", batch)
    same("H_kv", name, checked.shape[1], "the arena", target.shape[1])
    same("head dim", name, checked.shape[3], "the arena", target.shape[3])
    return checked


def pair(key_arena: Tensor, value_arena: Tensor) -> None:
    """Check that two arenas belong to one layer: same blocks, heads, block size, dtype and device."""
    same("shape[:3]", "v_arena", tuple(value_arena.shape[:3]), "k_arena", tuple(key_arena.shape[:3]))
    same("dtype", "v_arena", value_arena.dtype, "k_arena", key_arena.dtype)
    same("device", "v_arena", value_arena.device, "k_arena", key_arena.device)


def context_length(kv_len: object, width: int, block_size: int, least: int = 1) -> int:
    """Check the logical length of a batch against the tokens its block table can hold."""
    return integer("kv_len", kv_len, least, min(width * block_size, MAX_POSITION))


def shared_prefix(value: object, block_size: int, width: int) -> None:
    """Check how many tokens all rows share: whole blocks, within the block table."""
    checked = integer("shared_prefix", value, 0, width * block_size)
    if checked % block_size:
        raise KernelInputError(
            f"shared_prefix is {checked}; allowed: multiples of the block size {block_size}; round it down"
        )


def launchable(value: Tensor, interpreted: bool, stored: Tensor | None = None) -> None:
    """Raise unless Triton can run on the tensor's device in this process, also on the dtype of the arena `stored`."""
    if not value.is_cuda and not interpreted:
        raise KernelInputError(
            f"the tensors are on {value.device}; allowed: a CUDA or ROCm device; move them there, call the twin "
            "in kernels.reference, or set TRITON_INTERPRET=1 before importing triton"
        )
    if stored is not None and stored.dtype == torch.float8_e4m3fn and stored.is_cuda and not torch.version.hip:
        float8(torch.cuda.get_device_capability(stored.device))


def float8(capability: tuple[int, int]) -> None:
    """Raise unless a CUDA device of this capability converts float8_e4m3fn."""
    if capability < (8, 9):
        raise KernelTypeError(
            f"an arena has dtype torch.float8_e4m3fn on a device of capability {capability[0]}.{capability[1]}; "
            "allowed: 8.9 or later; store torch.int8 instead"
        )


def per_head(name: str, value: object, q: Tensor) -> Tensor:
    """Check one float per head of the queries `q`: [H_q]."""
    checked = tensor(name, value, 1, FLOAT_DTYPES)
    same("device", name, checked.device, "q", q.device)
    same("head count", name, checked.shape[0], "q", q.shape[1])
    if not checked.is_contiguous():
        raise KernelInputError(f"{name} has stride {checked.stride(0)}; allowed: 1; call .contiguous() on it")
    return checked


def copy(arenas: object, src_ids: object, dst_ids: object) -> Sequence[Tensor]:
    """Check the block ids of a copy, [n] each, contiguous, on the device of the arenas; return those as a sequence."""
    checked = [arenas] if isinstance(arenas, Tensor) else arenas
    if not isinstance(checked, Sequence) or not all(isinstance(arena, Tensor) for arena in checked):
        raise KernelTypeError(f"arenas is a {type(arenas).__name__}; pass a torch.Tensor, or a sequence of them")
    sources = tensor("src_ids", src_ids, 1, ID_DTYPES)
    destinations = tensor("dst_ids", dst_ids, 1, ID_DTYPES)
    same("length", "dst_ids", destinations.shape[0], "src_ids", sources.shape[0])
    same("device", "dst_ids", destinations.device, "src_ids", sources.device)
    for name, ids in (("src_ids", sources), ("dst_ids", destinations)):
        if not ids.is_contiguous():
            raise KernelInputError(f"{name} has stride {ids.stride(0)}; allowed: 1; call .contiguous() on it")
    for index, arena in enumerate(checked):
        _whole_blocks(f"arenas[{index}]", arena)
        same("device", f"arenas[{index}]", arena.device, "src_ids", sources.device)
    return checked


def _whole_blocks(name: str, value: Tensor) -> None:
    """Raise unless the blocks of [num_blocks, ...] lie densely one behind the other, in whole words of 8 bytes."""
    expected = 1
    for dim in sorted(range(1, value.ndim), key=value.stride):
        if value.shape[dim] != 1 and value.stride(dim) != expected:
            break
        expected *= value.shape[dim]
    else:
        size = value.element_size()
        in_words = expected * size % 8 == 0 and value.storage_offset() * size % 8 == 0
        if value.ndim > 1 and value.stride(0) == expected and in_words:
            return
    raise KernelInputError(
        f"{name} has shape {tuple(value.shape)} and strides {value.stride()}; allowed: blocks that lie densely one "
        "behind the other, of a multiple of 8 bytes; pass whole arenas"
    )
