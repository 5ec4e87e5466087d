"""The identity of a model's weights: which tensors they are, in what memory, and how often each was written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Weights"]

_next = count()  # unlike an address, a serial number is never used twice
_tensors = WeakTensorKeyDictionary()  # tensor -> its serial number
_storages: dict[int, tuple[StorageWeakRef, int]] = {}  # by address, which none gets again while it is referred to
_expired = torch.UntypedStorage._expired  # type: ignore[attr-defined]  # what StorageWeakRef.expired() asks
_PICKED = 4  # elements of a weight in a sample
_SAMPLED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
}


class _Seen(NamedTuple):
    """A tensor as it was. storage: the handle of what holds its memory, which `tensor.data = ...` exchanges."""

    tensor: Tensor
    version: int
    address: int
    storage: int


class _Known(NamedTuple):
    """What is known of a graph's weights. refs: of their storages, whose handles are valid while these exist. sample:
    what some of their elements were."""

    seen: Sequence[_Seen]
    refs: Sequence[StorageWeakRef]
    sample: bytes
    digest: bytes


class Weights:
    """The weights that a graph's caches depend on. positions: among the graph's arguments, by name."""

    def __init__(self, positions: Mapping[str, int]) -> None:
        self._items = sorted(positions.items())
        self._known: _Known | None = None

    def tensors(self, args: Sequence[Any]) -> dict[int, Tensor]:
        """The weights among the arguments of a call, by position."""
        return {position: args[position] for _, position in self._items}

    def look(self, args: Sequence[Any] | Mapping[int, Any]) -> None:
        """Notice writes that torch does not count, as far as a sample shows them: a few elements of each weight."""
        known = self._known
        if known is not None and self._same(known, args) and _sample(self._given(args)) != known.sample:
            self._known = None

    def digest(self, args: Sequence[Any] | Mapping[int, Any]) -> bytes | None:
        """32 bytes that are the same for the same weights, unless they were written to in between; None if nobody could
        tell. Writes through `tensor.data`, and by other libraries than torch, are noticed by `look` only."""
        known = self._known
        if known is not None and self._same(known, args):
            return known.digest
        tensors = self._given(args)
        return None if any(tensor.is_inference() for tensor in tensors) else self._hash(tensors)

    def _given(self, args: Sequence[Any] | Mapping[int, Any]) -> list[Tensor]:
        return [args[position] for _, position in self._items]

    def _same(self, known: _Known, args: Sequence[Any] | Mapping[int, Any]) -> bool:
        """Whether the weights are those that are known, as far as torch counts."""
        for (_, position), (tensor, version, address, storage) in zip(self._items, known.seen):
            given = args[position]
            if given is not tensor or given._version != version or given.data_ptr() != address or _expired(storage):
                return False  # while the storage lives, no other has its address
        return True

    def _hash(self, tensors: Sequence[Tensor]) -> bytes:
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
        sample = _sample(tensors)
        digest = sha256(repr(facts).encode() + sample).digest()
        self._known = _Known(seen, refs, sample, digest)
        return digest


def _sample(tensors: Sequence[Tensor]) -> bytes:
    """The values of some elements of each tensor. No view of them is kept: it would keep memory that
    `tensor.data = ...` gives up."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            for part in _picked(tensor):
                alike.setdefault((part.device, part.dtype), []).append(part)
        joined = [torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in alike.values()]
    return b"".join(joined)


def _picked(tensor: Tensor) -> Iterator[Tensor]:
    """A view of a few elements that lie far apart, or none."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.dtype in _SAMPLED
    if not plain or tensor.layout != torch.strided or not (size := tensor.numel()):
        return
    step = -(-size // _PICKED) if tensor.is_contiguous() else size  # else its elements may be anywhere: the first
    picked = -(-size // step)
    if (tensor.storage_offset() + (picked - 1) * step + 1) * tensor.itemsize > tensor.untyped_storage().nbytes():
        return  # its memory was taken from it, for a while
    part = torch.as_strided(tensor, (picked,), (step,))
    yield part.view(torch.uint8) if part.itemsize == 1 else part
