"""`make demo`: a real model generates in six ways, dense and paged, and the tokens are compared one by one.

Exits with 1 if any token differs.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")  # the bars on the screen are this program's own

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import paged_inductor
import smollm2
from paged_inductor.compare import Generation, Watch, cache_tensors, first_difference, percentile

PICTURE = Path("demo_pages.png")


@dataclass(frozen=True)
class Side:
    """One mode, dense or paged. shared: most blocks that two sequences saw at once. copied: blocks copied on write."""

    tokens: list[list[int]]
    answers: list[str]
    kv_bytes: int
    watch: Watch
    paged: bool
    shared: int = 0
    copied: int = 0


def main() -> int:
    console = Console()
    quiet()
    console.rule("[bold]paged_inductor: unmodified generate(), dense and paged")
    with progress(console) as bars:
        task = bars.add_task("loading SmolLM2-135M-Instruct", total=None)
        chat = smollm2.load()
        bars.update(task, total=1, completed=1)
        pages = smollm2.Chat(paged_inductor.page(twin(chat.model), inner="eager"), chat.tokenizer)
        dense, paged = [], []
        for mode in smollm2.MODES:  # in turn, so that a busy moment of the machine meets both
            dense.append(measure(chat, mode, bars, "dense"))
            paged.append(measure(pages, mode, bars, "paged"))
    for mode, before, after in zip(smollm2.MODES, dense, paged):
        console.print(answer_panel(mode, before, after))
    console.print(memory_table(dense, paged))
    console.print(time_table(dense, paged))
    explanation = paged_inductor.explain(pages.model)
    console.print(f"explain(model): {str(explanation).splitlines()[-1]}")
    console.print(f"check_integrity(): {paged_inductor.check_integrity()}")
    draw(paged)
    console.print(f"pages in use over time: {PICTURE}")
    if all(same(before, after) for before, after in zip(dense, paged)):
        console.print("[bold green]All tokens are equal.")
        return 0
    console.print("[bold red]Some tokens differ.")
    return 1


def twin(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model that shares its weights."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def quiet() -> None:
    """Leave the screen to this program's own bars and tables."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)


def progress(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, refresh_per_second=4)


def measure(chat: smollm2.Chat, mode: smollm2.Mode, bars: Progress, side: str) -> Side:
    """Run a mode, timed; before that once, untimed and shorter, so that compiling is not counted."""
    short = replace(mode, new_tokens=mode.warm_up_tokens)
    turns = 2 if mode.follow_up else 1
    task = bars.add_task(f"{side}: {mode.name}", total=turns * (short.new_tokens + mode.new_tokens))

    def advance() -> None:
        bars.advance(task)

    if side == "paged":
        bars.update(task, description=f"paged: {mode.name} (compiling)")
    chat.run(short, Watch(advance))
    bars.update(task, description=f"{side}: {mode.name}")
    copies = paged_inductor.stats().copies_on_write
    generation, answers = chat.run(mode, Watch(advance))
    bars.update(task, total=1, completed=1)
    return summary(generation, answers, copies)


def summary(generation: Generation, answers: list[str], copies: int) -> Side:
    """What is kept of a run: the cache itself is let go."""
    paged = all(isinstance(tensor, paged_inductor.PagedTensor) for tensor in cache_tensors(generation.cache))
    shared = max(books.shared_blocks for books in generation.watch.books)
    copied = paged_inductor.stats().copies_on_write - copies
    return Side(generation.tokens, answers, generation.kv_bytes, generation.watch, paged, shared, copied)


def same(dense: Side, paged: Side) -> bool:
    """Whether the paged run was paged, and every token is the dense run's."""
    return paged.paged and first_difference(dense.tokens, paged.tokens) is None


def answer_panel(mode: smollm2.Mode, dense: Side, paged: Side) -> Panel:
    asked = mode.follow_up or mode.prompts[0]
    lines = [f"[dim]{asked if len(asked) < 110 else asked[:107] + '...'}[/dim]"]
    lines += [answer.strip() for answer in paged.answers]
    where = first_difference(dense.tokens, paged.tokens)
    if where is not None:
        lines.append(f"[red]differs from row {where[0]}, token {where[1]} on; dense: {dense.answers[where[0]]}[/red]")
    return Panel("\n".join(lines), title=mode.name, title_align="left")


def memory_table(dense: Sequence[Side], paged: Sequence[Side]) -> Table:
    table = Table(title="tokens and memory; KV bytes: of the cache that generate() returns")
    table.add_column("mode")
    for heading in ("tokens equal", "in pages", "KV KiB dense", "KV KiB paged", "blocks shared", "copied on write"):
        table.add_column(heading, justify="right")
    for mode, before, after in zip(smollm2.MODES, dense, paged):
        table.add_row(
            mode.name,
            yes_or_no(first_difference(before.tokens, after.tokens) is None),
            yes_or_no(after.paged),
            f"{before.kv_bytes / 1024:.0f}",
            f"{after.kv_bytes / 1024:.0f}",
            str(after.shared),
            str(after.copied),
        )
    return table


def yes_or_no(answer: bool) -> str:
    return "[green]yes[/green]" if answer else "[red]NO[/red]"


def time_table(dense: Sequence[Side], paged: Sequence[Side]) -> Table:
    table = Table(title="ms per token (few tokens: indicative only); prompts and compiling aside, models uncompiled")
    table.add_column("mode")
    for heading in ("dense P50", "dense P95", "paged P50", "paged P95", "paged ÷ dense, P50"):
        table.add_column(heading, justify="right")
    for mode, before, after in zip(smollm2.MODES, dense, paged):
        times = [percentile(side.watch.milliseconds, p) for side in (before, after) for p in (50, 95)]
        table.add_row(mode.name, *(f"{ms:.1f}" for ms in times), f"{times[2] / times[0]:.2f}")
    return table


def draw(paged: Sequence[Side]) -> None:
    """Pages in use after every step of the paged runs, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    books = [entry for side in paged for entry in side.watch.books]
    steps = range(len(books))
    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    axes.fill_between(steps, [b.blocks_used for b in books], step="post", alpha=0.35, label="pages in use")
    axes.fill_between(steps, [b.shared_blocks for b in books], step="post", alpha=0.8, label="of these, shared")
    axes.plot(steps, [b.blocks_total for b in books], drawstyle="steps-post", color="gray", label="pages reserved")
    start = 0
    top = max(b.blocks_total for b in books) * 1.12
    for mode, side in zip(smollm2.MODES, paged):
        axes.axvline(start, color="black", linewidth=0.5)
        axes.text(start + 0.6, top, mode.name, fontsize=9, va="top")
        start += len(side.watch.books)
    axes.set(xlabel="step of generate()", ylabel="pages of 16 tokens, all layers", ylim=(0, top), xlim=(0, start))
    axes.legend(loc="center left")
    axes.set_title("Pages in use while generating")
    figure.savefig(PICTURE, dpi=120)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
