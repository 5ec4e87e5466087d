"""`python -m benchmarks.coverage [--only TEXT ...] [--modes MODE ...]`: run the cases, each in a process of its own.

Writes benchmarks/results/coverage.json, where a row replaces the earlier one of the same versions of torch and
transformers, and from all rows docs/coverage.md. Each row is written as soon as it is known; with --only, the cases
whose names contain one of the texts are run. --print writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import multiprocessing
import warnings
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.harness import RESULTS, machine

from .case import MODES, Case, examine, fresh
from .cases import CASES
from .page import PAGE, page, row_key

PATH = RESULTS / "coverage.json"
PATIENCE = 900  # seconds for all modes of a case


def run_case(case: Case, new_tokens: int) -> dict[str, Any]:
    """The row of one case, examined in a forked process, so that neither a crash nor anything cached spreads."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(case, new_tokens, sender))
    process.start()
    sender.close()
    row: dict[str, Any] = {"package": case.package, "model": case.model, "cache": case.cache}
    try:
        answer = receiver.recv() if receiver.poll(PATIENCE) else {"error": f"not ready after {PATIENCE} s"}
    except EOFError:
        process.join()
        answer = {"error": f"the process ended with code {process.exitcode}"}
    process.kill()
    process.join()
    return {**row, **answer}


def _work(case: Case, new_tokens: int, sender: Connection) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # about graph breaks, and of packages about tiny sizes
    try:
        subject = case.make()
        with torch.no_grad():
            sensitivity = subject.sensitivity(subject.build())
        outcomes = [asdict(examine(subject, mode, new_tokens)) for mode in case.modes]
        fresh()
        sender.send({"sensitivity": sensitivity, "modes": outcomes})
    except Exception as error:  # the dense model, or the package itself: a row that says so
        sender.send({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"})


def versions() -> dict[str, str]:
    """The installed version of every package in the table."""
    found = {}
    for name in ("torch", *dict.fromkeys(case.package for case in CASES if case.package)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="which models are paged, and what of them")
    parser.add_argument("--only", nargs="+", default=[""], help="run the cases whose name contains one of these")
    parser.add_argument("--tokens", type=int, default=40, help="new tokens per run (40)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="run only these (all)")
    parser.add_argument("--print", action="store_true", help="write nothing")
    options = parser.parse_args()
    for case in CASES:
        name = f"{case.package} {case.model} {case.cache}".lower()
        if any(text.lower() in name for text in options.only):
            modes = tuple(mode for mode in case.modes if mode in options.modes)
            row = run_case(replace(case, modes=modes), options.tokens)
            print(json.dumps(row), flush=True)
            if not options.print:
                write({"machine": machine(), "versions": versions(), "new_tokens": options.tokens, "rows": [row]})


def write(run: dict[str, Any]) -> None:
    """Put the rows of `run` among the results, in the order of the cases, and write the page."""
    runs = json.loads(PATH.read_text())["runs"] if PATH.exists() else []
    earlier = next((old for old in runs if _environment(old) == _environment(run)), {"rows": []})
    rows = {row_key(row): row for row in (*earlier["rows"], *run["rows"])}
    run["rows"] = [rows[key] for case in CASES if (key := (case.package, case.model, case.cache)) in rows]
    runs = [old for old in runs if old is not earlier] + [run]
    runs.sort(key=lambda each: [int(part) for part in each["versions"]["transformers"].split(".")], reverse=True)
    PATH.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    PAGE.write_text(page(runs))


def _environment(run: dict[str, Any]) -> tuple[str, str]:
    return run["versions"]["torch"], run["versions"]["transformers"]


if __name__ == "__main__":
    main()
