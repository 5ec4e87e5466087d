"""What the names of tokens are made of: ids, and whatever else decides their keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import zip_longest
from struct import pack
from typing import Any

import torch
from torch import Tensor

from .runtime import Tokens

__all__ = ["Windows", "group_root", "marked", "row_tokens", "window_marks", "with_windows"]

Windows = tuple[int | None, ...]
"""Of each attention, see `RowNames`."""


def group_root(root: bytes, g: int) -> bytes:
    """What names of blocks in a graph's group of place `g` begin with: groups of equal layers have one pool."""
    return root if g == 0 else sha256(root + g.to_bytes(4, "little")).digest()


def window_marks(before: Windows, windows: Windows, old: int) -> dict[int, bytes] | None:
    """What windows make of tokens: by position, of the first token from which one hides anything. before: windows of
    the first `old` tokens; None if they are others."""
    marks: dict[int, bytes] = {}
    if before != windows:
        for n, (known, window) in enumerate(zip_longest(before, windows)):
            if known == window:
                continue
            if known is not None or window is None or window < old:
                return None
            marks[window] = marks.get(window, b"") + pack("<cH", b"w", n)
    return marks


def with_windows(tokens: Tokens, windows: Windows) -> Tokens:
    """The tokens of a whole prompt whose attentions have these windows."""
    marks = window_marks((), windows, 0)
    assert marks is not None
    return replace(tokens, deviations=marked(tokens.deviations, marks, 0), windows=windows)


def marked(deviations: Mapping[int, bytes], marks: Mapping[int, bytes], old: int) -> Mapping[int, bytes]:
    """Deviations by position in a call, and marks by position in the row."""
    if not marks:
        return deviations
    found = dict(deviations)
    for at, mark in marks.items():
        found[at - old] = found.get(at - old, b"") + mark
    return found


def row_tokens(
    ids: Tensor,
    positions: Sequence[Tensor],
    others: Sequence[Tensor],
    mask: Tensor | None,
    old: int,
    static: bool = False,
) -> list[Tokens] | None:
    """The tokens of each row of `ids` [B, S], of which the first is token `old` of its row; None if the mask
    [B or 1, old + S] is of another size, or not made of ones and zeros. positions, others: [B or 1, S] or [S]. static:
    the mask may be longer, or of truth values [B or 1, 1, S, old + S or more]; None, too, if these show a token another
    one that is behind it, or hide a token from some only."""
    rows = ids.tolist()
    count = ids.shape[1]
    usual = list(range(old, old + count))
    found: list[dict[int, bytes]] = [{} for _ in rows]
    for n, values in enumerate(positions):
        for deviations, own in zip(found, _by_row(values, len(rows))):
            if own != usual:
                for at, (value, expected) in enumerate(zip(own, usual)):
                    if value != expected:
                        deviations[at] = deviations.get(at, b"") + pack("<cBq", b"p", n, value - expected)
    for n, values in enumerate(others):
        for deviations, own in zip(found, _by_row(values, len(rows))):
            for at, value in enumerate(own):
                deviations[at] = deviations.get(at, b"") + pack("<cBq", b"o", n, int(value))
    hidden: list[list[int]] = [[] for _ in rows]
    if mask is not None and static:
        mask = _columns(mask, old, count)
        if mask is None:
            return None
    if mask is not None:
        if mask.dim() != 2 or mask.shape[1] != old + count:
            return None
        shown = mask == 1
        if not bool(shown.all()):
            if bool((mask[~shown] != 0).any()):
                return None
            for at, row in enumerate(shown.tolist() * (len(rows) if mask.shape[0] == 1 else 1)):
                hidden[at] = [k for k, seen in enumerate(row) if not seen]
                for k in hidden[at]:
                    if k >= old:
                        found[at][k - old] = found[at].get(k - old, b"") + b"h"
    return [Tokens(*each) for each in zip(rows, found, hidden)]


def _columns(mask: Tensor, old: int, count: int) -> Tensor | None:
    """Which of a row's first `old + count` tokens a mask shows [B or 1, old + count]; None if it does not show them to
    all that come behind, or shows anything else."""
    if mask.dim() != 4:
        return mask[:, : old + count]
    if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[2] != count or mask.shape[3] < old + count:
        return None
    seen, last = mask[:, 0], mask[:, 0, -1:]
    causal = torch.ones(count, mask.shape[3], dtype=torch.bool, device=mask.device).tril_(old)
    return last[:, 0, : old + count] if torch.equal(seen, last & causal) else None


def _by_row(values: Tensor, count: int) -> list[list[Any]]:
    rows = values.tolist()
    if values.dim() == 1:
        rows = [rows]
    return rows if len(rows) == count else rows * count
