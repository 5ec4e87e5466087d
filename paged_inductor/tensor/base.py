"""What all handles have in common: how torch.compile, numpy and pickle see a tensor that has no storage."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._errors import PagedInductorError

__all__ = ["Handle"]


@cache
def _stand_in(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The zero-element tensor that Dynamo sees inside every handle of this type."""
    return torch.empty(0, dtype=dtype, device=device)


class Handle(Tensor):
    """A tensor whose values lie in pages. Subclasses say which, and what operators mean on them."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def dense(self) -> Tensor:
        """A dense copy of the values. It is what was asked for: counted as "dense", but never warned of or refused."""
        raise NotImplementedError

    # -- torch.compile ---------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_stand_in"], None

    @property
    def _stand_in(self) -> Tensor:
        return _stand_in(self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, outer_size: Any, outer_stride: Any) -> Tensor:
        """While Dynamo traces, a handle is a plain fake tensor of its logical shape; guards see type and shape."""
        _require_own_backend()
        return inner["_stand_in"].new_empty_strided(outer_size, outer_stride)

    def _is_view(self) -> bool:
        """Never a view to torch's bookkeeping: slices of handles are handles of their own, with no base to rebuild."""
        return False

    # -- other programs --------------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        return self.dense().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.dense().__array__(dtype) if dtype is not None else self.dense().__array__()

    def tolist(self) -> Any:
        return self.dense().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        """A copy-on-write fork: the copy shares the pages until one of the two is written to."""
        copy = memo[id(self)] = self.clone()
        return copy  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved and pickled as the dense tensor: pages mean nothing in another process."""
        return self.dense().__reduce_ex__(protocol)


def _require_own_backend() -> None:
    """Another backend would read a handle's storage, and it has none: refuse while its graph is being traced."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator = InstructionTranslator.current_tx()
    compiler = getattr(translator.output, "compiler_fn", None)
    while compiler is not None and not getattr(compiler, "pages_kv", False):
        compiler = getattr(compiler, "compiler_fn", None) or getattr(compiler, "_torchdynamo_orig_backend", None)
    if compiler is None:
        raise PagedInductorError(
            "a PagedTensor was passed to a function compiled with another torch.compile backend: compile it with "
            'backend="paged_inductor", or pass cache.dense() instead'
        )
