"""`python -m paged_inductor tune`: time the kernels' configurations on this GPU and keep the fastest on disk."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ._layout import KV_DTYPES
from .kernels import autotune, decode, prefill, shared
from .kernels.launch import LaunchConfig
from .kernels.problem import AttentionProblem, attention_problem
from .runtime.memory import free_bytes

__all__ = ["Shape", "add_options", "shapes_of", "tune", "tune_shapes"]

NO_DEVICE = (
    "there is no CUDA or ROCm device here: tuning times kernels on the GPU that will run them. Run this command there, "
    "once for each model's heads; until then kernels run in their static configurations. CPUs need no tuning."
)
Report = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """A workload to tune for: `queries` new tokens for each of `batch` sequences of `context` tokens.

    stored: the dtype of quantised pages. window: how many keys a query sees. mask: the dtype of a mask tensor. shared:
    how many first tokens the sequences have in common, in whole blocks.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    batch: int
    context: int
    queries: int
    stored: torch.dtype | None = None
    window: int | None = None
    mask: torch.dtype | None = None
    shared: int = 0

    @property
    def kernel(self) -> str:
        return "decode" if self.queries <= decode.MAX_QUERIES else "prefill"

    @property
    def bytes(self) -> int:
        """Bytes of K and V."""
        itemsize = (self.stored or self.dtype).itemsize
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * itemsize

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} x {self.head_dim}"
        parts = {"pages of": self.stored, "window": self.window, "mask": self.mask, "shared": self.shared}
        variant = "".join(f", {name} {value}" for name, value in parts.items() if value)
        return f"{self.kernel} {heads} {self.dtype}: {self.batch} x {self.context} tokens{variant}".replace(
            "torch.", ""
        )

    def problem(self, device: torch.device) -> AttentionProblem:
        """Random queries and pages on `device`, blocks in random order."""
        width = -(-self.context // self.block_size)
        arena = (self.batch * width + 1, self.kv_heads, self.block_size, self.head_dim)
        table = torch.randperm(self.batch * width, device=device).add_(1).to(torch.int32).view(self.batch, width)
        table[:, : self.shared // self.block_size] = table[:1, : self.shared // self.block_size]
        k_arena, v_arena = (torch.randn(arena, dtype=self.dtype, device=device) for _ in range(2))
        scales = None
        if self.stored is not None:
            k_arena, v_arena = k_arena.to(self.stored), v_arena.to(self.stored)
            scales = torch.ones(arena[:3], device=device)
        shape = (self.batch, 1, self.queries, self.context)
        return attention_problem(
            torch.randn(self.batch, self.heads, self.queries, self.head_dim, dtype=self.dtype, device=device),
            k_arena,
            v_arena,
            table,
            torch.full((self.batch,), self.context, dtype=torch.int32, device=device),
            self.context,
            scale=self.head_dim**-0.5,
            causal_offset=None if self.mask else self.context - self.queries,  # else part of the mask
            window=self.window,
            mask=None if self.mask is None else torch.ones(shape, dtype=self.mask, device=device),
            k_scales=scales,
            v_scales=scales,
            shared_prefix=self.shared,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key and value heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block (default: %(default)s)")
    batches, contexts = [1, 2, 4, 8, 16, 32, 64], [1024, 2048, 4096, 8192, 16384, 32768]  # each a key of its own
    parser.add_argument("--batch", type=int, nargs="+", default=batches, help="(default: powers of two to 64)")
    parser.add_argument(
        "--context", type=int, nargs="+", default=contexts, help="(default: powers of two from 1024 to 32768)"
    )

    parser.add_argument("--kv-dtype", choices=tuple(KV_DTYPES), help="of quantised pages (default: as --dtype)")
    parser.add_argument("--window", type=int, help="keys that a query sees (default: all)")
    parser.add_argument("--mask", choices=("bool", "float32", "bfloat16", "float16"), help="mask tensors of this dtype")
    parser.add_argument(
        "--shared-prefix", type=int, nargs="+", default=[], help="tokens that all rows begin with (default: none)"
    )


def tune(options: argparse.Namespace) -> int:
    """Run the command. Returns 0, or 2 if there is no device or the options make no model."""
    for name in ("heads", "kv_heads", "head_dim", "block_size"):
        if getattr(options, name) < 1:
            print(f"--{name.replace('_', '-')} is {getattr(options, name)}: it must be at least 1")
            return 2
    if options.heads % options.kv_heads:
        print(f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}: give a multiple")
        return 2
    if options.mask and options.window:
        print("--mask and --window: a mask tensor says by itself what is hidden; give one of them")
        return 2
    if any(tokens < 1 or tokens % options.block_size for tokens in options.shared_prefix):
        print(f"--shared-prefix must be whole blocks: multiples of --block-size {options.block_size}")
        return 2
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 2
    device = torch.device("cuda")
    shapes = list(shapes_of(options))
    tune_shapes(shapes, device, autotune.tune)
    cache = autotune.tuning_cache(torch.cuda.get_device_name(device))
    print(f"{len(cache)} choices in {cache.path}")
    return 0


def shapes_of(options: argparse.Namespace) -> Iterator[Shape]:
    """The workloads that the command's options name."""
    model = (options.heads, options.kv_heads, options.head_dim, getattr(torch, options.dtype), options.block_size)
    stored, mask = KV_DTYPES.get(options.kv_dtype), options.mask and getattr(torch, options.mask)
    for batch, context in itertools.product(options.batch, options.context):
        prompt = min(context, max(2048 // batch, decode.MAX_QUERIES + 1))
        for queries in (1, prompt):
            yield Shape(*model, batch, context, queries, stored, options.window, mask)
        for tokens in options.shared_prefix:
            if batch > 1 and tokens < context:
                yield Shape(*model, batch, context, 1, stored, options.window, mask, tokens)


def tune_shapes(shapes: Sequence[Shape], device: torch.device, tune: Callable[..., LaunchConfig]) -> None:
    """Tune for every shape whose key is new; one too large for half of the free memory is skipped, and said so.

    tune: as `autotune.tune`.
    """
    seen: set[autotune.Key] = set()

    def choose(key: autotune.Key, candidates: Sequence[LaunchConfig], run: autotune.Run) -> LaunchConfig:
        if key in seen:
            return candidates[0]
        seen.add(key)
        return tune(key, candidates, run)

    with _progress(len(shapes)) as report:
        for shape in shapes:
            if shape.bytes > free_bytes(device) // 2:
                report(f"{shape}: skipped, its {shape.bytes / 2**30:.1f} GiB are more than half of the free memory")
                continue
            problem = shape.problem(device)
            out = torch.empty(problem.out_shape, dtype=problem.q.dtype, device=device)
            if problem.shared_prefix:
                shared.decode_shared(problem, out, torch.empty, choose)
            elif shape.kernel == "decode":
                decode.decode(problem, out, torch.empty, choose)
            else:
                prefill.prefill(problem, out, choose)
            report(str(shape))
            del problem, out


@contextmanager
def _progress(total: int) -> Iterator[Report]:
    """A function to be called with a line after each of `total` parts: a bar if rich is installed, else plain lines."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        numbers = itertools.count(1)
        yield lambda line: print(f"[{next(numbers)}/{total}] {line}", flush=True)
        return
    columns = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("tuning", total=total)

        def report(line: str) -> None:
            bar.console.print(line, highlight=False)
            bar.advance(task)

        yield report
