"""docs/coverage.md says what the results say, failures first of all."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.coverage.page import PAGE, page
from benchmarks.harness import RESULTS

MODE: dict[str, Any] = {
    "mode": "greedy",
    "fault": "",
    "caches": [4, 4],
    "attention": [2, 2],
    "copied": 0,
    "reasons": [],
    "materializations": {},
    "dense_fallbacks": 0,
    "varied": 9,
}


def row(sensitivity: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {"package": "", "model": "m", "cache": "c", "sensitivity": sensitivity, "modes": [{**MODE, **changes}]}


def last_line(*rows: dict[str, Any]) -> str:
    versions = {"torch": "2.13.0+cpu", "transformers": "5.24.0"}
    return page([{"versions": versions, "new_tokens": 40, "rows": list(rows)}]).splitlines()[-1]


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == page(json.loads((RESULTS / "coverage.json").read_text())["runs"])


def test_what_works_is_said_plainly() -> None:
    assert last_line(row()) == "| tests/models | m | c | equal: greedy | 4 of 4 | 2 of 2 |  |  |"


def test_faults_and_doubts_are_shown() -> None:
    assert "**greedy: tokens differ from row 0" in last_line(row(fault="tokens differ from row 0, position 9 on"))
    assert "too few distinct tokens" in last_line(row(varied=1))
    assert "do not depend on the oldest" in last_line(row(sensitivity=0.0))
    assert "not run" in last_line({"package": "", "model": "m", "cache": "c", "error": "ImportError: no"})
    assert "3 whole steps" in last_line(row(dense_fallbacks=3))


def test_reasons_are_said_once_without_the_names_of_nodes() -> None:
    reasons = ["l_keys: getitem_3 reads it whole", "l_keys: getitem_5 reads it whole", "k_1 does not come from a cache"]
    assert last_line(row(reasons=reasons)).endswith("| getitem reads it whole; k does not come from a cache |")
