"""Correctness fuzzing for your own model: drawn loops, dense and paged, must give the same logits and tokens.

`fuzz(model)` draws with Hypothesis (`pip install 'paged-inductor[testing]'`) and shrinks what fails to the smallest
loop; `replay(model, loop)` runs one loop. The strategies `prompts`, `batches` and `loops` are for tests of your own.
"""

from .fuzzing import FuzzFailure, fuzz, replay
from .loops import Crop, Drop, Feed, Fork, Greedy, Loop, Operation, Reorder, Repeat
from .strategies import batches, loops, prompts

__all__ = [
    "Crop",
    "Drop",
    "Feed",
    "Fork",
    "FuzzFailure",
    "Greedy",
    "Loop",
    "Operation",
    "Reorder",
    "Repeat",
    "batches",
    "fuzz",
    "loops",
    "prompts",
    "replay",
]
