"""The GPU tests without a GPU: `python -m tests.emulated [pytest's arguments]`; by default `-m gpu tests/gpu`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from .build import build_libraries


def main() -> None:
    """Build the libraries, and run pytest with them in the place of CUDA's."""
    folder = Path(os.environ.get("EMULATED_GPU", Path(tempfile.gettempdir()) / "paged_inductor_emulated"))
    libraries = build_libraries(folder)
    os.environ |= {"EMULATED_GPU": str(folder), "LD_PRELOAD": ":".join(map(str, libraries))}
    arguments = sys.argv[1:] or ["-m", "gpu", "tests/gpu"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.emulated.plugin", *arguments]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
