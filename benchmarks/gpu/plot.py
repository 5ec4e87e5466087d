"""A picture of achieved against peak."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .bench import Cell

__all__ = ["draw"]


def draw(cells: Sequence[Cell], device: str, path: Path) -> None:
    """Decode by tokens in flight and prefill by queries, each as a share of what the data sheet allows."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: pip install matplotlib")
        return

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, section in zip(axes, ("decode", "prefill")):
        measured = [c for c in cells if c["section"] == section and c["status"] == "measured" and c["of_floor"]]
        kinds = dict.fromkeys((c["heads"], c["kv_heads"], c["head_dim"], c.get("kv", c["dtype"])) for c in measured)
        for heads, kv_heads, dim, kv in kinds:
            mine = [
                (c["batch"] * c.get("queries", c["context"]), c["of_floor"])
                for c in measured
                if (c["heads"], c["kv_heads"], c["head_dim"], c.get("kv", c["dtype"])) == (heads, kv_heads, dim, kv)
            ]
            axis.plot(*zip(*sorted(mine)), "o-", label=f"{heads}/{kv_heads} x {dim}, {kv}")
        axis.axhline(1.0, color="grey", linestyle=":")
        axis.set(title=f"{section} on {device}", ylim=(0, 1.1))
        axis.set_xlabel("tokens in flight" if section == "decode" else "queries of all rows")
        if measured:
            axis.set_xscale("log", base=2)
            axis.legend(fontsize="small")
        else:
            axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center")
    axes[0].set_ylabel("achieved / data sheet")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
