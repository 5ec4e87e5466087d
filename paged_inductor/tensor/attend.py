"""SDPA on handles: attention reads the pages in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from .. import ops
from ..runtime import manager
from .handle import HANDLERS, PagedTensor, handles
from .materialize import step_plan, visible_tokens

__all__ = ["FUSED", "AttentionCall"]

aten = torch.ops.aten

FUSED = [
    getattr(aten, f"_scaled_dot_product_{name}").default
    for name in (
        "attention_math",
        "cudnn_attention",
        "efficient_attention",
        "flash_attention",
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
]
"""What SDPA becomes below autograd; which one depends on the device, dtype and sizes."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of an attention operator, by the names that they have in SDPA."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Self:
        """func: SDPA, or one of `FUSED`, of which most take grouped heads without being told."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args)) | kwargs
        if "attn_bias" in given:
            given["attn_mask"] = given["attn_bias"]
        if "enable_gqa" not in names:
            given["enable_gqa"] = given["query"].shape[-3] != given["key"].shape[-3]
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def without_padding(self) -> Self:
        """For attention on dense copies: the call with a mask that hides a ragged key's virtual padding, where no mask
        decides. The call itself if there is nothing to hide."""
        query, key = self.query, self.key
        if self.attn_mask is not None or not isinstance(key, PagedTensor) or not key._view.ragged:
            return self
        visible = visible_tokens(key)[..., :1, :, :1].transpose(-2, -1)  # B 1 1 S
        if self.is_causal:
            visible = visible & torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=key.device).tril()
        mask = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, float("-inf"))
        return replace(self, attn_mask=mask, is_causal=False)


@handles(aten._fused_sdp_choice.default)
def fused_sdp_choice(func: Any, query: Tensor, *args: Any, **kwargs: Any) -> int:
    """Keep SDPA whole, so that it arrives as one operator."""
    return int(SDPBackend.FLASH_ATTENTION.value)


@handles(aten.scaled_dot_product_attention.default)
def sdpa(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Query [B, H_q, Q, D] dense, key and value handles of one view: read from the pages; else on dense copies."""
    call = AttentionCall.of(func, args, kwargs)
    out = _paged(call)
    return _dense(call.without_padding()) if out is None else out


@handles(*FUSED)
def fused(func: Any, *args: Any, **kwargs: Any) -> Any:
    """As above. All results but the output serve a backward pass, and are empty where there is none."""
    call = AttentionCall.of(func, args, kwargs)
    out = _paged(call)
    if out is None:
        hiding = call.without_padding()
        if hiding is call:
            return HANDLERS[None](func, *args, **kwargs)
        out = _dense(hiding)  # some take no mask
    empty = out.new_empty(0)
    return out, *(empty if "Tensor" in str(result.type) else 0 for result in func._schema.returns[1:])


def _paged(call: AttentionCall) -> Tensor | None:
    """The paged attention, or None if this call is not one."""
    query, key, value, attn_mask = call.query, call.key, call.value, call.attn_mask
    if isinstance(query, PagedTensor) or not isinstance(key, PagedTensor) or not isinstance(value, PagedTensor):
        return None
    view = key._view
    axes = (key._form.axes, value._form.axes)
    if value._view is not view or key._form.steps or value._form.steps or call.dropout_p or query.dim() != 4:
        return None
    if any(axis not in ("BHSD", "BhSD") for axis in axes) or isinstance(attn_mask, PagedTensor):
        return None
    if query.shape[0] != len(view.rows) or query.shape[1] % key.shape[1] or view.length == 0 or view.static:
        return None
    group = view.group
    arenas = group.arenas
    with torch.no_grad(), manager().using(view):
        plan = step_plan(view, decodes=query.shape[2] == 1)
        return ops.attention(
            query,
            arenas[key._form.site],
            arenas[value._form.site],
            plan,
            None if attn_mask is None else ops.plan_mask(attn_mask, plan),
            scale=query.shape[-1] ** -0.5 if call.scale is None else call.scale,
            causal_offset=0 if call.is_causal else None,
        )


def _dense(call: AttentionCall) -> Tensor:
    """SDPA on dense copies."""
    result: Tensor = HANDLERS[None](
        aten.scaled_dot_product_attention.default,
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        call.dropout_p,
        call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )
    return result
