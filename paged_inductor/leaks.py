"""Caches that are still alive: `check_leaks()`, and what the sanitizer reports when the process ends."""

from __future__ import annotations

import atexit
import gc
import sys
from dataclasses import dataclass

from ._config import config
from ._errors import SanitizerError
from .runtime import CacheGroup, manager
from .runtime.sanitizer import Stack, shown
from .runtime.view import Holding

__all__ = ["Leak", "check_leaks"]

_MOST = 10


@dataclass(frozen=True)
class Leak:
    """A view of a cache that is alive. label: the program's. tokens, bytes: what it sees, shared blocks included.
    stack: where it was made, innermost frame first; None if the sanitizer was off then."""

    label: str
    tenant: str
    tokens: int
    bytes: int
    stack: Stack | None

    def __str__(self) -> str:
        what = f"{self.tokens} tokens of {self.label} (tenant {self.tenant!r}, {self.bytes:,} B)"
        return f"{what}, made at\n{shown(self.stack)}"


def check_leaks() -> None:
    """Prove that no cache is alive, after collecting garbage. Raises `SanitizerError` naming those that are, largest
    first; with PAGED_INDUCTOR_SANITIZE=1, also where they were made. Its `leaks` lists them all."""
    found = _alive()
    if found:
        raise SanitizerError(_report(found), found)


def _alive() -> list[Leak]:
    gc.collect()
    runtime = manager()
    with runtime.locked():
        found = [_leak(group, holding) for group in runtime.groups for holding in group.holdings.values()]
    return sorted(found, key=lambda leak: -leak.bytes)


def _leak(group: CacheGroup, holding: Holding) -> Leak:
    blocks = {
        block
        for row, seen in zip(holding.rows, holding.lengths)
        for block in row.blocks[: -(-seen // group.block_size)]
    }
    size = len(blocks) * group.block_bytes
    return Leak(holding.label, holding.tenant.name, sum(holding.lengths), size, holding.stack)


def _report(found: list[Leak]) -> str:
    lines = [f"{len(found)} cache view(s) are still alive:", *(str(leak) for leak in found[:_MOST])]
    if len(found) > _MOST:
        lines.append(f"and {len(found) - _MOST} more")
    if any(leak.stack is None for leak in found):
        lines.append("set PAGED_INDUCTOR_SANITIZE=1 before the program starts to see where they were made")
    return "\n".join(lines)


@atexit.register
def _at_exit() -> None:
    if config().sanitize and (found := _alive()):
        print(f"paged_inductor sanitizer: {_report(found)}", file=sys.stderr)
