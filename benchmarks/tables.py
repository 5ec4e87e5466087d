"""Put the tables of docs/performance.md together from benchmarks/results.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .harness import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"


def table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def goal(cell: dict[str, Any]) -> float:
    if cell["context"] < 2048:
        return 1.0
    return 0.8 if cell["dtype"] == "float32" else 0.5


def decode_step(result: dict[str, Any]) -> str:
    rows = []
    for cell in result["cells"]:
        name = f"{cell['batch']} × {cell['context']}"
        times = [cell[f"{form}_ms"] for form in ("eager", "compiled", "static", "paged")]
        rows.append([cell["dtype"], name, f"**{cell['ratio']:.2f}**", f"≤ {goal(cell)}", cell["best"], *times])
    header = ["dtype", "batch × context", "paged ÷ best", "goal", "best", "eager ms", "compiled ms", "static ms"]
    return table([*header, "paged ms"], rows)


def kv_dtype(result: dict[str, Any]) -> str:
    rows = []
    for cell in result["cells"]:
        name = f"{cell['batch']} × {cell['context']}"
        figures = [cell[fact] for fact in ("bytes", "error", "none_ms", "ms")]
        rows.append([cell["kv_dtype"], name, f"**{cell['ratio']:.2f}**", *figures])
    header = ["kv_dtype", "batch × context", "step ÷ float32 pages", "bytes ÷ float32 pages", "error of the logits"]
    return table([*header, "float32 ms", "ms"], rows)


def attention_cpu(result: dict[str, Any]) -> str:
    cells = [cell for cell in result["cells"] if "batch" in cell]
    columns = list(dict.fromkeys((cell["batch"], cell["context"]) for cell in cells))
    kinds = dict.fromkeys((c["heads_q"], c["heads_kv"], c["head_dim"], c["dtype"]) for c in cells)
    rows = []
    for kind in kinds:
        mine = {
            (c["batch"], c["context"]): f"{c['ratio']:.2f}"
            for c in cells
            if (c["heads_q"], c["heads_kv"], c["head_dim"], c["dtype"]) == kind
        }
        label = f"{kind[0]}/{kind[1]} × {kind[2]}, {kind[3]}"
        rows.append([label, f"≤ {1.0 if kind[2] == 64 else 1.1}", *(mine[column] for column in columns)])
    return table(["heads × dim, dtype", "goal", *(f"{b} × {c}" for b, c in columns)], rows)


def ragged(result: dict[str, Any]) -> str:
    (cell,) = (cell for cell in result["cells"] if cell.get("case") == "ragged")
    return f"Rows of {cell['lengths']} tokens against 16 rows of {cell['even']}: **{cell['ratio']:.2f}** of the time."


def host_step(result: dict[str, Any]) -> str:
    rows = [[c["layers"], c["rows"], c["context"], c["us"], c["bound_us"]] for c in result["cells"]]
    return table(["layers", "rows", "context", "µs", "goal µs"], rows)


def host_launch(result: dict[str, Any]) -> str:
    rows = [[c["rows"], c["write_us"], c["attention_us"]] for c in result["cells"]]
    return table(["rows", "K and V written µs", "attention µs"], rows)


def memory(result: dict[str, Any]) -> str:
    rows = [
        [c["lengths"], c["mean"], f"**{c['held_over_real']}**", c["arenas_over_real"], c["reserved_over_real"]]
        for c in result["cells"]
    ]
    header = ["lengths", "mean", "blocks ÷ real tokens", "arenas ÷ real tokens", "a buffer of the longest length each"]
    return table(header, rows)


def static_caches(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{c['batch']} × {c['context']} of {c['capacity']}",
            f"**{c['ratio']:.2f}**",
            "≤ 1.1",
            f"{c['dense_ratio']:.2f}",
            *(c[f"{form}_ms"] for form in ("dynamic", "static", "paged dynamic", "paged static")),
            c["held_over_tokens"],
        ]
        for c in result["cells"]
        if c["case"] == "static"
    ]
    header = ["batch × tokens of capacity", "paged static ÷ paged dynamic", "goal", "dense static ÷ dense dynamic"]
    times = ["dense dynamic ms", "dense static ms", "paged dynamic ms", "paged static ms"]
    return table([*header, *times, "blocks ÷ real tokens"], rows)


def windows(result: dict[str, Any]) -> str:
    rows = [
        [c["case"], f"**{c['ratio']:.2f}**", f"{c['dense_ratio']:.2f}"]
        + [c[f"{side} {context}_ms"] for side in ("paged", "dense") for context in (1024, 8192)]
        for c in result["cells"]
        if c["case"].startswith("window")
    ]
    header = ["cache", "paged, 8192 ÷ 1024", "dense, 8192 ÷ 1024", "paged 1024 ms", "paged 8192 ms"]
    return table([*header, "dense 1024 ms", "dense 8192 ms"], rows)


def pass_time(result: dict[str, Any]) -> str:
    rows = [
        [c["cache"], c["graphs"], f"**{c['ratio']:.1%}**", "≤ 5%", c["passes_s"], c["torch_compile_s"]]
        for c in result["cells"]
    ]
    header = ["cache", "graphs", "passes ÷ torch.compile", "goal", "passes s", "torch.compile s"]
    return table(header, rows)


def swapping(result: dict[str, Any]) -> str:
    tiers = [cell for cell in result["cells"] if "tier" in cell]
    (quotas,) = (cell for cell in result["cells"] if "added_us" in cell)
    rows = []
    for cell in tiers:
        for way, plain in (("out", "write"), ("back", "read")):
            speeds = (cell[f"{way}_GiB_s"], cell[f"{plain}_GiB_s"])
            rows.append([f"{cell['tier']}, {way}", f"**{cell[f'{way}_share']:.2f}**", "≥ 0.8", *speeds])
    header = ["", "speed ÷ that of a plain copy", "goal", "swap GiB/s", "plain GiB/s"]
    added, append = quotas["added_us"], quotas["append_us"]
    text = f"Quota and priority add **{added} µs** to an append of {append} µs (goal: below 5)."
    return f"{table(header, rows)}\n\n{text}"


def streaming(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{c['prompt']} tokens, {c['tier']}",
            f"**{c['streamed_over_all_first']:.2f}**",
            c["added_ms_all_first"],
            c["added_ms_streamed"],
            c["in_place_ms"],
        ]
        for c in result["cells"]
    ]
    header = ["", "streamed ÷ all first", "all first adds ms", "streamed adds ms", "in place ms"]
    return table(header, rows)


def turns(result: dict[str, Any]) -> str:
    rows = [
        [
            c["tier"],
            f"**{c['first_step_ahead_over_on_demand']:.2f}**",
            c["round_ahead_over_on_demand"],
            c["first_step_ms"],
        ]
        for c in result["cells"]
        if "tier" in c
    ]
    header = ["", "first step of a turn, ahead ÷ on demand", "a whole round, ahead ÷ on demand", "on demand ms"]
    (c,) = (cell for cell in result["cells"] if "threads" in cell)
    text = (
        f"{c['threads']} threads under a budget for {c['budget_for']}: **{c['time_over_one_after_the_other']}** times "
        f"the time of the same work one after the other; a decode step {c['step_p50_ms']} ms (P50), "
        f"{c['step_p95_ms']} ms (P95) and {c['step_p99_ms']} ms (P99), against "
        f"{c['one_after_the_other_step_ms']} ms alone; {c['blocks_swapped_in']} blocks came back from host memory."
    )
    return f"{table(header, rows)}\n\n{text}"


def prefixes(result: dict[str, Any]) -> str:
    (cell,) = result["cells"]
    figures = [
        (
            "KV bytes ÷ (one copy of the prompt + what is each user's own)",
            "kv_bytes_over_one_copy_and_suffixes",
            "≤ 1.15",
        ),
        ("time to first token, users 2 to 16 ÷ a full prefill", "later_first_token_over_full_prefill", "≤ 0.15"),
        ("µs to find a block of a cached prompt", "lookup_us_per_block", "≤ 2"),
        ("naming of new blocks ÷ a step, with no hits", "naming_share_of_a_step", "≤ 0.01"),
    ]
    return table(
        ["figure", "measured", "goal"], [[text, f"**{cell[name]:.3g}**", goal] for text, name, goal in figures]
    )


def facts(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"{machine['processor']} ({machine['cores']} cores, {machine['capability']}), torch {machine['torch']}, "
        f"Python {machine['python']}, OMP_NUM_THREADS={machine['OMP_NUM_THREADS']}, {machine['date']}."
    )


def main() -> None:
    results = {
        name: json.loads((RESULTS / f"{name}.json").read_text())
        for name in (
            "decode_step",
            "attention_cpu",
            "host_step",
            "host_launch",
            "memory",
            "kinds",
            "pass_time",
            "prefixes",
            "swapping",
            "streaming",
            "turns",
            "kv_dtype",
        )
    }
    parts = {
        "machine": facts(results["decode_step"]),
        "decode_step": decode_step(results["decode_step"]),
        "attention_cpu": attention_cpu(results["attention_cpu"]),
        "ragged": ragged(results["attention_cpu"]),
        "host_step": host_step(results["host_step"]),
        "host_launch": host_launch(results["host_launch"]),
        "memory": memory(results["memory"]),
        "static_caches": static_caches(results["kinds"]),
        "windows": windows(results["kinds"]),
        "pass_time": pass_time(results["pass_time"]),
        "prefixes": prefixes(results["prefixes"]),
        "swapping": swapping(results["swapping"]),
        "streaming": streaming(results["streaming"]),
        "turns": turns(results["turns"]),
        "kv_dtype": kv_dtype(results["kv_dtype"]),
    }
    text = PAGE.read_text()
    for name, part in parts.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda match, part=part: match[1] + part + "\n" + match[2], text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{PAGE} has {count} places for {name}, not one")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
