"""Compile representative launches ahead of time and print their resources as JSON.

Arguments: the target, then optionally `every` to compile each candidate, not the static choices alone. Runs
as a process of its own, because the tests' process interprets kernels and this one must compile them.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from paged_inductor.kernels import aot, configs, copy, decode, prefill, write
from paged_inductor.kernels.launch import Launch
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

    def problem(self) -> AttentionProblem:
        blocks = KV_LEN // self.block_size
        v_head_dim = self.v_head_dim or self.head_dim
        arena = (blocks, KV_HEADS, self.block_size)
        mask = self.mask and torch.zeros(BATCH, 1, self.q_len, KV_LEN, dtype=self.mask)
        return attention_problem(
            torch.zeros(BATCH, KV_HEADS * self.group, self.q_len, self.head_dim, dtype=self.dtype),
            torch.zeros(*arena, self.head_dim, dtype=self.dtype),
            torch.zeros(*arena, v_head_dim, dtype=self.dtype),
            torch.zeros(BATCH, blocks, dtype=torch.int32),
            torch.zeros(BATCH, dtype=torch.int32),
            KV_LEN,
            scale=self.head_dim**-0.5,
            causal_offset=KV_LEN - self.q_len if self.causal else None,
            window=self.window,
            mask=mask,
            softcap=self.softcap,
            sinks=torch.zeros(KV_HEADS * self.group) if self.sinks else None,
        )


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
]


def attention_launches(target: str, every: bool) -> Iterator[tuple[str, Launch]]:
    """Launches of every case; the static configuration of the target, or each candidate."""
    limits = aot.TARGETS[target][1]
    for case in DECODE + PREFILL:
        problem = case.problem()
        out = torch.empty(problem.out_shape, dtype=problem.q.dtype)
        candidates = (
            configs.decode_candidates(problem, limits)
            if case in DECODE
            else configs.prefill_candidates(problem, limits)
        )
        for config in candidates if every else candidates[:1]:
            if case in DECODE:
                num_splits = configs.choose_num_splits(problem, limits, config.tile_m)
                launches = decode.plan(problem, out, config, num_splits, torch.empty)
            else:
                launches = [prefill.plan(problem, out, config)]
            for launch in launches:
                yield f"{case.name}/{launch.kernel.__name__}/{config}", launch


def page_launches() -> Iterator[tuple[str, Launch]]:
    """Launches of the writes and copies."""
    arena = torch.zeros(8, KV_HEADS, 16, 128, dtype=torch.bfloat16)
    table, lens = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for num_new in (1, 40):
        new = torch.zeros(2, KV_HEADS, num_new, 128, dtype=torch.bfloat16)
        yield f"cache_write_kv_{num_new}", write.plan(arena, arena, new, new, table, lens)
    ids = torch.zeros(3, dtype=torch.int64)
    yield "copy_blocks", copy.plan_copy_blocks(arena, ids, ids)
    yield "gather", copy.plan_gather(arena, table, lens, 40, new)


if __name__ == "__main__":
    target, every = sys.argv[1], "every" in sys.argv[2:]
    launches = [*attention_launches(target, every), *page_launches()]
    print(json.dumps({name: asdict(aot.compile_launch(launch, target)) for name, launch in launches}))
