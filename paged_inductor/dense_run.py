"""A captured graph run node by node on dense tensors, beside its paged form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from .tensor.materialize import visible_tokens
from .tensor.verified import VerifiedTensor

__all__ = ["DenseRun"]


class DenseRun(Interpreter):
    """Runs a captured graph; `computed(name, value)` sees every node's value, and says what to go on with.

    padded: by name of an attention, a key handle whose shorter rows are virtually left padded: hidden from it, as the
    paged attention does where the mask was proven.
    """

    def __init__(self, gm: GraphModule, computed: Callable[[str, Any], Any], padded: dict[str, VerifiedTensor]) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self._computed = computed
        self._padded = padded

    def run_node(self, n: Node) -> Any:
        handle = self._padded.get(n.name)
        return self._computed(n.name, super().run_node(n) if handle is None else self._hidden(n, handle))

    def _hidden(self, n: Node, handle: VerifiedTensor) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        values = dict(zip(names, args)) | kwargs
        query, key = values["query"], values["key"]
        axes = handle._form.axes
        seen = visible_tokens(handle).permute([axes.index(axis) for axis in "BHSD"])
        seen = seen[:, :1, :, :1].transpose(-2, -1)  # B 1 1 S
        new = key.shape[2] - seen.shape[3]
        visible = torch.cat([seen, seen.new_ones(seen.shape[0], 1, 1, new)], -1)
        if values.get("is_causal"):
            visible = visible & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
        mask = values.get("attn_mask")
        if mask is None:
            mask = torch.zeros((), dtype=query.dtype, device=query.device)
        if mask.dtype == torch.bool:
            mask = torch.zeros((), dtype=query.dtype, device=query.device).where(mask, float("-inf"))
        values |= {"attn_mask": mask.where(visible, float("-inf")).to(query.dtype), "is_causal": False}
        return n.target(**values)  # type: ignore[operator]
