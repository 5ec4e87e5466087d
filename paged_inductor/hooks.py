"""Hooks of a model's parts: compiled code calls those that it was captured with, and Dynamo does not look again."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Hooks"]


class Hooks:
    """The forward hooks of the parts of a model, but not of the model itself: those run outside of its forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._registered = -1  # how many hooks there were in the process when these were looked at
        self._found: list[tuple[nn.Module, list[Any]]] = []

    @property
    def present(self) -> bool:
        """Whether there were some when `changed` was asked."""
        return bool(self._found)

    def changed(self) -> bool:
        """Whether they are others than the last time. A model that has none is looked through only if a hook was
        registered anywhere since."""
        registered = RemovableHandle.next_id
        if registered == self._registered and not self._found:
            return False
        self._registered = registered
        before, self._found = self._found, self._all()
        return self._found != before

    def _all(self) -> list[tuple[nn.Module, list[Any]]]:
        return [
            (part, [*part._forward_pre_hooks.items(), *part._forward_hooks.items()])
            for path, part in self._module.named_modules()
            if path and (part._forward_pre_hooks or part._forward_hooks)
        ]
