"""What all layers of a step share: block table, lengths, and the slots of the new tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import SymInt, Tensor

__all__ = ["StepPlan", "plan_step"]


class StepPlan(NamedTuple):
    """One cache group's tables in one step.

    block_table: int32 [B, W] and seq_lens: int32 [B], tokens per row, those of this step included.
    kv_len: the logical length, at least every row's; shorter rows are virtually left padded.
    new_tokens: how many tokens per row this step writes (0 when it only reads).
    block_size: tokens per block.
    """

    block_table: Tensor
    seq_lens: Tensor
    kv_len: int | SymInt
    new_tokens: int | SymInt
    block_size: int


def plan_step(
    block_table: Tensor, seq_lens: Tensor, kv_len: int | SymInt, new_tokens: int | SymInt, block_size: int
) -> StepPlan:
    """The plan of a step; see `StepPlan`."""
    return StepPlan(block_table, seq_lens, kv_len, new_tokens, block_size)
