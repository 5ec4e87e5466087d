"""Hooks of a model's parts: compiled code calls those that it was captured with, and Dynamo does not look again."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module
from torch.utils.hooks import RemovableHandle

__all__ = ["Hooks"]

Found = list[tuple[nn.Module, list[Any]]]
"""Modules, and (key, hook) of each of their hooks."""


class Hooks:
    """The forward hooks of the parts of a model, and those of all modules, but not of the model itself: those run
    outside of its forward. Not noticed are parts that are put in with hooks, until one is registered anywhere."""

    def __init__(self, model: nn.Module) -> None:
        self._module = model
        self._known: tuple[int, Found] = (-1, [])  # how many had been registered in the process when these were found

    def now(self) -> Found:
        """Those that are there. A model that had none is looked through only if a hook was registered anywhere since.
        Thread-safe: whoever knows of a change never gets older ones again."""
        registered = RemovableHandle.next_id
        before = self._known
        if registered == before[0] and not before[1]:
            return before[1]
        found = [
            (part, hooks)
            for path, part in self._module.named_modules()
            if path and (part._forward_pre_hooks or part._forward_hooks) and (hooks := _hooks(part))
        ]
        everywhere = [*module._global_forward_pre_hooks.items(), *module._global_forward_hooks.items()]
        found += [(self._module, everywhere)] if everywhere else []
        self._known = registered, found
        return found


def _hooks(part: nn.Module) -> list[Any]:
    """The hooks of a module, but for those by which transformers collects outputs: it leaves them there for good, and
    asks for outputs by arguments."""
    return [
        item
        for item in (*part._forward_pre_hooks.items(), *part._forward_hooks.items())
        if getattr(item[1], "__module__", "") != "transformers.utils.output_capturing"
    ]
