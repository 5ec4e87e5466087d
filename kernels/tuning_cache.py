"""Tuned choices on disk: one JSON file per device, torch, triton and version of these kernels.

The folder is $PAGED_INDUCTOR_CACHE_DIR, else `paged_inductor` in $TORCHINDUCTOR_CACHE_DIR, $TRITON_CACHE_DIR,
$XDG_CACHE_HOME or ~/.cache. Deleting it loses nothing but the time that tuning took.
"""

import fcntl
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import triton

from .launch import LaunchConfig

__all__ = ["Stamp", "TuningCache", "cache_dir", "fingerprint"]

FORMAT = 1


def cache_dir() -> Path:
    """The folder of the tuned choices; it need not exist."""
    own = os.environ.get("PAGED_INDUCTOR_CACHE_DIR")
    if own:
        return Path(own)
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        if os.environ.get(variable):
            return Path(os.environ[variable]) / "paged_inductor"
    return Path.home() / ".cache" / "paged_inductor"


@cache
def fingerprint() -> str:
    """SHA-256 of the sources of all kernels: a choice is worth nothing to kernels that were edited since."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class Stamp:
    """What choices are good for: they are read only where all of it is equal."""

    device: str
    torch: str
    triton: str
    kernels: str

    @classmethod
    def of(cls, device: str) -> "Stamp":
        """Of this process, on the device of that name."""
        return cls(device, torch.__version__, triton.__version__, fingerprint())

    @property
    def file_name(self) -> str:
        words = (self.device, f"torch{self.torch}", f"triton{self.triton}", self.kernels[:12])
        return "-".join(re.sub(r"[^\w.+]+", "_", word) for word in words) + ".json"


class TuningCache:
    """The choices of one stamp, by key. Several processes may share the file: a store keeps what others stored.

    A file that cannot be read, or is not of this stamp and format, counts as empty: one warning, and the next store
    replaces it. A folder that cannot be written to is warned about once; the choices then last as long as the process.
    """

    def __init__(self, stamp: Stamp, folder: Path | None = None) -> None:
        self.stamp = stamp
        self.path = (folder or cache_dir()) / stamp.file_name
        self._choices: dict[str, LaunchConfig] | None = None
        self._warned = False

    def get(self, key: str) -> LaunchConfig | None:
        """The choice for `key`, if there is one. The file is read at the first call and at every store."""
        if self._choices is None:
            self._choices = self._read()
        return self._choices.get(key)

    def store(self, key: str, config: LaunchConfig) -> None:
        """Remember a choice, in the file if possible."""
        choices = {**(self._choices or {}), key: config}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _exclusive(self.path.with_suffix(".lock")):
                choices = {**(self._choices or {}), **self._read(), key: config}
                self._write(choices)
        except OSError as error:
            self._warn(f"cannot write {self.path} ({error}): tuned choices last as long as this process")
        self._choices = choices

    def __len__(self) -> int:
        if self._choices is None:
            self._choices = self._read()
        return len(self._choices)

    def _read(self) -> dict[str, LaunchConfig]:
        try:
            content = json.loads(self.path.read_bytes())
            if content["format"] != FORMAT or content["stamp"] != asdict(self.stamp):
                raise ValueError("it was made by another version, or for another device")
            return {key: _config(entry) for key, entry in content["choices"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._warn(f"ignoring {self.path} ({type(error).__name__}: {error}): static choices are used until tuned")
            return {}

    def _write(self, choices: Mapping[str, LaunchConfig]) -> None:
        """Whole or not at all, also for readers without a lock."""
        entries = {key: asdict(choices[key]) for key in sorted(choices)}
        content = {"format": FORMAT, "stamp": asdict(self.stamp), "choices": entries}
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(json.dumps(content, indent=1) + "\n")
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            from .._callers import users_stacklevel  # not above: see test_the_kernels_import_by_their_bare_name_too

            warnings.warn(f"paged_inductor: {message}", stacklevel=users_stacklevel())


def _config(entry: Mapping[str, int]) -> LaunchConfig:
    config = LaunchConfig(**entry)
    if any(not isinstance(value, int) or value < 0 for value in asdict(config).values()):
        raise ValueError(f"{entry} is no launch configuration")
    return config


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """One process at a time; where the file system knows no locks, whoever stores last wins."""
    with path.open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
