"""Amounts as people read them."""

from __future__ import annotations

__all__ = ["duration", "size"]


def size(count: float) -> str:
    """Bytes, in the unit that suits them: "720.0 KiB", "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def duration(seconds: float) -> str:
    """A time: "1.50 s", "9.00 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
