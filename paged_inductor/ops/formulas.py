"""The operations as plain torch formulas, for the CPU: Inductor fuses each into loops over pages.

Arenas are graph inputs that are written with `index_put_` directly (not through a view): Inductor then writes in
place. Through a view, functionalisation would copy the whole arena each step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor

from .._layout import is_packed
from .plan import StepPlan

__all__ = ["cache_write", "gather", "gathered_attention", "static_attention", "visibility"]


def cache_write(arena: Tensor, new: Tensor, plan: StepPlan) -> None:
    """Write new [B, H, n, D] to the last n positions of every row of arena [num_blocks, H, block_size, D]."""
    count = new.shape[2]
    device = arena.device
    position = (plan.seq_lens.to(torch.int64) - count)[:, None] + torch.arange(count, device=device)
    block = plan.block_table.gather(1, position // plan.block_size).to(torch.int64)  # [B, n]
    offset = position % plan.block_size
    head = torch.arange(arena.shape[1], device=device)
    arena.index_put_((block[:, None, :], head[None, :, None], offset[:, None, :]), new.to(arena.dtype))


def gather(arena: Tensor, plan: StepPlan, dtype: torch.dtype | None = None) -> Tensor:
    """Dense [B, H, kv_len, D] copy of the rows' pages; virtual padding reads as zeros. dtype: of the copy of packed
    arenas."""
    if is_packed(arena):
        return torch.ops.paged_inductor.gather(arena, plan.block_table, plan.seq_lens, plan.kv_len, dtype)
    token = _row_tokens(plan)  # [B, S]
    inside = token.clamp(min=0)
    block = plan.block_table.gather(1, inside // plan.block_size).to(torch.int64)  # [B, S]
    dense = arena[block, :, inside % plan.block_size]  # [B, S, H, D]
    dense = torch.where((token >= 0)[:, :, None, None], dense, torch.zeros((), dtype=arena.dtype, device=arena.device))
    return dense.transpose(1, 2)


def _row_tokens(plan: StepPlan) -> Tensor:
    """Int64 [B, S]: which token of its row each logical key position is; negative in virtual padding."""
    position = torch.arange(plan.kv_len, device=plan.seq_lens.device)
    return position[None, :] - (plan.kv_len - plan.seq_lens.to(torch.int64))[:, None]


def visibility(
    plan: StepPlan,
    num_queries: int | SymInt,
    causal_offset: int | SymInt | None,
    window: int | None,
    mask: Tensor | None,
) -> Tensor:
    """Which keys each query sees, broadcastable to [B, H_q, Q, S]: bool, or an additive float if `mask` is one."""
    device = plan.seq_lens.device
    visible = (_row_tokens(plan) >= 0)[:, None, None, :]  # [B, 1, 1, S]
    if causal_offset is not None:
        key = torch.arange(plan.kv_len, device=device)
        last = torch.arange(num_queries, device=device)[:, None] + causal_offset  # [Q, 1]
        causal = key <= last
        if window is not None:
            causal = causal & (key > last - window)
        visible = causal if mask is not None else visible & causal  # type: ignore[assignment]
    elif mask is not None:
        return mask
    if mask is None:
        return visible
    if mask.dtype == torch.bool:
        return visible & mask
    return torch.where(visible, mask, float("-inf"))


def gathered_attention(
    q: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    plan: StepPlan,
    mask: Tensor | None,
    *,
    scale: float,
    causal_offset: int | SymInt | None,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention for several queries: pages are gathered once and read by all of them.

    q [B, H_q, Q, D] -> [B, H_q, Q, Dv]. The GQA group is packed into the query length: on the CPU, SDPA's own
    `enable_gqa` runs several times slower in bfloat16.
    """
    visible = visibility(plan, q.shape[2], causal_offset, window, mask)
    key, value = (gather(arena, plan, q.dtype) for arena in (k_arena, v_arena))
    return _dense_attention(q, key, value, visible, scale, softcap, sinks)


def static_attention(
    q: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    plan: StepPlan,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention for several queries over static buffers (`plan_static`), whose unwritten positions are zeros. With a
    bool mask, one more key stands for them, with the logarithm of their number as its bias. With a float mask, they go
    into the softmax's sum: that logarithm would vanish beside the least number."""
    written = plan._replace(kv_len=plan.extent, static=False)
    read = torch.sym_min(plan.extent, plan.kv_len)
    key, value = (gather(arena, written, q.dtype)[:, :, :read] for arena in (k_arena, v_arena))
    bias = torch.where(mask, 0.0, float("-inf")) if mask.dtype == torch.bool else mask.float()
    bias = bias.expand(*bias.shape[:-1], plan.kv_len)
    if mask.dtype != torch.bool:
        unwritten = F.pad(bias[..., read:], (0, 1), value=float("-inf"))
        top = unwritten.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        zeros = (top, (unwritten - top).exp().sum(-1, keepdim=True))
        return _explicit_attention(q, key, value, bias[..., :read], scale, softcap, sinks, zeros)
    visible = torch.cat([bias[..., :read], bias[..., read:].logsumexp(-1, keepdim=True)], -1)
    key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    return _dense_attention(q, key, value, visible, scale, softcap, sinks)


def _dense_attention(
    q: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [B, H_q, Q, D], key and value [B, H, S, D or Dv], visible broadcastable to [B, H_q, Q, S]."""
    batch, heads_q, num_queries, _ = q.shape
    heads_kv, kv_len = key.shape[1:3]
    group = heads_q // heads_kv
    if softcap is not None or sinks is not None:
        return _explicit_attention(q, key, value, visible, scale, softcap, sinks)
    if visible.dtype != torch.bool:
        visible = visible.to(q.dtype)
    if group == 1:
        return F.scaled_dot_product_attention(q, key.to(q.dtype), value.to(q.dtype), visible, scale=scale)
    if visible.shape[-3] == 1:
        visible = visible.expand(*visible.shape[:-3], group, num_queries, kv_len).flatten(-3, -2).unsqueeze(-3)
    else:
        visible = visible.expand(*visible.shape[:-2], num_queries, kv_len)
        visible = visible.unflatten(-3, (heads_kv, group)).flatten(-3, -2)
    packed = q.reshape(batch, heads_kv, group * num_queries, q.shape[3])
    out = F.scaled_dot_product_attention(packed, key.to(q.dtype), value.to(q.dtype), visible, scale=scale)
    return out.reshape(batch, heads_q, num_queries, value.shape[3])


def _explicit_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    zeros: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """What SDPA has no words for: scores that are capped, sinks that share the softmax. Float32 arithmetic.

    zeros: maximum and sum of exponentials, [1 or B, 1 or H_q, 1 or Q, 1], of the biases of keys and values of zeros.
    """
    batch, heads_q, num_queries, _ = q.shape
    packed = (batch, key.shape[1], heads_q // key.shape[1] * num_queries)
    scores = q.reshape(*packed, q.shape[3]).float() @ key.float().mT * scale
    scores = scores.view(batch, heads_q, num_queries, key.shape[2])
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible, float("-inf")) if visible.dtype == torch.bool else scores + visible
    top = scores.amax(-1, keepdim=True)
    logits = None if sinks is None else sinks.float()[:, None, None]  # [H_q, 1, 1]
    if logits is not None:
        top = torch.maximum(top, logits)
    if zeros is not None:
        top = torch.maximum(top, zeros[0])
    top = top.clamp_min(torch.finfo(torch.float32).min)  # a query that sees nothing: exp(-inf - top) is 0
    weights = (scores - top).exp()
    norm = weights.sum(-1, keepdim=True)
    if logits is not None:
        norm = norm + (logits - top).exp()
    if zeros is not None:
        norm = norm + (zeros[0] - top).exp() * zeros[1]
    out = weights.view(*packed, key.shape[2]) @ value.float()
    out = out.view(batch, heads_q, num_queries, value.shape[3]) / torch.where(norm > 0, norm, 1.0)
    return out.to(q.dtype)
