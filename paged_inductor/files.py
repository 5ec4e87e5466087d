"""Files that appear all at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["replacing"]


@contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `target` when the block ends without an exception, all at once.

    Until it is complete it has no name, where the file system can do that (Linux' O_TMPFILE): a process that is killed
    leaves nothing then.
    """
    folder = os.fspath(target.parent)
    name: str | None = None
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except (AttributeError, OSError):
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{target.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if name is None:
                name = _named(file.fileno(), folder, target.name)
        os.replace(name, target)
    except BaseException:
        if name is not None:
            with suppress(FileNotFoundError):
                os.unlink(name)
        raise


def _named(handle: int, folder: str, name: str) -> str:
    """A name for a complete file that has none: one that nobody uses, as links do not replace files."""
    new = tempfile.mktemp(dir=folder, prefix=f".{name}.", suffix=".partial")
    at = os.open(folder, os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{handle}", new, src_dir_fd=at)  # with src_dir_fd, Python lets links be followed
    finally:
        os.close(at)
    return new
