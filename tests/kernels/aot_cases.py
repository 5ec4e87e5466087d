"""Compile representative launches ahead of time and print their resources as JSON.

Arguments: the target, then optionally `every` to compile each candidate, not the static choices alone, or `few` for
the static choices of some cases. Runs as a process of its own, because the tests' process interprets kernels and this
one must compile them.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from paged_inductor.kernels import aot, configs, copy, decode, prefill, shared, write
from paged_inductor.kernels.launch import DeviceLimits, Launch, LaunchConfig
from paged_inductor.kernels.problem import AttentionProblem, attention_problem

KV_LEN, BATCH, KV_HEADS = 4096, 2, 2


@dataclass(frozen=True)
class Case:
    name: str
    q_len: int
    head_dim: int
    group: int
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    causal: bool = True
    window: int | None = None
    mask: torch.dtype | None = None
    softcap: float | None = None
    sinks: bool = False
    chunk: int | None = None
    alibi: bool = False
    stored: torch.dtype | None = None
    row_start: int | None = None
    v_in_k: bool = False
    shared_prefix: int = 0
    held: bool = False

    def problem(self) -> AttentionProblem:
        blocks = KV_LEN // self.block_size
        v_head_dim = self.v_head_dim or self.head_dim
        arena = (blocks, KV_HEADS, self.block_size)
        num_heads = KV_HEADS * self.group
        k_arena = torch.empty(*arena, self.head_dim, dtype=self.stored or self.dtype)
        v_arena = k_arena[..., :v_head_dim] if self.v_in_k else k_arena.new_empty(*arena, v_head_dim)
        scales = torch.empty(arena) if self.stored else None
        return attention_problem(
            torch.empty(BATCH, num_heads, self.q_len, self.head_dim, dtype=self.dtype),
            k_arena,
            v_arena,
            torch.zeros(BATCH, blocks, dtype=torch.int32),
            torch.zeros(BATCH, dtype=torch.int32),
            KV_LEN,
            scale=self.head_dim**-0.5,
            causal_offset=KV_LEN - self.q_len if self.causal else None,
            window=self.window,
            mask=self.mask and torch.empty(BATCH, 1, self.q_len, KV_LEN, dtype=self.mask),
            softcap=self.softcap,
            sinks=torch.empty(num_heads) if self.sinks else None,
            chunk=self.chunk,
            slopes=torch.empty(num_heads) if self.alibi else None,
            k_scales=scales,
            v_scales=scales,
            row_start=self.row_start,
            hidden=torch.zeros(BATCH, dtype=torch.int32) if self.held else None,
            shared_prefix=self.shared_prefix,
        )


FP8, INT8 = torch.float8_e4m3fn, torch.int8
DECODE = [
    Case("mha_d64", q_len=1, head_dim=64, group=1),
    Case("gqa_d128", q_len=1, head_dim=128, group=4),
    Case("gqa_d128_window", q_len=1, head_dim=128, group=4, window=1024),
    Case("gqa_d128_bool_mask", q_len=4, head_dim=128, group=4, mask=torch.bool),
    Case("speculative_d128", q_len=16, head_dim=128, group=8),
    Case("mqa_d256", q_len=1, head_dim=256, group=8),
    Case("mla_like_d192_dv128", q_len=1, head_dim=192, v_head_dim=128, group=1, block_size=64),
    Case("fp32_d128", q_len=1, head_dim=128, group=4, dtype=torch.float32),
    Case("gqa_d64_sinks", q_len=1, head_dim=64, group=8, window=1024, sinks=True),
    Case("gqa_d256_softcap", q_len=1, head_dim=256, group=2, softcap=50.0),
    Case("gqa_d128_fp8", q_len=1, head_dim=128, group=4, stored=FP8),
    Case("gqa_d128_int8", q_len=1, head_dim=128, group=4, stored=INT8),
    Case("gqa_d96_int8", q_len=1, head_dim=96, group=4, stored=INT8),
    Case("gqa_d80_int8", q_len=1, head_dim=80, group=4, stored=INT8),
    Case("gqa_d112_fp8", q_len=1, head_dim=112, group=4, stored=FP8),
    Case("gqa_d128_shared", q_len=1, head_dim=128, group=4, shared_prefix=2048),
    Case("gqa_d128_held", q_len=1, head_dim=128, group=4, held=True),
    Case("gqa_d128_chunk", q_len=1, head_dim=128, group=5, chunk=2048),
    Case("mha_d80_alibi", q_len=1, head_dim=80, group=1, alibi=True),
    Case("gqa_d64_static", q_len=1, head_dim=64, group=3, causal=False, mask=torch.bool, row_start=0),
    Case("mla_d576", q_len=1, head_dim=576, v_head_dim=512, group=16, block_size=64, v_in_k=True),
    Case("mla_d576_int8", q_len=1, head_dim=576, v_head_dim=512, group=16, block_size=64, v_in_k=True, stored=INT8),
    Case("mla_d576_h128_fp8", q_len=1, head_dim=576, v_head_dim=512, group=128, block_size=64, v_in_k=True, stored=FP8),
]
PREFILL = [
    Case("gqa_d64_window", q_len=512, head_dim=64, group=4, window=1024),
    Case("gqa_d128", q_len=512, head_dim=128, group=4),
    Case("mha_d96", q_len=512, head_dim=96, group=1, block_size=32),
    Case("gqa_d128_bias", q_len=512, head_dim=128, group=4, causal=False, mask=torch.float32),
    Case("mqa_d256", q_len=512, head_dim=256, group=8),
    Case("fp32_d128", q_len=512, head_dim=128, group=4, dtype=torch.float32),
    Case("gqa_d64_sinks_bias", q_len=512, head_dim=64, group=8, causal=False, mask=torch.float32, sinks=True),
    Case("gqa_d256_softcap", q_len=512, head_dim=256, group=2, softcap=50.0),
    Case("gqa_d128_fp8", q_len=512, head_dim=128, group=4, stored=FP8),
    Case("gqa_d128_int8", q_len=512, head_dim=128, group=4, stored=INT8),
    Case("gqa_d64_int8", q_len=512, head_dim=64, group=4, stored=INT8),
    Case("gqa_d128_chunk", q_len=512, head_dim=128, group=5, chunk=2048),
    Case("mha_d80_alibi", q_len=512, head_dim=80, group=1, alibi=True),
    Case("gqa_d64_static", q_len=512, head_dim=64, group=3, causal=False, mask=torch.bool, row_start=0),
    Case("mha_d192_dv128", q_len=512, head_dim=192, v_head_dim=128, group=1, block_size=64),
    Case("mla_d576", q_len=512, head_dim=576, v_head_dim=512, group=16, block_size=64, v_in_k=True),
    Case("mla_d576_fp8", q_len=512, head_dim=576, v_head_dim=512, group=16, block_size=64, v_in_k=True, stored=FP8),
    Case("mla_d576_int8", q_len=512, head_dim=576, v_head_dim=512, group=16, block_size=64, v_in_k=True, stored=INT8),
]


FEW = {"mha_d64", "gqa_d128", "gqa_d128_int8", "gqa_d128_bias", "gqa_d128_chunk", "mla_d576"}


def attention_launches(target: str, option: str) -> Iterator[tuple[str, Launch]]:
    """Launches of every case; the static configuration of the target, or each candidate."""
    limits = aot.TARGETS[target][1]
    for case in DECODE + PREFILL:
        if case.stored == FP8 and target == "sm_80":  # refused by `checks.float8`
            continue
        if option == "few" and case.name not in FEW:
            continue
        problem = case.problem()
        candidates = (
            configs.decode_candidates(problem, limits)
            if case in DECODE
            else configs.prefill_candidates(problem, limits)
        )
        for config in candidates if option == "every" else candidates[:1]:
            for launch in case_launches(case, problem, config, limits):
                kind = "prefix" if launch.arguments.get("IS_PREFIX") else launch.kernel.__name__.removesuffix("_kernel")
                tile = f"{config.tile_m}x{config.tile_n}, {config.num_warps} warps, {config.num_stages} stages"
                yield f"{case.name} | {kind} | {tile}", launch


def case_launches(case: Case, problem: AttentionProblem, config: LaunchConfig, limits: DeviceLimits) -> list[Launch]:
    """What one configuration launches for a case."""
    out = torch.empty(problem.out_shape, dtype=problem.q.dtype)
    if case not in DECODE:
        return [prefill.plan(problem, out, config)]
    num_splits = configs.choose_num_splits(problem, limits, config.tile_m)
    if case.shared_prefix:
        return shared.plan(problem, out, (config, num_splits), (config, num_splits), torch.empty)
    return decode.plan(problem, out, config, num_splits, torch.empty)


def page_launches(target: str) -> Iterator[tuple[str, Launch]]:
    """Launches of the writes and copies."""
    arena = torch.zeros(8, KV_HEADS, 16, 128, dtype=torch.bfloat16)
    table, lens = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for num_new in (1, 40):
        new = torch.zeros(2, KV_HEADS, num_new, 128, dtype=torch.bfloat16)
        yield f"d128_{num_new} | cache_write | ", write.plan(arena, arena, new, new, table, lens)
        for stored in (INT8, FP8)[: 1 if target == "sm_80" else 2]:
            codes, scales = arena.to(stored), torch.zeros(8, KV_HEADS, 16)
            launch = write.plan(codes, codes, new, new, table, lens, scales, scales)
            yield f"d128_{num_new}_{'int8' if stored == INT8 else 'fp8'} | cache_write | ", launch
    ids = torch.zeros(3, dtype=torch.int64)
    yield "d128 | copy_blocks | ", copy.plan_copy_blocks([arena, arena], ids, ids)
    yield "d128 | gather | ", copy.plan_gather(arena, table, lens, 40, new)


def resources(target: str, option: str) -> dict[str, dict[str, object]]:
    """What each launch takes on a target, by case, kernel and configuration."""
    limits = aot.TARGETS[target][1]
    found: dict[str, dict[str, object]] = {}
    for name, launch in [*attention_launches(target, option), *page_launches(target)]:
        taken = aot.compile_launch(launch, target)
        found[name] = asdict(taken) | {"resident_blocks": taken.resident_blocks(limits)}
    return found


if __name__ == "__main__":
    print(json.dumps(resources(sys.argv[1], "".join(sys.argv[2:]))))
