"""SDPA on handles: attention reads the pages in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from .. import ops
from ..runtime import manager
from .handle import HANDLERS, PagedTensor, handles
from .materialize import shown, step_plan

__all__ = ["without_padding"]

aten = torch.ops.aten


@handles(aten._fused_sdp_choice.default)
def fused_sdp_choice(func: Any, query: Tensor, *args: Any, **kwargs: Any) -> int:
    """Keep SDPA whole, so that it arrives as one operator."""
    return int(SDPBackend.FLASH_ATTENTION.value)


@handles(aten.scaled_dot_product_attention.default)
def sdpa(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Query [B, H_q, Q, D] dense, key and value handles of one view: read from the pages; else on dense copies."""
    out = _paged(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if out is not None:
        return out
    attn_mask, is_causal = without_padding(query, key, attn_mask, is_causal)
    return HANDLERS[None](func, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


@handles(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_for_cpu(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """As above, seen below autograd: returns (output, logsumexp), of which inference reads only the first."""
    out = _paged(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if out is not None:
        return out, out.new_empty(0)
    attn_mask, is_causal = without_padding(query, key, attn_mask, is_causal)
    return HANDLERS[None](func, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)


@handles(aten._scaled_dot_product_attention_math.default)
def sdpa_math(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """As above; returns (output, attention weights), of which inference reads only the first."""
    out = _paged(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if out is not None:
        return out, out.new_empty(0)
    attn_mask, is_causal = without_padding(query, key, attn_mask, is_causal)
    return HANDLERS[None](
        func, query, key, value, attn_mask, dropout_p, is_causal, dropout_mask, scale=scale, enable_gqa=enable_gqa
    )


def _paged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor | None:
    """The paged attention, or None if this call is not one."""
    if isinstance(query, PagedTensor) or not isinstance(key, PagedTensor) or not isinstance(value, PagedTensor):
        return None
    view = key._view
    axes = (key._form.axes, value._form.axes)
    if value._view is not view or key._form.steps or value._form.steps or dropout_p or query.dim() != 4:
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
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            causal_offset=0 if is_causal else None,
        )


def without_padding(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, bool]:
    """For attention on dense copies: the mask that hides a ragged key's virtual padding, where no mask decides."""
    if attn_mask is not None or not isinstance(key, PagedTensor) or not key._view.ragged:
        return attn_mask, is_causal
    view = key._view
    spec = view.group.sites[key._form.site]
    pad = torch.tensor(view.pads, device=key.device)
    token = torch.arange(view.length, device=key.device) >= pad[:, None]
    visible = token[:, None, :, None].expand(-1, spec.heads, -1, spec.head_dim)
    visible = shown(visible, key._form)[..., :1, :, :1].transpose(-2, -1)  # B 1 1 S
    if is_causal:
        visible = visible & torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=key.device).tril()
    return torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, float("-inf")), False
