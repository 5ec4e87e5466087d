"""Host wrapper of paged attention: checks, the output, the kernel that fits the number of queries."""

import torch
from torch import Tensor

from . import autotune, checks, decode, prefill, shared
from .launch import INTERPRETED, Allocator
from .problem import attention_problem


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
    deterministic: bool = False,
    allocate: Allocator = torch.empty,
) -> Tensor:
    """Attention of q [B, H_q, Q, D] over the paged keys of each row; returns [B, H_q, Q, Dv] in q's dtype.

    Row b holds `seq_lens[b]` tokens and is virtually left padded to `kv_len`: its token t is logical key
    t + kv_len - seq_lens[b]. Key k is visible to query i (0..Q-1) if it is a token of the row, and
    k <= i + causal_offset, and k > i + causal_offset - window. With `mask`, broadcastable to
    [B, H_q, Q, kv_len] (bool: True is visible; float: added to the scaled score), virtual padding takes part
    as zero keys and values where the mask admits it. A query that sees nothing gives zeros. Of a row with more
    tokens than kv_len, the first are hidden: only logical keys from 0 on are seen.

    `softcap` bounds the scaled scores, before any mask: softcap * tanh(score / softcap). `sinks` [H_q] are logits that
    join each head's softmax as one more key with no value: they only add exp(sink) to its denominator. `slopes` [H_q]
    add slope * (k - i - causal_offset) to the capped scores (ALiBi). `chunk` lets a query see only its own chunk of
    the row: tokens t with t // chunk == s // chunk, where s is its own (i + causal_offset, counted from the key of the
    row's first token).

    Arenas of float8_e4m3fn or int8 are scaled per token and head: the keys that count are k_arena * k_scales, with
    `k_scales` and `v_scales` float32 [num_blocks, H_kv, block_size]; q may then have any float dtype.

    `row_start`: the logical key of every row's first token, where rows begin together, as in a static buffer: token t
    is logical key t + row_start (below 0: tokens that the buffer does not show any more). The keys behind a row's last
    token are unwritten positions: like virtual padding, zeros that a mask may admit.

    `hidden`, int32 [B]: so many of each row's first tokens are not seen, nor is what stands before them, if there are
    any. kv_len says as much where it is the number of keys that rows show; with `hidden` it may be any larger number.

    `shared_prefix`: that many first tokens, whole blocks, are the same in all rows (their block table's first columns
    are equal, and none has fewer tokens). It changes no result: decode then reads these blocks once for all rows.

    `deterministic`: a row's result depends on its own tokens, queries and length only, to the bit: not on the other
    rows of the batch, nor on how many splits the launch has. (With a mask, on kv_len too.) Slower where rows are few.

    The caller keeps the block table within the arenas. `allocate(shape,
    dtype=, device=)` provides the output and the scratch. Raises KernelInputError or KernelTypeError.
    """
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
        0 if deterministic else shared_prefix,  # sharing merges other splits than a row alone has
    )
    checks.launchable(q, INTERPRETED, k_arena)
    out = allocate(problem.out_shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    choose = autotune.static if deterministic else autotune.choose
    if problem.q_len <= decode.MAX_QUERIES and problem.shared_prefix:
        shared.decode_shared(problem, out, allocate)
    elif problem.q_len <= decode.MAX_QUERIES:
        decode.decode(problem, out, allocate, choose, in_order=deterministic)
    else:
        prefill.prefill(problem, out, choose)
    return out
