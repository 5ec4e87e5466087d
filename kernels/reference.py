"""Plain-torch twins of the host wrappers: the truth in tests, and the eager implementation on CPU.

Each takes its wrapper's arguments; `compute_dtype` is the dtype of the arithmetic. None loops over tokens;
only the writes read a tensor back to the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks
from .problem import AttentionProblem, attention_problem


def attention(
    q: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_len: int,
    *,
    scale: float,
    causal_offset: int | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    slopes: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    row_start: int | None = None,
    hidden: Tensor | None = None,
    shared_prefix: int = 0,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Twin of `kernels.attention`."""
    problem = attention_problem(
        q,
        k_arena,
        v_arena,
        block_table,
        seq_lens,
        kv_len,
        scale,
        causal_offset,
        window,
        mask,
        softcap,
        sinks,
        chunk,
        slopes,
        k_scales,
        v_scales,
        row_start,
        hidden,
        shared_prefix,
    )
    batch, num_heads, q_len, _ = problem.out_shape
    packed = (batch, problem.num_kv_heads, problem.packed_rows)
    starts = kv_len - seq_lens if row_start is None else torch.full_like(seq_lens, row_start)  # [B]
    tokens = _tokens(starts, kv_len)
    read = tokens if hidden is None else tokens.masked_fill(tokens < hidden[:, None], -1)
    k = _gather(k_arena, block_table, seq_lens, read, k_scales, compute_dtype)  # [B, H_kv, S, D]
    v = _gather(v_arena, block_table, seq_lens, read, v_scales, compute_dtype)  # [B, H_kv, S, Dv]
    rows = q.reshape(*packed, problem.head_dim).to(compute_dtype)  # [B, H_kv, GROUP * Q, D]
    scores = (rows @ k.mT).mul_(scale).view(batch, num_heads, q_len, kv_len)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if slopes is not None:
        positions = torch.arange(q_len, device=q.device)[:, None] + problem.query_offset  # [Q, 1]
        distances = torch.arange(kv_len, device=q.device) - positions  # [Q, S]
        scores += slopes.to(compute_dtype)[:, None, None] * distances
    if problem.mask is not None and problem.has_bias:
        scores += problem.mask
    visible = _visible(problem, tokens, starts)
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(compute_dtype)[:, None, None].expand(batch, num_heads, q_len, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1).nan_to_num_(0.0)  # a query that sees nothing has no finite score
    weights = weights[..., :kv_len]
    return (weights.reshape(*packed, kv_len) @ v).view(problem.out_shape).to(q.dtype)


def cache_write(
    arena: Tensor, new: Tensor, block_table: Tensor, seq_lens: Tensor, *, scales: Tensor | None = None
) -> None:
    """Twin of `kernels.cache_write`."""
    batch, _ = checks.table(block_table, seq_lens, checks.arena("arena", arena))
    checks.write("new", arena, new, batch)
    checks.scales("scales", scales, arena)
    _write(((arena, new, scales),), block_table, seq_lens)


def cache_write_kv(
    k_arena: Tensor,
    v_arena: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Twin of `kernels.cache_write_kv`."""
    batch, _ = checks.table(block_table, seq_lens, checks.arena("k_arena", k_arena))
    checks.arena("v_arena", v_arena)
    checks.pair(k_arena, v_arena)
    checks.write("k_new", k_arena, k_new, batch)
    checks.write("v_new", v_arena, v_new, batch)
    checks.same("token count", "v_new", v_new.shape[2], "k_new", k_new.shape[2])
    checks.scales("k_scales", k_scales, k_arena)
    checks.scales("v_scales", v_scales, v_arena)
    _write(((k_arena, k_new, k_scales), (v_arena, v_new, v_scales)), block_table, seq_lens)


def copy_blocks(arenas: Tensor | Sequence[Tensor], src_ids: Tensor, dst_ids: Tensor) -> None:
    """Twin of `kernels.copy_blocks`."""
    for arena in checks.copy(arenas, src_ids, dst_ids):
        arena[dst_ids.long()] = arena[src_ids.long()]


def gather(
    arena: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_len: int,
    *,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Twin of `kernels.gather`; its arithmetic is float32, as the kernel's."""
    _, width = checks.table(block_table, seq_lens, checks.arena("arena", arena))
    checks.context_length(kv_len, width, arena.shape[2], least=0)
    checks.scales("scales", scales, arena)
    dtype = checks.gathered("dtype", dtype, arena)
    tokens = _tokens(kv_len - seq_lens, kv_len)
    return _gather(arena, block_table, seq_lens, tokens, scales, torch.float32 if scales is not None else dtype).to(
        dtype
    )


def quantize(new: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values of `dtype` [..., D] and their float32 scales [...], one for each vector of `new` [..., D]."""
    top = checks.QUANTIZED_MAX[dtype]
    values = new.float()
    scales = values.abs().amax(-1).clamp_min(checks.LEAST_AMAX) / top
    scaled = values * (1.0 / scales)[..., None]
    if dtype == torch.int8:
        scaled = (scaled + 0.5).floor()
    return scaled.clamp(-top, top).to(dtype), scales


def _tokens(starts: Tensor, kv_len: int) -> Tensor:
    """Row position of each logical key [B, S]; `starts` [B] are the keys of the rows' first tokens."""
    return torch.arange(kv_len, device=starts.device) - starts[:, None]


def _gather(
    arena: Tensor, block_table: Tensor, seq_lens: Tensor, tokens: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dense [B, H_kv, S, D] of the row positions `tokens` [B, S], zeros where a row has no token."""
    block_size = arena.shape[2]
    absent = (tokens < 0) | (tokens >= seq_lens[:, None])
    tokens = tokens.masked_fill(absent, 0)
    block_ids = block_table.gather(1, tokens // block_size).long()  # [B, S]
    dense = arena.transpose(1, 2)[block_ids, tokens % block_size].to(dtype)  # [B, S, H_kv, D]
    if scales is not None:
        dense = dense * scales.transpose(1, 2)[block_ids, tokens % block_size].to(dtype)[..., None]
    return dense.masked_fill_(absent[..., None, None], 0.0).transpose(1, 2).contiguous()


def _write(triples: tuple[tuple[Tensor, Tensor, Tensor | None], ...], block_table: Tensor, seq_lens: Tensor) -> None:
    arena, new, _ = triples[0]
    num_new, block_size = new.shape[2], arena.shape[2]
    if num_new == 0:
        return
    tokens = seq_lens[:, None].long() - num_new + torch.arange(num_new, device=arena.device)  # [B, n]
    written = tokens >= 0
    columns = (tokens // block_size).clamp(0, block_table.shape[1] - 1)
    block_ids = block_table.gather(1, columns).long()
    written &= block_ids != 0
    batch_ids, source_ids = written.nonzero(as_tuple=True)
    block_ids, slots = block_ids[written], tokens[written] % block_size
    for arena, new, scales in triples:
        values = new.transpose(1, 2)[batch_ids, source_ids]  # [writes, H_kv, D]
        if scales is not None:
            values, scales.transpose(1, 2)[block_ids, slots] = quantize(values, arena.dtype)
        arena.transpose(1, 2)[block_ids, slots] = values


def _visible(problem: AttentionProblem, tokens: Tensor, starts: Tensor) -> Tensor | None:
    """Which keys each query sees, broadcastable to [B, H_q, Q, S]; None where all do."""
    device = problem.q.device
    keys = torch.arange(problem.kv_len, device=device)  # [S]
    seq_lens = problem.seq_lens[:, None]
    conditions = []
    if problem.mask is None:
        conditions.append(((tokens >= 0) & (tokens < seq_lens))[:, None, None, :])
    elif not problem.has_bias:
        conditions.append(problem.mask)
    if problem.hidden is not None:
        first = problem.hidden[:, None]  # [B, 1]
        conditions.append(((tokens >= first) | (first == 0))[:, None, None, :])
    last_keys = torch.arange(problem.q_len, device=device)[:, None] + problem.query_offset  # [Q, 1]
    if problem.causal_offset is not None:
        conditions.append(keys <= last_keys)
    if problem.window is not None:
        conditions.append(keys > last_keys - problem.window)
    if problem.chunk is not None:
        own = last_keys[None] - starts[:, None, None]  # [B, Q, 1]
        first = own.clamp_min(0) // problem.chunk * problem.chunk
        conditions.append((tokens[:, None, :] >= first)[:, None])
    visible = None
    for condition in conditions:
        visible = condition if visible is None else visible & condition
    return visible
