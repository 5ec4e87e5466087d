"""Bytes and operations that each kernel cannot do without, and the time that a GPU needs for them at least.

Bytes are compulsory traffic: every element of every tensor that the kernel must touch, once, as if caches were
perfect. Operations are the multiplications and additions of matrix products over visible pairs of query and key.
A measured time over `floor_seconds` is how far a kernel is from what the hardware allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ID_BYTES = 4  # block table entries and lengths are int32


@dataclass(frozen=True)
class Gpu:
    """Peak rates: bytes per second of memory, dense operations per second by dtype of the products."""

    name: str
    bandwidth: float
    flops: dict[torch.dtype, float]


def _gpu(name: str, terabytes: float, half: float, single: float) -> Gpu:
    rates = {torch.float16: half * 1e12, torch.bfloat16: half * 1e12, torch.float32: single * 1e12}
    return Gpu(name, terabytes * 1e12, rates)


# By what `torch.cuda.get_device_name` contains. From the vendors' data sheets: NVIDIA H200 (SXM), H100 (SXM, 80 GB) and
# A100 (SXM, 80 GB) Tensor Core GPU, AMD Instinct MI300X. Without structured sparsity; float32 products are exact here,
# so their rate is that of the vector units, not of TF32.
GPUS = {
    "H200": _gpu("NVIDIA H200", 4.8, 989.4, 66.9),
    "H100": _gpu("NVIDIA H100 SXM", 3.35, 989.4, 66.9),
    "A100": _gpu("NVIDIA A100 SXM 80 GB", 2.039, 312.0, 19.5),
    "MI300X": _gpu("AMD Instinct MI300X", 5.3, 1307.4, 163.4),
}


@dataclass(frozen=True)
class Work:
    """What a launch must read, write and compute."""

    bytes_read: int
    bytes_written: int
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    def __add__(self, other: "Work") -> "Work":
        """One launch after the other."""
        return Work(
            self.bytes_read + other.bytes_read, self.bytes_written + other.bytes_written, self.flops + other.flops
        )


def floor_seconds(work: Work, gpu: Gpu, dtype: torch.dtype) -> float:
    """The least time for `work`: its bytes at the peak bandwidth or its products in `dtype`, whichever takes longer."""
    return max(work.bytes / gpu.bandwidth, work.flops / gpu.flops[dtype])


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer's cache and attention. token_bytes: of K and V of one token of one KV head, with their scales
    if they are quantised; itemsize: bytes of an element of q and of the output."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    token_bytes: int
    itemsize: int
    block_size: int

    @classmethod
    def plain(cls, heads: int, kv_heads: int, head_dim: int, itemsize: int, block_size: int = 16) -> "Layer":
        """Keys and values alike, stored in the dtype of the queries."""
        return cls(heads, kv_heads, head_dim, head_dim, 2 * head_dim * itemsize, itemsize, block_size)


def attention(
    layer: Layer, lengths: Sequence[int], q_len: int, *, causal: bool = True, window: int | None = None
) -> Work:
    """Attention of the last `q_len` positions of rows of `lengths` tokens (those positions included).

    causal: query i sees the tokens up to its own; window: and only so many of the last ones. The scratch of split
    decode is not counted: `split_scratch`.
    """
    tokens = blocks = pairs = 0
    for length in lengths:
        positions = [length - q_len + i for i in range(q_len)]
        begins = [0 if window is None else max(0, at + 1 - window) for at in positions]
        ends = [max(0, at + 1) if causal else length for at in positions]
        begin, end = min(begins, default=0), max(ends, default=0)
        tokens += max(0, end - begin)
        blocks += -(-end // layer.block_size) - begin // layer.block_size if end > begin else 0
        pairs += sum(max(0, end - begin) for begin, end in zip(begins, ends))
    rows = len(lengths) * q_len * layer.heads
    read = tokens * layer.kv_heads * layer.token_bytes + rows * layer.head_dim * layer.itemsize
    read += (blocks + len(lengths)) * ID_BYTES
    written = rows * layer.v_head_dim * layer.itemsize
    return Work(read, written, 2 * pairs * layer.heads * (layer.head_dim + layer.v_head_dim))


def split_scratch(layer: Layer, batch: int, q_len: int, num_splits: int) -> Work:
    """What split decode writes and reads again: outputs, maxima and sums of all splits, in float32."""
    if num_splits == 1:
        return Work(0, 0)
    scratch = batch * q_len * layer.heads * num_splits * (layer.v_head_dim + 2) * 4
    return Work(scratch, scratch)


def cache_write(layer: Layer, lengths: Sequence[int], count: int, new_bytes: int | None = None) -> Work:
    """A write of the last `count` tokens of rows of `lengths` tokens, K and V in one launch.

    new_bytes: of K and V of one new token of one head as they come; as they are stored if left out.
    """
    if count == 0:
        return Work(0, 0)
    size = layer.block_size
    tokens = blocks = 0
    for length in lengths:
        first = max(0, length - count)
        tokens += length - first
        blocks += -(-length // size) - first // size if length > first else 0
    read = tokens * layer.kv_heads * (layer.token_bytes if new_bytes is None else new_bytes)
    read += (blocks + len(lengths)) * ID_BYTES
    return Work(read, tokens * layer.kv_heads * layer.token_bytes)


def copy_blocks(block_bytes: int, count: int, id_bytes: int = 8) -> Work:
    """Copies of `count` blocks of `block_bytes` in one arena, whose address and size are read, too; ids are int64
    unless `id_bytes` says otherwise."""
    return Work(count * (block_bytes + 2 * id_bytes) + 16, count * block_bytes)


def gather(token_bytes: int, heads: int, lengths: Sequence[int], kv_len: int, block_size: int) -> Work:
    """The dense copy of one arena, `token_bytes` a token and head; virtual padding is written, not read."""
    tokens = sum(min(length, kv_len) for length in lengths)
    blocks = sum(-(-length // block_size) - max(0, length - kv_len) // block_size for length in lengths)
    read = tokens * heads * token_bytes + (blocks + len(lengths)) * ID_BYTES
    return Work(read, len(lengths) * kv_len * heads * token_bytes)
