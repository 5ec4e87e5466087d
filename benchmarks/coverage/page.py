"""docs/coverage.md, written from the results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.tables import table

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"

INTRODUCTION = """# Coverage

Written by `make coverage`; not edited by hand. Tiny random models in float32 generate {tokens} tokens with unmodified
loops of their packages, dense and paged (`inner="eager"`): greedy, a padded batch, three beams, and a second turn on
the first one's cache. Prompts are short; windows (12 tokens) fill up. A model counts only if its tokens vary, and if
its logits move when the oldest cached values are disturbed.

- **tokens**: whether all are the dense model's, in the modes named.
- **caches**: how many of the K and V tensors are in pages when the loop ends.
- **attention**: how many attentions of a decode step read pages. Attention written by hand counts only where it is
  recognised; elsewhere it reads dense copies of the caches.
- **dense copies**: caches that a decode step copies whole, and copies made outside compiled graphs in all modes.
- **why not**: the reasons that `explain()` gives, node numbers left out.
"""


def page(runs: list[dict[str, Any]]) -> str:
    """The text of docs/coverage.md: the newest run in full; of the others, the rows that differ."""
    newest, *others = runs
    parts = [INTRODUCTION.format(tokens=newest["new_tokens"]), _heading(newest), _table(newest, newest["rows"])]
    known = {row_key(row): _cells(newest, row) for row in newest["rows"]}
    for run in others:
        rows = [
            row for row in run["rows"] if _known(run, row) and _cells(run, row)[2:] != known.get(row_key(row), [])[2:]
        ]
        parts.append(_heading(run))
        same = len([row for row in run["rows"] if _known(run, row)]) - len(rows)
        parts.append(f"{same} rows are the same." + (" These differ:\n" if rows else ""))
        parts += [_table(run, rows)] if rows else []
    return "\n".join(parts) + "\n"


def _known(run: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether the row's package was installed in the run."""
    return not row["package"] or bool(run["versions"][row["package"]])


def row_key(row: dict[str, Any]) -> tuple[str, str, str]:
    """What names a row: package, model, cache."""
    return row["package"], row["model"], row["cache"]


def _heading(run: dict[str, Any]) -> str:
    return f"\n## transformers {run['versions']['transformers']}, torch {run['versions']['torch'].split('+')[0]}\n"


def _table(run: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    header = ["package", "model", "cache", "tokens", "caches", "attention", "dense copies", "why not"]
    return table(header, [_cells(run, row) for row in rows])


def _cells(run: dict[str, Any], row: dict[str, Any]) -> list[str]:
    version = run["versions"].get(row["package"], "")
    package = f"{row['package']} {version}".strip() if row["package"] else "tests/models"
    start = [package, row["model"], row["cache"]]
    if "error" in row:
        return [*start, "not run", "", "", "", _safe(row["error"])]
    modes = row["modes"]
    copies = [_copies(modes), *sorted(f"{op} × {n}" for op, n in _materializations(modes).items())]
    fallbacks = sum(mode["dense_fallbacks"] for mode in modes)
    copies += [f"{fallbacks} whole steps"] if fallbacks else []
    return [
        *start,
        _tokens(row),
        _counts([mode["caches"] for mode in modes]),
        _counts([mode["attention"] for mode in modes]),
        _safe("; ".join(copy for copy in copies if copy)),
        _safe("; ".join(_reasons(modes))),
    ]


def _tokens(row: dict[str, Any]) -> str:
    modes = row["modes"]
    faults = [f"**{mode['mode']}: {_safe(mode['fault'])}**" for mode in modes if mode["fault"]]
    doubts = ["**its logits do not depend on the oldest cached values**"] if row["sensitivity"] < 1e-3 else []
    doubts += [f"**{mode['mode']}: too few distinct tokens**" for mode in modes if mode["varied"] < 4]
    equal = [mode["mode"] for mode in modes if not mode["fault"]]
    return "; ".join([*(["equal: " + ", ".join(equal)] if equal else []), *faults, *doubts])


def _counts(pairs: list[list[int]]) -> str:
    """ "4 of 4", or one such text per mode if they differ."""
    texts = list(dict.fromkeys(f"{paged} of {total}" for paged, total in pairs if total))
    return " / ".join(texts) or "none"


def _copies(modes: list[dict[str, Any]]) -> str:
    most = max(mode["copied"] for mode in modes)
    return f"{most} a step" if most else ""


def _materializations(modes: list[dict[str, Any]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for mode in modes:
        for op, count in mode["materializations"].items():
            total[op] = total.get(op, 0) + count
    return total


def _reasons(modes: list[dict[str, Any]]) -> list[str]:
    """Each reason once, without names and numbers of nodes."""
    found: dict[str, None] = {}
    for mode in modes:
        for reason in mode["reasons"]:
            for part in reason.split("; "):
                part = re.sub(r"^l_\w+?: ", "", part)
                part = re.sub(r" \(<[^>]*>\)", "", part)
                part = re.sub(r"^l_\w+", "an input", part)
                found[re.sub(r"\b([A-Za-z]\w*?)_\d+\b", r"\1", part)] = None
    return list(found)


def _safe(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
