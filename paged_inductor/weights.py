"""The identity of a model's weights: which tensors they are, and how often each was written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import count
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Weights"]

_serials = WeakTensorKeyDictionary()  # unlike an address, a serial number is never used twice
_next = count()


class Weights:
    """The weights that a graph's caches depend on. positions: among the graph's arguments, by name."""

    def __init__(self, positions: Mapping[str, int]) -> None:
        self._items = sorted(positions.items())
        self._known: tuple[Sequence[tuple[torch.Tensor, int, int]], bytes] | None = None

    def tensors(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """The weights among the arguments of a call, by position."""
        return {position: args[position] for _, position in self._items}

    def digest(self, args: Sequence[Any] | Mapping[int, Any]) -> bytes | None:
        """32 bytes that are the same for the same weights, unless they were written to in between; None if nobody could
        tell. (Writes through `tensor.data` and by other libraries than torch are not noticed.)"""
        if self._known is not None:
            seen, digest = self._known
            for (_, position), (tensor, version, address) in zip(self._items, seen):
                given = args[position]
                if given is not tensor or given._version != version or given.data_ptr() != address:
                    break
            else:
                return digest
        tensors = [args[position] for _, position in self._items]
        if any(tensor.is_inference() for tensor in tensors):
            return None
        return self._hash([(tensor, tensor._version, tensor.data_ptr()) for tensor in tensors])

    def _hash(self, seen: Sequence[tuple[torch.Tensor, int, int]]) -> bytes:
        facts = [
            (name, _serials.setdefault(tensor, next(_next)), version, address)
            for (name, _), (tensor, version, address) in zip(self._items, seen)
        ]
        found = sha256(repr(facts).encode()).digest()
        self._known = seen, found
        return found
