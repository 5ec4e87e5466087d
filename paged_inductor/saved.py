"""Whether the header of a saved cache makes sense: a file may come from anybody, and the books must not suffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from ._config import require_block_size
from ._errors import ConfigurationError
from ._layout import KV_DTYPES

__all__ = ["is_sound"]


def is_sound(header: Mapping[str, Any], file_size: int) -> bool:
    """Whether the numbers of a header fit together, and fit a file of `file_size` bytes."""
    try:
        groups, handles = header["groups"], header["handles"]
        return (
            all(_group(group, file_size) for group in groups)
            and all(_handle(handle, groups) for handle in handles)
            and all(_stack(parts, lead, handles) for parts, lead in header["stacks"])
            and all(_tensor(tensor, file_size) for tensor in header["tensors"])
            and _within(header["skeleton"]["bytes"], file_size + 1)
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ConfigurationError):
        return False


def _within(value: Any, stop: float = float("inf"), first: int = 0) -> bool:
    return type(value) is int and first <= value < stop


def _itemsize(name: str) -> int:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    return dtype.itemsize


def _token_bytes(site: Sequence[Any]) -> int:
    heads, dim, dtype, _device, _transposed, *stored_as = site
    if stored_as and getattr(torch, *stored_as) not in KV_DTYPES.values():
        raise TypeError(stored_as)
    return heads * dim * _itemsize(*(stored_as or [dtype]))


def _group(group: Mapping[str, Any], file_size: int) -> bool:
    size, blocks, tables, sites = group["block_size"], group["blocks"], group["tables"], group["sites"]
    require_block_size(size)
    if not (_within(blocks) and 0 < len(sites) == len(group["crcs"])):
        return False
    if not all(_within(number, first=1) for heads, dim, *_ in sites for number in (heads, dim)):
        return False
    if blocks * size * sum(map(_token_bytes, sites)) > file_size:
        return False
    longest = [-1] * len(tables)
    for rows, lengths, length, static in group["views"]:
        if len(rows) != len(lengths) or not _within(length) or (static and len(set(lengths)) > 1):
            return False
        for row, seen in zip(rows, lengths):
            if not _within(row, len(tables)) or not _within(seen):
                return False
            longest[row] = max(longest[row], seen)
    used = {block for table in tables for block in table}
    return (
        all(_within(block, blocks) for block in used)
        and len(used) == blocks
        and all(seen >= 0 and len(table) == -(-seen // size) for table, seen in zip(tables, longest))
    )


def _handle(handle: Any, groups: Any) -> bool:
    group, view, site, axes = handle
    if not _within(group, len(groups)) or sorted(axes) != sorted("BHSD"):
        return False
    return _within(view, len(groups[group]["views"])) and _within(site, len(groups[group]["sites"]))


def _stack(parts: Any, lead: Any, handles: Any) -> bool:
    if not all(_within(part, len(handles)) for part in parts):
        return False
    return len(parts) > 0 and all(_within(size) for size in lead) and prod(lead) == len(parts)


def _tensor(tensor: Any, file_size: int) -> bool:
    shape, dtype, _device, size, _crc = tensor
    return all(_within(n) for n in shape) and prod(shape) * _itemsize(dtype) == size <= file_size
