"""The identity of a model's weights: which tensors they are, in what memory, and how often each was written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Weights"]

_next = count()  # unlike an address, a serial number is never used twice
_tensors = WeakTensorKeyDictionary()  # tensor -> its serial number
_storages: dict[int, tuple[StorageWeakRef, int]] = {}  # by address, which none gets again while it is referred to
_PICKED = 4  # elements of a weight in a sample
_expired = torch.UntypedStorage._expired  # type: ignore[attr-defined]  # five times as fast as by way of the reference


class _Seen(NamedTuple):
    """A tensor as it was. storage: the handle of what holds its memory, which `tensor.data = ...` exchanges."""

    tensor: torch.Tensor
    version: int
    address: int
    storage: int


class Weights:
    """The weights that a graph's caches depend on. positions: among the graph's arguments, by name."""

    def __init__(self, positions: Mapping[str, int]) -> None:
        self._items = sorted(positions.items())
        self._known: tuple[Sequence[_Seen], Sequence[StorageWeakRef], bytes] | None = None
        self._sample: Sequence[torch.Tensor] = ()
        self._looked = b""

    def tensors(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """The weights among the arguments of a call, by position."""
        return {position: args[position] for _, position in self._items}

    def look(self) -> None:
        """Notice writes that torch does not count, as far as a sample shows them: a few elements of each weight."""
        if self._known is not None and _contents(self._sample) != self._looked:
            self._known = None

    def digest(self, args: Sequence[Any] | Mapping[int, Any]) -> bytes | None:
        """32 bytes that are the same for the same weights, unless they were written to in between; None if nobody could
        tell. Writes through `tensor.data`, and by other libraries than torch, are noticed by `look` only."""
        if self._known is not None:
            seen, _, digest = self._known
            for (_, position), (tensor, version, address, storage) in zip(self._items, seen):
                given = args[position]
                if given is not tensor or given._version != version or given.data_ptr() != address or _expired(storage):
                    break  # while the storage lives, no other has its address
            else:
                return digest
        tensors = [args[position] for _, position in self._items]
        return None if any(tensor.is_inference() for tensor in tensors) else self._hash(tensors)

    def _hash(self, tensors: Sequence[torch.Tensor]) -> bytes:
        for handle, (ref, _) in list(_storages.items()):
            if ref.expired():
                _storages.pop(handle, None)
        seen, refs, facts = [], [], []
        for (name, _), tensor in zip(self._items, tensors):
            storage = tensor.untyped_storage()
            known = _storages.get(storage._cdata)
            if known is None:
                known = _storages.setdefault(storage._cdata, (StorageWeakRef(storage), next(_next)))
            seen.append(_Seen(tensor, tensor._version, tensor.data_ptr(), known[0].cdata))
            refs.append(known[0])
            facts.append((name, _tensors.setdefault(tensor, next(_next)), known[1], *seen[-1][1:3]))
        self._sample = [part for tensor in tensors for part in _picked(tensor)]
        self._looked = _contents(self._sample)
        found = sha256(repr(facts).encode() + self._looked).digest()
        self._known = seen, refs, found
        return found


def _picked(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A view of a few elements that lie far apart, or none."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or tensor.layout != torch.strided or not tensor.numel():
        return
    values = tensor.detach()
    if not values.is_contiguous():
        values = values[(slice(0, 1),) * values.dim()]  # one: others may share memory with it
    yield values.view(-1)[:: -(-values.numel() // _PICKED)]


def _contents(sample: Sequence[torch.Tensor]) -> bytes:
    """The values of a sample."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for part in sample:
        alike.setdefault((part.device, part.dtype), []).append(part)
    with torch.no_grad():
        joined = [torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in alike.values()]
    return b"".join(joined)
