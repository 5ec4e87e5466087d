"""Generation loops as data: a batch of prompts, and what is done with its cache one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Crop", "Drop", "Feed", "Fork", "Greedy", "Loop", "Operation", "Reorder", "Repeat"]


@dataclass(frozen=True)
class Operation:
    """Something done to one of a loop's continuations: number `branch`, counted round those that are alive."""

    branch: int = 0


@dataclass(frozen=True)
class Greedy(Operation):
    """`tokens` steps, each with the likeliest next token of every row."""

    tokens: int = 1


@dataclass(frozen=True)
class Feed(Operation):
    """Several tokens in one step, as a next turn or a draft to be checked. Row r gets `tokens`, each plus r (modulo
    the vocabulary), so that rows differ."""

    tokens: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Reorder(Operation):
    """New row i is old row `rows[i]`, counted round the batch, by `index_select`: as beam search does."""

    rows: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Repeat(Operation):
    """Every row `times` times, by `repeat_interleave`. Not done if there would be more than 8 rows."""

    times: int = 2


@dataclass(frozen=True)
class Crop(Operation):
    """Forget the last `tokens` tokens, and read the last one that remains again. At least one stays in every row."""

    tokens: int = 1


@dataclass(frozen=True)
class Fork(Operation):
    """A deep copy of the cache, as a further continuation. At most three are kept."""


@dataclass(frozen=True)
class Drop(Operation):
    """End this continuation, unless it is the last."""


@dataclass(frozen=True)
class Loop:
    """One generation loop. prompts: token ids of each row; shorter rows are padded on the left."""

    prompts: tuple[tuple[int, ...], ...]
    operations: tuple[Operation, ...] = ()

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The prompts as int64 tokens [B, T], padded by 0, and a mask [B, T] that is 0 at padding."""
        length = max(map(len, self.prompts))
        rows = [(0,) * (length - len(prompt)) + tuple(prompt) for prompt in self.prompts]
        mask = [(0,) * (length - len(prompt)) + (1,) * len(prompt) for prompt in self.prompts]
        return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


@dataclass(frozen=True)
class Branch:
    """A continuation: tokens [B, T] that its cache has seen, their mask, the cache, and the next tokens [B, 1]."""

    tokens: Tensor
    mask: Tensor
    cache: object
    chosen: Tensor

    def rows(self, index: Tensor, cache: object) -> Branch:
        """The branch of these rows, whose cache is `cache`."""
        return replace(self, tokens=self.tokens[index], mask=self.mask[index], chosen=self.chosen[index], cache=cache)
