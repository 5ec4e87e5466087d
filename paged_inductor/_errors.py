"""Errors of the package. Every message states the value got, the values allowed and the next step."""

from __future__ import annotations

__all__ = [
    "ConfigurationError",
    "IntegrityError",
    "KVBudgetExceeded",
    "MaterializationError",
    "PagedInductorError",
    "PatchError",
    "PoolMismatchError",
    "UnsupportedInputError",
]


class PagedInductorError(Exception):
    """Base class of everything this package raises on purpose."""


class ConfigurationError(PagedInductorError, ValueError):
    """An option has an unknown name or a value outside its range."""


class PatchError(PagedInductorError, TypeError):
    """`page()` or `unpage()` was given something it cannot patch, or patched already."""


class UnsupportedInputError(PagedInductorError, ValueError):
    """An in-place operation on paged tensors cannot be carried out: it writes to several, or to an expanded one."""


class PoolMismatchError(PagedInductorError, ValueError):
    """Paged tensors of two different block pools met in one operation."""


class MaterializationError(PagedInductorError, RuntimeError):
    """An operation would copy pages into a dense tensor while `on_materialize="error"` is set."""


class IntegrityError(PagedInductorError, AssertionError):
    """The books do not balance: a bug of this package. Please report it with the message."""


class KVBudgetExceeded(PagedInductorError, MemoryError):
    """The byte budget for KV pages is exhausted. Nothing was changed; existing caches stay valid.

    `holders` lists (label, bytes) of the live caches, largest first.
    """

    def __init__(self, message: str, holders: list[tuple[str, int]]):
        super().__init__(message)
        self.holders = holders
