"""Process-wide options: `configure(...)` and the `PAGED_INDUCTOR_*` environment variables."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from ._errors import ConfigurationError
from ._layout import KV_DTYPES

__all__ = [
    "Config",
    "config",
    "configure",
    "on_change",
    "parse_bytes",
    "require_block_size",
    "require_bool",
    "require_choice",
    "require_kv_dtype",
    "require_port",
    "reset_config",
]

MATERIALIZE_CHOICES = ("warn", "error", "silent")
_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Config:
    """The options in force.

    kv_budget: bytes that all arenas of the process may take (but for one empty block of each cache group), or None
        for half of the memory that is free when the first cache is made (of the device the cache lives on).
    block_size: tokens in a block of the caches that are made by graphs compiled from now on; a power of two from 8 to
        256.
    on_materialize: what to do when an operator, as `.mean()`, has to copy pages into a dense tensor: "warn" once per
        operator, "error" (raise `MaterializationError`), or "silent". It is counted in `stats()` each time. Values that
        a user asks for (`print`, `.tolist()`, `.numpy()`, `.dense()`, `torch.save`) are counted only, always.
    swap_host: bytes of host memory that the tokens of caches may take that are not in use when the budget is short.
        None: half of the free memory for caches on other devices than the CPU, 0 for caches on the CPU.
    swap_disk: bytes of disk for the same, when host memory is used up; 0 by default: tokens stay in memory.
    swap_dir: folder of the swap files, which have no names and vanish with the process. None: the system's temporary
        folder.
    metrics_port: where to answer Prometheus' scrapes on this machine, from the first compiled graph on; None: nowhere.
        See `serve_metrics`.
    sanitize: debug mode: freed blocks are overwritten, every access is checked, and leaks are reported at exit (slow).
    deterministic: on GPUs, the attention of a row depends on that row alone, to the bit, and not on what else is in its
        batch (with a mask that was not proven, on the logical length, too). On the CPU this holds for one query anyhow,
        and not for several. It says nothing of a model's other layers: matrix products may depend on the batch size.
    kv_dtype: what keys and values are rounded to in pages, which take about half the memory of 16-bit ones then:
        "fp8_e4m3" or "int8", with a scale for each token and head. None: they are stored as they are. For caches in
        float32, float16 or bfloat16 that are made by graphs compiled from now on.
    triton_on_cpu: run the Triton kernels on CPU tensors; needs TRITON_INTERPRET=1 (slow; for tests of the kernels).
    """

    kv_budget: int | None = None
    block_size: int = 16
    on_materialize: str = "warn"
    swap_host: int | None = None
    swap_disk: int = 0
    swap_dir: str | None = None
    metrics_port: int | None = None
    sanitize: bool = False
    deterministic: bool = False
    kv_dtype: str | None = None
    triton_on_cpu: bool = False


def parse_bytes(value: int | str, name: str = "kv_budget") -> int:
    """Bytes for the option `name`, from an int or a text as "8GiB", "512 MiB", "2GB".

    Raises `ConfigurationError` for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise ConfigurationError(
            f"{name}={value!r} is not an amount of memory: give a positive number of bytes, "
            'a text as "8GiB" or "512MiB", or None for the default'
        )
    return int(float(match[1]) * unit)


def _bytes_or_zero(value: int | str | None, name: str) -> int:
    return 0 if value is None or (value == 0 and not isinstance(value, bool)) else parse_bytes(value, name)


def _require_folder(value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.path.isdir(value) or not os.access(value, os.W_OK):
        raise ConfigurationError(
            f"swap_dir={value!r} is not a folder that can be written to: make it, or choose another"
        )
    return os.fspath(value)  # type: ignore[return-value]


def require_block_size(value: Any) -> int:
    """`value`, if it may be a block size; else raises `ConfigurationError`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 8 <= value <= 256 or value & (value - 1):
        raise ConfigurationError(
            f"block_size={value!r} is not allowed: choose a power of two from 8 to 256 "
            "(16 wastes the least memory, 128 suits long contexts on GPUs)"
        )
    return value


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value`, if it is one of `choices`; else raises `ConfigurationError` for the option `name`."""
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} is not allowed: choose one of {', '.join(map(repr, choices))}")
    return value


def require_kv_dtype(value: Any) -> str | None:
    """`value`, if it may be a `kv_dtype`; "none" is None. Else raises `ConfigurationError`."""
    return None if value in (None, "none") else require_choice("kv_dtype", value, tuple(KV_DTYPES))


def require_bool(name: str, value: Any) -> bool:
    """`value` as a bool, if it is one or a text that says one; else raises `ConfigurationError` for `name`."""
    text = str(value).lower()
    if text not in ("1", "true", "yes", "0", "false", "no"):
        raise ConfigurationError(f"{name}={value!r} is not allowed: choose True or False")
    return text in ("1", "true", "yes")


def require_port(value: Any) -> int:
    """`value` as a TCP port, if it is one or a text that says one; else raises `ConfigurationError`."""
    text = str(value)
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 65535:
        raise ConfigurationError(f"port {value!r} is not allowed: choose a number from 1 to 65535")
    return int(text)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "kv_budget": lambda value: None if value is None else parse_bytes(value),
    "block_size": require_block_size,
    "swap_host": lambda value: None if value is None else _bytes_or_zero(value, "swap_host"),
    "swap_disk": lambda value: _bytes_or_zero(value, "swap_disk"),
    "swap_dir": lambda value: None if value is None else _require_folder(value),
    "on_materialize": lambda value: require_choice("on_materialize", value, MATERIALIZE_CHOICES),
    "metrics_port": lambda value: None if value is None else require_port(value),
    "sanitize": lambda value: require_bool("sanitize", value),
    "deterministic": lambda value: require_bool("deterministic", value),
    "kv_dtype": lambda value: require_kv_dtype(value),
    "triton_on_cpu": lambda value: require_bool("triton_on_cpu", value),
}
_NUMBERS = ("kv_budget", "block_size", "swap_host", "swap_disk")
OPTION_NAMES = tuple(field.name for field in fields(Config))


def _from_environment() -> Config:
    values: dict[str, Any] = {}
    for name in OPTION_NAMES:
        text = os.environ.get(f"PAGED_INDUCTOR_{name.upper()}")
        if text is not None:
            value: Any = int(text) if text.isdigit() and name in _NUMBERS else text
            values[name] = _PARSERS[name](value)
    return Config(**values)


_lock = threading.Lock()
_listeners: list[Callable[[Config], object]] = []
_current: Config | None = None


def config() -> Config:
    """The options in force. The environment is read at the first call."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = _from_environment()
    return _current


def configure(**options: Any) -> Config:
    """Change process-wide options; returns all options now in force (see `Config` for names and values).

    `block_size`, `kv_dtype` and `triton_on_cpu` take effect for graphs compiled from now on, the others at once. An
    unknown name or a value outside its range raises `ConfigurationError` and changes nothing.
    """
    global _current
    for name in options:
        if name not in OPTION_NAMES:
            raise ConfigurationError(f"unknown option {name!r}: the options are {', '.join(OPTION_NAMES)}")
    parsed = {name: _PARSERS[name](value) for name, value in options.items()}
    current = config()
    with _lock:
        _current = changed = replace(current, **parsed)
    _tell(changed)
    return changed


def reset_config() -> None:
    """Forget `configure` calls; the environment is read again."""
    global _current
    with _lock:
        _current = None
    with suppress(ConfigurationError):  # a bad environment is complained about where an option is next needed
        _tell(_from_environment())


def on_change(listener: Callable[[Config], object]) -> None:
    """Call `listener` with the options in force: now, and whenever they change."""
    _listeners.append(listener)
    listener(config())


def _tell(options: Config) -> None:
    for listener in _listeners:
        listener(options)
