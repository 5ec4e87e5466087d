"""Triton kernels over paged KV caches. Plain-torch twins with the same signatures are in `reference`."""

from .copy import copy_blocks, gather
from .dispatch import attention
from .errors import KernelInputError, KernelTypeError
from .write import cache_write, cache_write_kv

__all__ = [
    "KernelInputError",
    "KernelTypeError",
    "attention",
    "cache_write",
    "cache_write_kv",
    "copy_blocks",
    "gather",
]
