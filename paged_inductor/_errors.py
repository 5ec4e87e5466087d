"""Errors of the package. Every message states the value got, the values allowed and the next step."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ConfigurationError",
    "IntegrityError",
    "KVBudgetExceeded",
    "MaterializationError",
    "MissingExtraError",
    "PagedInductorError",
    "PatchError",
    "PoolMismatchError",
    "PrefixError",
    "QuotaExceeded",
    "SanitizerError",
    "SavedCacheError",
    "SwapError",
    "UnsupportedInputError",
    "VerificationError",
    "missing_extra",
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


class PrefixError(PagedInductorError, ValueError):
    """A prefix cannot be registered: it is no sequence of token ids, or they do not determine the model's caches."""


class MaterializationError(PagedInductorError, RuntimeError):
    """An operation would copy pages into a dense tensor while `on_materialize="error"` is set."""


class MissingExtraError(PagedInductorError, ImportError):
    """A function needs a library that is not installed; the message names the extra that brings it."""


def missing_extra(what: str, library: str, extra: str) -> MissingExtraError:
    """The error that says that `what` needs a library, and how to install it."""
    return MissingExtraError(f"{what} needs {library}, which is not installed: pip install 'paged-inductor[{extra}]'")


class IntegrityError(PagedInductorError, AssertionError):
    """The books do not balance: a bug of this package. Please report it with the message."""


class KVBudgetExceeded(PagedInductorError, MemoryError):
    """The byte budget for KV pages is exhausted. Nothing was changed; existing caches stay valid.

    `holders` lists (label, bytes) of the live caches, largest first.
    """

    def __init__(self, message: str, holders: list[tuple[str, int]]):
        super().__init__(message)
        self.holders = holders


class QuotaExceeded(KVBudgetExceeded):
    """A tenant's quota of bytes for KV pages is used up. Nothing was changed; other tenants are not concerned."""


class SavedCacheError(PagedInductorError, ValueError):
    """A cache cannot be saved as it is, or a file holds no cache that can be loaded here. Nothing was changed."""


class SanitizerError(PagedInductorError, AssertionError):
    """The sanitizer found a block that is used after it was freed, freed twice, or never freed.

    The message names the block, its generations and the stacks. But for leaks, it is a bug of this package or of code
    that changes its books: please report it with the message. `leaks`: the caches that are alive, if that is the fault.
    """

    def __init__(self, message: str, leaks: Sequence[object] = ()):
        super().__init__(message)
        self.leaks = leaks


class SwapError(PagedInductorError, RuntimeError):
    """Tokens of a swapped cache could not be brought back. Other caches are not concerned."""


class VerificationError(PagedInductorError, AssertionError):
    """With `verify=True`, a paged step or operation gave other values than the dense one beside it.

    Nothing of the step was handed out, and its blocks are free again. Older caches are as they were before it, but for
    static buffers, which keep what the step wrote into them.

    label: the program. graph: its graph's number, as `explain()` counts them; 0 for an eager operation. step: how many
    steps the cache had seen, this one included. layer: the module whose attention it is, or the graph node's name.
    what: "output", "stored keys", "stored values", "stored tokens", "result i" or "input i". largest, index: the
    largest absolute difference and where it is. allowed: the largest that would have passed.
    """

    def __init__(
        self,
        label: str,
        graph: int,
        step: int,
        layer: str,
        what: str,
        largest: float,
        index: tuple[int, ...],
        allowed: float,
        note: str,
    ):
        place = f"graph {graph}" if graph else "an eager operation"
        super().__init__(
            f"{label}, step {step} ({place}): in the {what} of {layer}, paged and dense differ by {largest:.3g} at "
            f"index {list(index)} ({note}), where {allowed:.3g} is allowed. What comes before it in the step agrees. "
            "No cache of the step was handed out. Next: if the difference is small, and only rounding, raise "
            'verify_tolerance; if inner="eager" removes it, the inner compiler made it; else it is a bug of this '
            "package: please report it with this message and explain(model)"
        )
        self.label, self.graph, self.step, self.layer, self.what = label, graph, step, layer, what
        self.largest, self.index, self.allowed = largest, index, allowed
