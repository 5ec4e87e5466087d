"""The goals for one H200, and what the cells say of them: pass, short, or not measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .bench import Cell

__all__ = ["GOALS", "Goal", "verdicts"]

IN_FLIGHT = 65536  # tokens of all rows, from which on decode must be limited by memory alone
Cells = Sequence[Cell]


@dataclass(frozen=True)
class Goal:
    """worst: the least of a figure over the cells that count; None if there is none."""

    name: str
    wanted: float
    worst: Callable[[Cells], float | None]


def _least(cells: Cells, section: str, figure: str, in_flight: int = 0, **facts: object) -> float | None:
    values = [
        cell[figure]
        for cell in cells
        if cell["section"] == section
        and cell["status"] == "measured"
        and cell.get(figure) is not None
        and all(cell[name] == value for name, value in facts.items())
        and cell["batch"] * cell["context"] >= in_flight
    ]
    return min(values, default=None)


def _fp8_over_bf16(cells: Cells) -> float | None:
    """The least speedup of fp8 pages over bf16 ones in the same case."""
    times: dict[tuple[object, ...], dict[str, float]] = {}
    for cell in cells:
        if (
            cell["section"] == "decode"
            and cell["status"] == "measured"
            and cell["batch"] * cell["context"] >= IN_FLIGHT
        ):
            key = (cell["heads"], cell["kv_heads"], cell["batch"], cell["context"])
            times.setdefault(key, {})[cell["kv"]] = cell["us"]
    pairs = [pair["bfloat16"] / pair["float8_e4m3fn"] for pair in times.values() if len(pair) == 2]
    return min(pairs, default=None)


GOALS = [
    Goal(
        "decode from 64k tokens on, of a copy's rate",
        0.9,
        lambda c: _least(c, "decode", "of_copy", IN_FLIGHT, kv="bfloat16"),
    ),
    Goal("decode, dense SDPA's time over paged", 1.0, lambda c: _least(c, "decode", "sdpa_over_paged")),
    Goal("decode, 16 rows sharing 8k: speedup", 4.0, lambda c: _least(c, "shared", "speedup", batch=16)),
    Goal("prefill, SDPA flash's time over paged", 0.9, lambda c: _least(c, "prefill", "flash_over_paged")),
    Goal("decode from 64k tokens on, fp8 over bf16", 1.7, _fp8_over_bf16),
]


def verdicts(cells: Cells) -> list[Cell]:
    """One for each goal, with the least figure that was measured."""
    found = []
    for goal in GOALS:
        worst = goal.worst(cells)
        verdict = "not measured" if worst is None else "pass" if worst >= goal.wanted else "short"
        found.append({"goal": goal.name, "wanted": goal.wanted, "least": worst, "verdict": verdict})
    return found
