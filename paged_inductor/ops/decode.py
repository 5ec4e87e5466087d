"""Decode attention (one query per row) over pages, as torch formulas for Inductor's CPU backend.

Every line is an ordinary torch operation; Inductor turns them into a handful of vectorised loops that read pages in
place through the chunks' tables. The shapes of the formulas decide what those loops look like, so comments say why
each was chosen.

Names in shapes: NC chunks, C blocks a chunk, U blocks read side by side, I = C // U, H KV heads, G query heads per KV
head, D and Dv head dims, bs block size, B rows, MC chunks of the longest row. NC, B, MC and num_blocks may be dynamic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._layout import head_dim, is_packed, unpack
from .compiled import CompiledFormula
from .operator import operator
from .plan import MaskPlan, StepPlan

__all__ = ["INDUCTOR_OPTIONS", "decode_attention", "decode_formula", "stored"]

INDUCTOR_OPTIONS: dict[str, object] = {
    # Tables come from the block manager, whose integrity check proves them: no bounds test per load.
    "assert_indirect_indexing": False,
    # One fused multiply-add instead of a multiply and an add: gcc's own default, which Inductor turns off.
    "cpp.enable_floating_point_contract_flag": "fast",
}

_MAX_ACCUMULATORS = 16  # of 32 vector registers; the rest hold loads. Also Inductor's limit of horizontal fusion.
# A finite stand-in for the maximum of nothing, so that exp(-inf - max) is 0 and not NaN; and no higher than what models
# add to mask: where everything is masked by it, attention is uniform over all keys, as in a dense softmax.
_FLOOR = torch.finfo(torch.float32).min


def _side_by_side(group: int, blocks: int) -> int:
    """U: as many blocks at once as accumulators allow.

    Random pages defeat the hardware prefetcher at every page start; U independent streams keep U times the lines in
    flight, and each broadcast of a q element serves U blocks.
    """
    side = 4
    while side > 1 and (side * group > _MAX_ACCUMULATORS or blocks % side):
        side //= 2
    return side


def _value_slice(head_dim: int, group: int, dtype: torch.dtype) -> int:
    """Width of the slices that V's rows are cut in: the whole row if the accumulators fit, else the widest that does.

    A slice is one accumulator per query head; 16-bit rows use 32 lanes (a cache line a load), which fill two registers.
    """
    lanes = 16 if dtype == torch.float32 or head_dim % 32 else 32
    registers = group * (lanes // 16)
    for width in range(lanes, head_dim, lanes):
        if head_dim % width == 0 and registers * (head_dim // width) <= _MAX_ACCUMULATORS:
            return width
    return head_dim


def stored(x: Tensor) -> Tensor:
    """Make Inductor store `x` instead of recomputing it in every loop that reads it: as_strided needs a buffer."""
    return x.as_strided(x.shape, x.stride())


def decode_formula(
    q: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    table: Tensor,
    row: Tensor,
    slot_bias: Tensor,
    of_row: Tensor,
    count: Tensor,
    mask_bias: Tensor | None,
    mask_padding: Tensor | None,
    sinks: Tensor | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """q [B, H, G, D], arenas [num_blocks, H, bs, D or Dv], the fields of `Chunks` and `MaskPlan` -> [B, H, G, Dv].

    sinks: float [H * G], logits that only add to the softmax's denominator. k_scales, v_scales: float32 [num_blocks, H,
    bs], of quantised pages. softcap: bounds scaled scores by a tanh.

    Float32 arithmetic, result in q's dtype. Fastest with K's blocks stored transposed (stride 1 along bs). A row that
    sees no key gives zeros. Slots that hold no visible token contribute nothing, whatever they contain.
    """
    _, heads, block_size, _ = k_arena.shape
    dim_v, group = v_arena.shape[3], q.shape[2]
    num_chunks, blocks = table.shape
    side = _side_by_side(group, blocks)
    steps = blocks // side
    width = _value_slice(dim_v, group, v_arena.dtype)

    # The scale, the conversion to float32 and the row lookup leave the inner loop.
    factor = scale if softcap is None else scale / softcap
    query = stored((q.float() * factor)[row])  # [NC, H, G, D]

    # Scores. Lanes run over a block's tokens (no horizontal sums); the reduction runs over D. One `sum` per (query
    # head, side-by-side block), all over the same ranges: Inductor fuses them into one loop that loads K once.
    columns = k_arena.transpose(2, 3)  # [num_blocks, H, D, bs]
    k_side = [columns[table[:, u::side]].float() for u in range(side)]  # never stored: [NC, I, H, D, bs]
    parts = [(k_side[u] * query[:, None, :, g, :, None]).sum(-2) for g in range(group) for u in range(side)]
    scores = torch.stack(parts, 3).view(num_chunks, steps, heads, group, side, block_size)
    if k_scales is not None:
        scores = scores * _slots(k_scales, table, side)
    if softcap is not None:
        scores = softcap * scores.tanh()

    # Softmax numerators relative to the chunk's own maximum.
    bias = slot_bias.view(num_chunks, steps, 1, 1, side, block_size)
    visible = bias == 0
    if mask_bias is not None:
        given = mask_bias.view(num_chunks, -1, steps, side, block_size)  # [NC, 1|Hq, I, U, bs]
        given = given.unflatten(1, (heads, group)) if given.shape[1] != 1 else given[:, :, None]
        scores = scores + given.permute(0, 3, 1, 2, 4, 5)
    scores = torch.where(visible, scores, float("-inf"))  # not a sum: a hidden slot may hold NaN
    top = scores.amax((1, 4, 5)).clamp_min(_FLOOR)  # [NC, H, G]
    weights = stored((scores - top[:, None, :, :, None, None]).exp())
    total = weights.sum((1, 4, 5))  # [NC, H, G]
    if v_scales is not None:
        weights = stored(weights * torch.where(visible, _slots(v_scales, table, side), 0.0))

    # Values. Lanes run over Dv; the reduction runs over the chunk's tokens, U blocks in one body. One `sum` per (query
    # head, slice of the row): whole rows of V pass through registers once.
    v_side = [v_arena[table[:, u::side]] for u in range(side)]  # never stored: [NC, I, H, bs, Dv]
    shown = [visible[:, :, 0, :, u, :, None] for u in range(side)]  # [NC, I, 1, bs, 1]
    parts = []
    for g in range(group):
        for j in range(0, dim_v, width):
            terms = [
                weights[:, :, :, g, u, :, None] * torch.where(shown[u], v_side[u][..., j : j + width].float(), 0.0)
                for u in range(side)
            ]
            parts.append(sum(terms[1:], terms[0]).sum((1, 3)))  # [NC, H, width]
    partial = torch.stack(parts, 2).view(num_chunks, heads, group, dim_v)
    sink = None if sinks is None else sinks.float().view(heads, group)
    return _combine(top, total, partial, of_row, count, mask_padding, sink).to(q.dtype)


def _slots(scales: Tensor, table: Tensor, side: int) -> Tensor:
    """The scales of a chunk's slots, laid out as scores are: [NC, I, H, 1, U, bs]."""
    found = scales[table].unflatten(1, (-1, side))  # [NC, I, U, H, bs]
    return found.transpose(2, 3)[:, :, :, None]


def _combine(
    top: Tensor,
    total: Tensor,
    partial: Tensor,
    of_row: Tensor,
    count: Tensor,
    padding: Tensor | None,
    sink: Tensor | None,
) -> Tensor:
    """Log-sum-exp combination of each row's chunks: [NC, H, G], [NC, H, G], [NC, H, G, Dv] -> [B, H, G, Dv]."""
    real = (torch.arange(of_row.shape[1]) < count[:, None])[:, :, None, None]  # [B, MC, 1, 1]
    tops = torch.where(real, top[of_row], _FLOOR)  # [B, MC, H, G]
    best = tops.amax(1, keepdim=True)  # [B, 1, H, G]
    if padding is not None:  # [1|B, 1|Hq, 2]
        padding = padding.unflatten(1, (-1, top.shape[2])) if padding.shape[1] != 1 else padding[:, :, None]
        best = torch.maximum(best, padding[:, None, ..., 0])
    if sink is not None:  # [H, G]
        best = torch.maximum(best, sink)
    factor = stored(torch.where(real, (tops - best).exp(), 0.0))
    norm = (factor * total[of_row]).sum(1)  # [B, H, G]
    if padding is not None:
        norm = norm + (padding[..., 0] - best[:, 0]).exp() * padding[..., 1]
    if sink is not None:
        norm = norm + (sink - best[:, 0]).exp()
    out = (factor[..., None] * partial[of_row]).sum(1)
    return out / torch.where(norm > 0, norm, 1.0)[..., None]


_DYNAMIC: tuple[tuple[str | None, ...], ...] = (
    ("B", None, None, None),
    ("blocks", None, None, None),
    ("blocks", None, None, None),
    ("NC", None),
    ("NC",),
    ("NC", None),
    ("B", "MC"),
    ("B",),
    ("NC", None, None),
    ("B", None, None),
    (None,),
    ("blocks", None, None),
    ("blocks", None, None),
)
_OPTIONS: dict[str, object] = {
    **INDUCTOR_OPTIONS,
    "size_asserts": False,
    # Reductions must swallow what they sum, however long it is: stored, the products with V would be larger than V.
    "realize_opcount_threshold": 10_000,
    "realize_reads_threshold": 10_000,
    "realize_acc_reads_threshold": 10_000,
}
_formula = CompiledFormula(decode_formula, _DYNAMIC, _OPTIONS)


def _decoded(q: Tensor, k_arena: Tensor, v_arena: Tensor, *rest: object) -> Tensor:
    return q.new_empty((*q.shape[:3], head_dim(v_arena)))


@operator(_decoded)
def _decode(
    q: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    table: Tensor,
    row: Tensor,
    slot_bias: Tensor,
    of_row: Tensor,
    count: Tensor,
    mask_bias: Tensor | None,
    mask_padding: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`decode_formula`, compiled. Packed arenas have scales of their own."""
    k_scales = v_scales = None
    if is_packed(k_arena):
        (k_arena, k_scales), (v_arena, v_scales) = unpack(k_arena), unpack(v_arena)
    # The code was compiled for contiguous operands (and for arenas in the order that `kind` names) and checks nothing.
    chunks = (table, row, slot_bias, of_row, count)
    others = (None if t is None else t.contiguous() for t in (*chunks, mask_bias, mask_padding, sinks))
    tensors = [q.contiguous(), k_arena, v_arena, *others, k_scales, v_scales]
    heads = None if mask_bias is None or mask_padding is None else (mask_bias.shape[1], mask_padding.shape[1])
    shapes = (q.shape[1:], k_arena.shape[1:], v_arena.shape[3], table.shape[1], heads)
    extras = (softcap, None if sinks is None else sinks.dtype)
    kind = (scale, q.dtype, k_arena.dtype, v_arena.dtype, k_arena.stride(), v_arena.stride(), shapes, extras)
    return _formula(kind, tensors, (scale, softcap))


def decode_attention(
    q: Tensor,
    k_arena: Tensor,
    v_arena: Tensor,
    plan: StepPlan,
    mask: MaskPlan | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query per row: q [B, H*G, 1, D] -> [B, H*G, 1, Dv]. `plan` has the work list of decode."""
    chunks = plan.chunks
    assert chunks is not None
    heads = k_arena.shape[1]
    packed = q.reshape(q.shape[0], heads, q.shape[1] // heads, q.shape[3])
    given = (None, None) if mask is None else (mask.bias, mask.padding)
    out = _decode.default(
        packed,
        k_arena,
        v_arena,
        chunks.table,
        chunks.row,
        chunks.bias,
        chunks.of_row,
        chunks.count,
        *given,
        scale,
        softcap,
        sinks,
    )
    return out.view(q.shape[0], q.shape[1], 1, head_dim(v_arena))
