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


def decode_shared(
    problem: AttentionProblem, out: Tensor, allocate: Allocator, choose: autotune.Choose = autotune.choose
) -> None:
    """Write the attention of `problem`, whose rows share `shared_prefix` tokens, into `out`; `choose` picks the
    configurations of both passes."""
    limits = device_limits(problem.q.device)
    prefixes, suffixes = configs.prefix_candidates(problem, limits), configs.decode_candidates(problem, limits)

    def run(prefix: LaunchConfig, suffix: LaunchConfig) -> None:
        prefix_splits = configs.choose_prefix_splits(problem, limits, prefix.tile_m)
        suffix_splits = configs.choose_num_splits(problem, limits, suffix.tile_m)
        for launch in plan(problem, out, (prefix, prefix_splits), (suffix, suffix_splits), allocate):
            launch.run()

    key = problem.tuning_key()
    prefix = choose(("decode_prefix", *key), prefixes, lambda config: run(config, suffixes[0]))
    suffix = choose(("decode_suffix", *key), suffixes, lambda config: run(prefix, config))
    run(prefix, suffix)
