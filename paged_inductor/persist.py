"""`save(cache, path)` and `load(path)`: a cache in a file, for another process or another day.

A file has five parts: a magic line, the header's length and checksum, the header (JSON), the cache object without its
tensors (a pickle that only names of a short list may appear in), and the tensors' bytes, one section for each cached
tensor of a group, in the order of memory, each with a checksum. Blocks that several rows share are in it once.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from ._errors import SavedCacheError
from ._layout import is_packed, unpack
from .files import replacing
from .identity import fingerprint
from .runtime import Row, SiteSpec, View, manager
from .runtime.restore import SavedView, restore
from .runtime.tiers import memory_of
from .saved import is_sound
from .skeleton import SkeletonReader, SkeletonWriter
from .tensor import PagedStack, PagedTensor
from .tensor.handle import plain

__all__ = ["load", "save"]

MAGIC = b"paged_inductor cache\n"
VERSION = 1
LONGEST_CRC = 2**32 - 1  # in the place of one that is not known yet


def save(cache: Any, path: str | os.PathLike[str], *, model: nn.Module | None = None) -> None:
    """Write a cache, with all that it holds, to a file; whoever reads the path sees the old file or the whole new one.

    cache: a paged tensor, tuples, lists and dicts of them, or a cache object of transformers. Tokens that several rows
    share are written once. model: whose cache it is; `load` then wants the same model (see `identity.fingerprint`).
    Raises `SavedCacheError` if the object holds something that `load` would not accept.
    """
    writer = SkeletonWriter()
    skeleton = writer.skeleton(cache)
    groups = [_SavedGroup(views) for views in writer.groups]
    target = Path(path)
    with manager().using(*(view for views in writer.groups for view in views)), replacing(target) as file:
        header: dict[str, Any] = {
            "version": VERSION,
            "torch": torch.__version__,
            "model": fingerprint(model) if model is not None else None,
            "skeleton": {"bytes": len(skeleton), "crc": zlib.crc32(skeleton)},
            "groups": [group.header() for group in groups],
            "tensors": [_tensor_header(tensor) for tensor in writer.tensors],
            "stacks": writer.stacks,
            "handles": writer.handles,
        }
        size = _write_header(file, header, 0)
        file.write(skeleton)
        for group, facts in zip(groups, header["groups"]):
            facts["crcs"] = [_write(file, section) for section in group.sections()]
        for tensor, facts in zip(writer.tensors, header["tensors"]):
            facts[-1] = _write(file, tensor)
        file.seek(0)
        _write_header(file, header, size)


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    allow: Iterable[type] = (),
) -> Any:
    """The cache in a file that `save` wrote, with its tokens in pages.

    model: the one it was saved with, if it was saved with one. device: where to; None for where it was. allow: classes
    of the cache object besides those of transformers and plain containers. Raises `SavedCacheError` if the file is none
    of `save`'s, was cut off or changed, is of another version or another model's, or holds other classes; and as any
    step does if memory is short.
    """
    with open(path, "rb") as file:
        header = _read_header(file, path)
        if header["model"] is not None and (model is None or fingerprint(model) != header["model"]):
            what = "no model was given" if model is None else f"this {type(model).__name__} is another, or was changed"
            raise SavedCacheError(
                f"{path} was saved with a model, and {what}: pass load(path, model=...) the model with the same weights"
            )
        pickled = _section(file, header["skeleton"]["bytes"], header["skeleton"]["crc"], path)
        views = [_load_group(file, group, device, path) for group in header["groups"]]
        tensors = [_load_tensor(file, tensor, device, path) for tensor in header["tensors"]]
        if file.read(1):
            raise SavedCacheError(f"{path} goes on behind its end: it is not as save() wrote it")
    handles = [PagedTensor(views[g][v], plain(site, axes)) for g, v, site, axes in header["handles"]]
    stacks = [PagedStack([handles[i] for i in parts], lead) for parts, lead in header["stacks"]]
    made: dict[str, list[Any]] = {"handle": handles, "stack": stacks, "tensor": tensors}
    return SkeletonReader(io.BytesIO(pickled), made, {(c.__module__, c.__qualname__) for c in allow}, path).load()


# -- writing -----------------------------------------------------------------------------------------------------------


class _SavedGroup:
    """What is saved of a cache group: some views, their rows, and the blocks of these."""

    def __init__(self, views: Sequence[View]) -> None:
        self.group = views[0].group
        self.views = views

    def header(self) -> dict[str, Any]:
        """The group in numbers. Obligation: a step uses the views, so that their blocks are in place."""
        with manager().locked():
            seen = [(view.rows, view.lengths, view.length, view.static) for view in self.views]
            longest: dict[Row, int] = {}
            for view_rows, lengths, _, _ in seen:
                for row, length in zip(view_rows, lengths):
                    longest[row] = max(length, longest.get(row, 0))
            size = self.group.block_size
            tables = [row.blocks[: -(-length // size)] for row, length in longest.items()]
        position = {row: i for i, row in enumerate(longest)}
        filled: dict[int, int] = {}  # slots of each block that the views see
        for table, length in zip(tables, longest.values()):
            for j, block in enumerate(table):
                filled[block] = max(filled.get(block, 0), min(size, length - j * size))
        self.blocks = list(filled)
        self._partly = [(place, slots) for place, slots in enumerate(filled.values()) if slots < size]
        number = {block: i for i, block in enumerate(self.blocks)}
        return {
            "block_size": size,
            "label": self.views[0].label,
            "sites": [
                [site.heads, site.head_dim, _name(site.dtype), str(site.device), site.transposed]
                + ([_name(site.stored_as)] if site.stored_as is not None else [])
                for site in self.group.sites
            ],
            "blocks": len(self.blocks),
            "tables": [[number[block] for block in table] for table in tables],
            "views": [[[position[row] for row in rows], *rest] for rows, *rest in seen],
            "crcs": [LONGEST_CRC] * len(self.group.sites),
        }

    def sections(self) -> Iterator[Tensor]:
        """The blocks' contents, site by site; zeros where no view sees a token: what is there is others', as the
        tokens of a step that goes on meanwhile."""
        for site, arena in zip(self.group.sites, self.group.arenas):
            index = torch.tensor(self.blocks, dtype=torch.int64, device=arena.device)
            values = site.stored(arena).index_select(0, index).cpu()
            slots = site.stored(values)  # as the arena shows them
            for part in unpack(slots) if is_packed(slots) else (slots,):
                for place, filled in self._partly:
                    part[place, :, filled:] = 0
            yield values


def _tensor_header(tensor: Tensor) -> list[Any]:
    name = _name(tensor.dtype)
    return [list(tensor.shape), name, str(tensor.device), tensor.nbytes, LONGEST_CRC]


def _write(file: IO[bytes], tensor: Tensor) -> int:
    """Write a tensor's bytes; returns their checksum."""
    tensor = tensor.cpu().contiguous()
    data = memory_of(tensor) if tensor.nbytes else b""
    file.write(data)
    return zlib.crc32(data)


def _write_header(file: IO[bytes], header: dict[str, Any], size: int) -> int:
    """Write a header of at least `size` bytes (what JSON lacks, spaces fill up); returns how many it has."""
    text = json.dumps(header).encode().ljust(size)
    file.write(MAGIC + struct.pack("<QI", len(text), zlib.crc32(text)) + text)
    return len(text)


# -- reading -----------------------------------------------------------------------------------------------------------


def _read_header(file: IO[bytes], path: Any) -> dict[str, Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise SavedCacheError(f"{path} is no file of paged_inductor.save()")
    prefix = file.read(12)
    if len(prefix) < 12:
        raise SavedCacheError(f"{path} was cut off")
    size, crc = struct.unpack("<QI", prefix)
    if size > os.fstat(file.fileno()).st_size:
        raise SavedCacheError(f"{path} was cut off, or its header was changed")
    try:
        header = json.loads(_section(file, size, crc, path))
    except ValueError as error:
        raise SavedCacheError(f"{path} has a header that is no JSON: it is not as save() wrote it") from error
    if header["version"] != VERSION:
        raise SavedCacheError(
            f"{path} has version {header['version']} of the format, this package reads version {VERSION}: compute the "
            "cache again, or load it with the version that saved it"
        )
    if not is_sound(header, os.fstat(file.fileno()).st_size):
        raise SavedCacheError(f"{path} has a header that contradicts itself: it is not as save() wrote it")
    return header


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _section(file: IO[bytes], size: int, crc: int, path: Any) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise SavedCacheError(f"{path} was cut off: {size - len(data)} bytes are missing from a section of {size}")
    if zlib.crc32(data) != crc:
        raise SavedCacheError(f"{path} was changed: a checksum is wrong")
    return data


def _load_group(file: IO[bytes], saved: dict[str, Any], device: Any, path: Any) -> list[View]:
    sites = tuple(
        SiteSpec(
            heads,
            dim,
            getattr(torch, dtype),
            torch.device(device or where),
            transposed,
            *(getattr(torch, name) for name in stored_as),
        )
        for heads, dim, dtype, where, transposed, *stored_as in saved["sites"]
    )
    runtime = manager()
    group = runtime.group(sites, saved["block_size"])
    views = [SavedView(*view) for view in saved["views"]]
    ids, made = restore(runtime, group, saved["tables"], views, saved["blocks"], saved["label"])
    with runtime.using(*made):
        for i, (site, crc) in enumerate(zip(sites, saved["crcs"])):
            arena = group.arenas[i]
            shape = (len(ids), *site.stored(arena).shape[1:])
            size = torch.Size(shape).numel() * arena.dtype.itemsize
            data = _section(file, size, crc, path)
            if ids:
                values = torch.frombuffer(bytearray(data), dtype=arena.dtype).view(shape)
                site.put(arena, torch.tensor(ids, device=arena.device), values)
    return made


def _load_tensor(file: IO[bytes], saved: Sequence[Any], device: Any, path: Any) -> Tensor:
    shape, dtype, where, size, crc = saved
    data = _section(file, size, crc, path)
    if not size:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device or where)
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape).to(device or where)
