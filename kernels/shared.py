"""Decode of rows that share their first blocks: one pass reads those for all rows, one pass reads the rest.

The prefix pass packs the queries of all rows into its M tiles, so that a shared page is read once and multiplied with
as many rows as a tensor core takes. Both passes leave partial softmaxes, which one kernel merges.
"""

from torch import Tensor

from . import autotune, configs
from .decode import plan_pass
from .launch import Allocator, Launch, LaunchConfig, device_limits
from .merge import Partials, plan_merge
from .problem import AttentionProblem


def plan(
    problem: AttentionProblem,
    out: Tensor,
    prefix: tuple[LaunchConfig, int],
    suffix: tuple[LaunchConfig, int],
    allocate: Allocator,
) -> list[Launch]:
    """The launches that write `out` [B, H_q, Q, Dv]; of both passes, the configuration and the number of splits."""
    partials = Partials.allocate(problem, prefix[1] + suffix[1], allocate)
    return [
        plan_pass(problem, partials, *prefix, first_split=suffix[1], prefix=True),
        plan_pass(problem, partials, *suffix),
        plan_merge(problem, partials, out),
    ]


def decode_shared(problem: AttentionProblem, out: Tensor, allocate: Allocator) -> None:
    """Write the attention of `problem`, whose rows share `shared_prefix` tokens, into `out`."""
    limits = device_limits(problem.q.device)
    suffix = configs.decode_candidates(problem, limits)[0]
    suffix_splits = configs.choose_num_splits(problem, limits, suffix.tile_m)

    def run(config: LaunchConfig) -> None:
        prefix_splits = configs.choose_prefix_splits(problem, limits, config.tile_m)
        for launch in plan(problem, out, (config, prefix_splits), (suffix, suffix_splits), allocate):
            launch.run()

    candidates = configs.prefix_candidates(problem, limits)
    run(autotune.choose(("decode_shared", *problem.tuning_key()), candidates, run))
