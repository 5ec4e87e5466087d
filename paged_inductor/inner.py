"""The compilers that a rewritten graph can be handed to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from .ops import INDUCTOR_OPTIONS

__all__ = ["INNER_COMPILERS", "compile_inner"]

INNER_COMPILERS = ("inductor", "aot_eager", "eager")


def compile_inner(
    gm: GraphModule, example_inputs: Sequence[Any], inner: str, inductor: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile `gm` with the inner compiler named `inner`; `inductor` holds Inductor's options."""
    if inner == "eager":
        return gm.forward
    if inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, list(example_inputs))
    from torch._inductor.compile_fx import compile_fx

    options = {**INDUCTOR_OPTIONS, **inductor}
    return compile_fx(gm, list(example_inputs), config_patches=options)  # type: ignore[return-value]
