"""Launch configurations of the attention kernels, as data: the static choice first, then what tuning may try.

An entry is (tile_m, tile_n, num_warps, num_buffers). The first one that survives pruning uses no local memory
on sm_80 and sm_90; tests/kernels/test_kernel_aot.py holds this for representative problems.
"""

import triton

from .autotune import bucket
from .launch import INTERPRETED, DeviceLimits, LaunchConfig
from .occupancy import Entry, fitting
from .problem import AttentionProblem

MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 256

SMALL: tuple[Entry, ...] = ((32, 32, 4, 2), (16, 32, 4, 2), (16, 32, 8, 2), (16, 16, 4, 1))

# keyed by (element bytes, widest head dim at most)
PREFILL: dict[tuple[int, int], tuple[Entry, ...]] = {
    (4, 64): ((32, 32, 4, 2), (64, 32, 8, 2), (16, 32, 4, 2)),
    (4, 128): ((16, 32, 8, 2), (32, 16, 4, 2), (32, 32, 8, 2)),
    (4, 256): ((32, 16, 8, 2), (16, 32, 8, 2), (16, 16, 4, 2)),
    (2, 64): ((128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 1), *SMALL),
    (2, 128): ((128, 32, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2), *SMALL),
    (2, 256): ((64, 32, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2), *SMALL),
}
PREFILL_MASK: tuple[Entry, ...] = ((64, 32, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2), *SMALL)
# wgmma reads its operands from shared memory, which leaves registers for a wider tile
PREFILL_WGMMA_128: tuple[Entry, ...] = ((128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 1), *SMALL)

# (tile_n, num_warps, num_buffers); tile_m follows from the packed rows
DECODE: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {
    (4, 256): ((32, 8, 2), (16, 4, 2), (16, 4, 1)),
    (2, 128): ((64, 4, 2), (64, 4, 1), (128, 8, 2), (32, 4, 3), (32, 4, 2)),
    (2, 256): ((32, 4, 2), (32, 8, 2), (64, 8, 2), (32, 4, 1)),
}
DECODE_TALL: tuple[tuple[int, int, int], ...] = ((32, 8, 2), (64, 8, 2), (32, 4, 2), (32, 8, 1))


def prefill_candidates(problem: AttentionProblem, limits: DeviceLimits) -> list[LaunchConfig]:
    """Configurations of the one-pass kernel for a problem."""
    itemsize, widest = _size(problem)
    entries = PREFILL[min(key for key in PREFILL if key[0] == itemsize and key[1] >= widest)]
    if itemsize == 2 and problem.mask is not None:
        entries = PREFILL_MASK
    elif itemsize == 2 and 64 < widest <= 128 and limits.arch == 90:
        entries = PREFILL_WGMMA_128
    return _configs(problem, limits, entries)


def decode_candidates(problem: AttentionProblem, limits: DeviceLimits) -> list[LaunchConfig]:
    """Configurations of the split kernel for a problem."""
    itemsize, widest = _size(problem)
    tile_m = bucket(problem.packed_rows, 16, 16 if itemsize == 4 else 64)
    shapes = DECODE[min(key for key in DECODE if key[0] == itemsize and key[1] >= widest)]
    if tile_m == 64 or (itemsize == 2 and tile_m > 16 and problem.mask is not None):
        shapes = DECODE_TALL
    return _configs(problem, limits, tuple((tile_m, *shape) for shape in shapes))


def choose_num_splits(problem: AttentionProblem, limits: DeviceLimits, tile_m: int) -> int:
    """Power-of-two splits that fill the device up to twice over and leave each split enough tokens."""
    programs = problem.batch * problem.num_kv_heads * triton.cdiv(problem.packed_rows, tile_m)
    wanted = limits.processors * 2 // programs
    useful = problem.span // MIN_SPLIT_TOKENS
    return 1 << (max(1, min(wanted, useful, MAX_SPLITS)).bit_length() - 1)


def _size(problem: AttentionProblem) -> tuple[int, int]:
    return problem.q.element_size(), max(problem.head_dim, problem.v_head_dim)


def _configs(problem: AttentionProblem, limits: DeviceLimits, entries: tuple[Entry, ...]) -> list[LaunchConfig]:
    """Drop tiles more than half empty and what a processor has no room for; one choice if interpreted."""
    if INTERPRETED:
        return [LaunchConfig(tile_m=16, tile_n=16, num_warps=4, num_stages=1)]
    rows = bucket(problem.packed_rows, 16, 128)
    kept = [entry for entry in entries if entry[0] <= rows] or entries
    return [_config(entry, limits) for entry in fitting(problem, limits, kept)]


def _config(entry: Entry, limits: DeviceLimits) -> LaunchConfig:
    """A page's address comes from a load of its own: the CUDA pipeliner spends two stages on each buffer."""
    tile_m, tile_n, num_warps, num_buffers = entry
    num_stages = 2 * num_buffers + 1 if limits.arch else num_buffers
    return LaunchConfig(tile_m, tile_n, num_warps, num_stages)
