"""How much memory a device has free."""

from __future__ import annotations

import os

import torch

__all__ = ["free_bytes", "is_out_of_memory"]


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on `device` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # no procfs (some containers): fall through to what POSIX knows
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed because there is no memory (torch's one for CPUs raises no type of its own)."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
