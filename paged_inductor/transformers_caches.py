"""Caches of transformers' kind whose layers grow by concatenation, or are buffers: empty ones, and handles in their
layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .runtime import Lent, View
from .tensor import PagedTensor
from .tensor.handle import Form, plain

__all__ = ["NEUTRAL", "WITH_TOKENS", "EmptyCache", "Layers", "kept_tokens", "layers_of", "logits_only", "returned"]

WITH_TOKENS = ("input_ids", "position_ids", "cache_position")
"""Arguments of a model, of which each token of the prompt has its own part."""
NEUTRAL = {"use_cache", "return_dict", "logits_to_keep", "attention_mask", *WITH_TOKENS}
"""Arguments that do not change what a model computes of the other tokens."""


class LayerForm(NamedTuple):
    """The number of a layer's group, the forms of its keys and values, and how many of the last tokens it keeps (None:
    all)."""

    group: int
    keys: Form
    values: Form
    kept: int | None


Layers = Sequence[LayerForm]


class EmptyCache:
    """A cache object that holds nothing yet. buffer: how many positions it has, if it is static; else None."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._layers = [(layer, dict(vars(layer))) for layer in value.layers]
        self.buffer: int | None = next((layer.max_cache_len for layer in value.layers if _is_buffer(layer)), None)

    @classmethod
    def of(cls, value: Any) -> EmptyCache | None:
        """A cache of transformers whose layers all grow by concatenation, or are buffers of one length, and are empty;
        None of anything else."""
        layers = getattr(value, "layers", None)
        if not isinstance(layers, list) or getattr(value, "offloading", False):
            return None
        if not layers:  # it makes them when they are first used
            kind = getattr(value, "layer_class_to_replicate", None)
            return cls(value) if getattr(kind, "__name__", "") == "DynamicLayer" else None
        alike = all(map(_grows, layers)) or all(
            _is_buffer(layer) and layer.max_cache_len == layers[0].max_cache_len for layer in layers
        )
        return cls(value) if alike and not any(layer.is_initialized for layer in layers) else None

    @classmethod
    def like(cls, value: Any) -> EmptyCache:
        """An empty cache of the kind of `value`, for which `layers_of` is not None."""
        empty = copy.copy(value)
        empty.layers = [
            type(layer)(layer.sliding_window) if _slides(layer) else type(layer)() for layer in value.layers
        ]
        return cls(empty)

    def another(self) -> EmptyCache:
        """One more of this kind."""
        return self.like(self.value)

    def fits(self, layers: Layers) -> bool:
        """Whether it has layers that keep as much as these, or none yet."""
        return not self._layers or [_kept(layer) for layer, _ in self._layers] == [layer.kept for layer in layers]

    def fill(self, layers: Layers, lent: Lent) -> None:
        """Let it hold handles of what is lent."""
        if not self._layers:
            self.value.layers.extend(self.value.layer_class_to_replicate() for _ in layers)
        for layer, (group, keys, values, kept) in zip(self.value.layers, layers):
            view = lent.views[group]
            handles = PagedTensor(view, keys), PagedTensor(view, values)
            if self.buffer is not None:
                _fill_buffer(layer, *handles, lent.length)
                continue
            layer.lazy_initialization(*handles)  # it would make tensors of no tokens
            layer.keys, layer.values = handles
            if kept is not None:
                layer.cumulative_length = lent.length

    def restore(self) -> None:
        """Empty it again."""
        self.value.layers[:] = [layer for layer, _ in self._layers]
        for layer, state in self._layers:
            vars(layer).clear()
            vars(layer).update(state)
            if self.buffer is not None:
                layer.cumulative_length.zero_()


def kept_tokens(layers: Layers, num_groups: int) -> list[int | None]:
    """How many of the last tokens the layers of each group keep; None for all."""
    kept: dict[int, int | None] = {layer.group: layer.kept for layer in layers}
    return [kept[group] for group in range(num_groups)]


def layers_of(value: Any, views: Sequence[View]) -> Layers | None:
    """Which of `views` each layer of a cache shows, and how; None if one shows anything else."""
    layers = [_layer(layer, views) for layer in getattr(value, "layers", ())]
    if None in layers or {layer.group for layer in layers if layer} != set(range(len(views))):
        return None
    kept = {(layer.group, layer.kept) for layer in layers if layer}
    return layers if len(kept) == len(views) else None  # type: ignore[return-value]


def returned(result: Any) -> Any:
    """The one cache in a model's output; None if there is not exactly one."""
    values = list(result.values()) if isinstance(result, Mapping) else result
    caches = [each for each in values if hasattr(each, "layers")] if isinstance(values, list | tuple) else []
    return caches[0] if len(caches) == 1 else None


def logits_only(result: Any) -> bool:
    """Whether a model's output has nothing but logits and a cache."""
    if isinstance(result, Mapping):
        given = {name for name, value in result.items() if value is not None and not hasattr(value, "layers")}
        return given == {"logits"}
    rest = [each for each in result if not hasattr(each, "layers")] if isinstance(result, tuple) else [result]
    return len(rest) == 1 and isinstance(rest[0], Tensor)


def _grows(layer: Any) -> bool:
    return type(layer).__name__ == "DynamicLayer" or (_slides(layer) and not getattr(layer, "record_past", False))


def _is_buffer(layer: Any) -> bool:
    return type(layer).__name__ == "StaticLayer"


def _fill_buffer(layer: Any, keys: PagedTensor, values: PagedTensor, length: int) -> None:
    """Initialise a static layer as it does it itself, but for buffers of zeros."""
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.batch_size, layer.num_heads = keys.shape[:2]
    layer.k_head_dim, layer.v_head_dim = keys.shape[-1], values.shape[-1]
    layer.keys, layer.values = keys, values
    layer.cumulative_length = layer.cumulative_length.to(keys.device).fill_(length)
    layer.is_initialized = True


def _slides(layer: Any) -> bool:
    return type(layer).__name__ == "DynamicSlidingWindowLayer"


def _kept(layer: Any) -> int | None:
    """How many of the last tokens a layer keeps; None for all."""
    return layer.sliding_window - 1 if _slides(layer) else None


def _layer(layer: Any, views: Sequence[View]) -> LayerForm | None:
    """The group of a layer's handles, and their forms; None if they show anything but one of `views`."""
    if not (_grows(layer) or _is_buffer(layer)) or not layer.is_initialized:
        return None
    pair = layer.keys, layer.values
    if not all(isinstance(handle, PagedTensor) and handle._form is plain(*handle._form[:2]) for handle in pair):
        return None
    kept = _kept(layer)
    for i, view in enumerate(views):
        shown = view.length if kept is None else min(kept, view.length)
        if all(handle._view.rows == view.rows and handle._view.length == shown for handle in pair):
            return LayerForm(i, pair[0]._form, pair[1]._form, kept)
    return None
