"""A call's arguments by the kernels' parameter names."""

import math

import torch
from torch import Tensor

from .problem import AttentionProblem

LOG2E = math.log2(math.e)


def pointer(name: str, value: Tensor | None, dims: tuple[str, ...]) -> dict[str, object]:
    """`{name}_ptr` and a `{name}_{dim}_stride` per dim; an absent tensor has no pointer and zero strides."""
    strides = value.stride() if value is not None else (0,) * len(dims)
    return {f"{name}_ptr": value, **{f"{name}_{dim}_stride": s for dim, s in zip(dims, strides, strict=True)}}


def kernel_arguments(problem: AttentionProblem) -> dict[str, object]:
    """Arguments that the decode and the prefill kernel share, by parameter name."""
    base = 1.0 if problem.has_bias else LOG2E
    arguments: dict[str, object] = {
        "block_table_ptr": problem.block_table,
        "table_batch_stride": problem.block_table.stride(0),
        "table_block_stride": problem.block_table.stride(1),
        "seq_lens_ptr": problem.seq_lens,
        "kv_len": problem.kv_len,
        "row_start": problem.row_start or 0,
        "hidden_ptr": problem.hidden,
        "score_scale": problem.scale / problem.softcap if problem.softcap else problem.scale * base,
        "softcap": (problem.softcap or 0.0) * base,
        "slopes_ptr": problem.slopes,
        "sinks_ptr": problem.sinks,
        "causal_offset": problem.query_offset,
        "window": problem.window or 0,
        "chunk": problem.chunk or 0,
        "num_kv_heads": problem.num_kv_heads,
        "packed_rows": problem.packed_rows,
        "GROUP": problem.group,
        "HEAD_DIM": problem.head_dim,
        "V_HEAD_DIM": problem.v_head_dim,
        "BLOCK_SIZE": problem.k_arena.shape[2],
        "TILE_D": problem.head_tiles[0],
        "TILE_E": problem.head_tiles[1],
        "TILE_DV": problem.value_tile,
        "IS_CAUSAL": problem.causal_offset is not None,
        "HAS_WINDOW": problem.window is not None,
        "HAS_CHUNK": problem.chunk is not None,
        "HAS_MASK": problem.mask is not None,
        "HAS_BIAS": problem.has_bias,
        "HAS_ZEROS": problem.mask is not None and problem.row_start is not None,
        "ROWS_END": problem.row_start is None,
        "HAS_HIDDEN": problem.hidden is not None,
        "HAS_SOFTCAP": problem.softcap is not None,
        "HAS_ALIBI": problem.slopes is not None,
        "HAS_SINKS": problem.sinks is not None,
        "HAS_SCALES": problem.k_scales is not None,
        "V_IS_K": problem.v_is_k,
        "V_PAIRS": problem.v_in_pairs,
    }
    arguments |= pointer("q", problem.q, ("batch", "head", "query", "dim"))
    arguments |= pointer("k_arena", problem.k_arena, ("block", "head", "slot", "dim"))
    v_arena = problem.v_arena.view(torch.int16) if problem.v_in_pairs else problem.v_arena
    arguments |= pointer("v_arena", v_arena, ("block", "head", "slot", "dim"))
    arguments |= pointer("k_scales", problem.k_scales, ("block", "head", "slot"))
    arguments |= pointer("v_scales", problem.v_scales, ("block", "head", "slot"))
    mask = problem.mask.view(torch.uint8) if problem.mask is not None and not problem.has_bias else problem.mask
    arguments |= pointer("mask", mask, ("batch", "head", "query", "key"))
    return arguments
