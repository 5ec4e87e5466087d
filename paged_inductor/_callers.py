"""Whose line a warning points to."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

__all__ = ["users_stacklevel"]

_OURS = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__))
_GENERATED = ("<entry of a paged model>", "<eval_with_key>")
_CODE_OF_INDUCTOR = "torch._inductor."  # how its modules' names begin, whose files lie in a cache


def users_stacklevel() -> int:
    """The `stacklevel` with which a `warnings.warn` of the caller points to the innermost line that is neither torch's
    nor this package's; how many frames these are depends on the operation. If there is none, the outermost line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not _is_users(frame):
        level, frame = level + 1, frame.f_back
    return level


def _is_users(frame: FrameType) -> bool:
    if str(frame.f_globals.get("__name__", "")).startswith(_CODE_OF_INDUCTOR):
        return False
    return not frame.f_code.co_filename.startswith((*_OURS, *_GENERATED))
