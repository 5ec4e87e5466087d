"""Launch configurations of the attention kernels, as data: the static choice first, then what tuning may try.

An entry is (tile_m, tile_n, num_warps, num_buffers). The first one that survives pruning uses no local memory
on any target; tests/kernels/test_kernel_aot.py holds this for representative problems.
"""

from collections.abc import Callable, Hashable, Sequence

from .autotune import bucket
from .launch import INTERPRETED, DeviceLimits, LaunchConfig
from .occupancy import Entry, fitting
from .problem import AttentionProblem
from .rounding import cdiv

MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 256
MOST_ROWS = 128  # of a tile

SMALL: tuple[Entry, ...] = ((32, 32, 4, 2), (16, 32, 4, 2), (16, 32, 8, 2), (16, 16, 4, 1))

# keyed by (element bytes, widest head dim at most)
PREFILL: dict[tuple[int, int], tuple[Entry, ...]] = {
    (4, 64): ((32, 32, 4, 2), (64, 32, 8, 2), (16, 32, 4, 2)),
    (4, 128): ((32, 16, 8, 2), (16, 16, 8, 2), (32, 16, 8, 1)),
    (4, 256): ((32, 16, 8, 2), (16, 32, 8, 2), (16, 16, 4, 2)),
    (2, 64): ((128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 1), *SMALL),
    (2, 128): ((128, 32, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2), *SMALL),
    (2, 256): ((64, 32, 8, 2), (64, 64, 8, 2), (128, 32, 8, 1), *SMALL),
    (4, 576): ((16, 16, 8, 1),),
    (2, 576): ((16, 32, 8, 1), (16, 16, 8, 1)),
}
PREFILL_MASK: tuple[Entry, ...] = ((64, 32, 8, 2), (64, 64, 8, 1), *SMALL)
# wgmma reads its operands from shared memory, which leaves registers for a wider tile
PREFILL_WGMMA_128: tuple[Entry, ...] = ((128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 1), *SMALL)
# before it, they come from registers; less is left where a tile's edges need some, too
PREFILL_MMA: dict[int, tuple[Entry, ...]] = {
    64: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 1), *SMALL),
    128: ((128, 32, 8, 2), (64, 64, 8, 2), *SMALL),
    256: ((64, 32, 8, 2), *SMALL),
}
PREFILL_MMA_EDGES: dict[int, tuple[Entry, ...]] = PREFILL_MMA | {
    64: ((64, 64, 8, 2), (64, 32, 4, 2), *SMALL),
    128: ((64, 64, 8, 2), (64, 32, 8, 2), *SMALL),
}
# tiles of 8 bits are converted in registers, of which Triton 3.6 takes more than later ones; keyed by the first
# architecture, then by the widest head dim
PREFILL_8BIT: dict[int, dict[int, tuple[Entry, ...]]] = {
    80: {64: ((64, 32, 4, 2), (128, 32, 8, 2), *SMALL), 128: ((64, 32, 8, 1), *SMALL), 256: PREFILL_MMA[256]},
    90: {64: PREFILL[2, 64], 128: ((128, 32, 8, 2), (64, 32, 4, 2), *SMALL), 256: PREFILL[2, 256]},
    100: {64: ((64, 32, 4, 2), (128, 32, 8, 2), *SMALL), 128: ((128, 32, 8, 2), *SMALL), 256: PREFILL[2, 256]},
}

# (tile_n, num_warps, num_buffers); tile_m follows from the packed rows
DECODE: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {
    (4, 256): ((32, 8, 2), (16, 4, 2), (16, 4, 1)),
    (2, 128): ((64, 4, 2), (64, 4, 1), (128, 8, 2), (32, 4, 3), (32, 4, 2)),
    (2, 256): ((32, 4, 2), (32, 8, 2), (64, 8, 2), (32, 4, 1)),
    (4, 576): ((16, 8, 1),),
    (2, 576): ((32, 8, 1), (16, 8, 1)),
}
DECODE_TALL: tuple[tuple[int, int, int], ...] = ((32, 8, 2), (64, 8, 2), (32, 4, 2), (32, 8, 1))


# ROCm converts 8-bit tiles in registers, of which half as many warps have twice as many each
LATENT_8BIT_ROCM: tuple[Entry, ...] = ((32, 32, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))


def prefill_candidates(problem: AttentionProblem, limits: DeviceLimits) -> Sequence[LaunchConfig]:
    """Configurations of the one-pass kernel for a problem."""
    return _remembered(_prefill_candidates, problem, problem.packed_rows, limits)


def decode_candidates(problem: AttentionProblem, limits: DeviceLimits) -> Sequence[LaunchConfig]:
    """Configurations of the split kernel for a problem."""
    return _remembered(_decode_candidates, problem, problem.packed_rows, limits)


def prefix_candidates(problem: AttentionProblem, limits: DeviceLimits) -> Sequence[LaunchConfig]:
    """Configurations of the pass over the shared prefix, whose tiles hold the queries of all rows."""
    return _remembered(_decode_candidates, problem, problem.packed_rows * problem.batch, limits)


Candidates = Callable[[AttentionProblem, int, DeviceLimits], Sequence[LaunchConfig]]
_known: dict[tuple[Hashable, ...], Sequence[LaunchConfig]] = {}


def _remembered(
    candidates: Candidates, problem: AttentionProblem, rows: int, limits: DeviceLimits
) -> Sequence[LaunchConfig]:
    """The candidates, which depend on a few facts of a problem only: to find them takes longer than a launch."""
    rows = bucket(rows, 16, MOST_ROWS)
    key = (
        candidates,
        INTERPRETED,
        rows,
        limits,
        problem.q.dtype,
        problem.k_arena.dtype,
        problem.head_dim,
        problem.v_head_dim,
        problem.v_is_k,
        problem.mask is not None,
        problem.window is not None or problem.chunk is not None,
    )
    if key not in _known:
        _known[key] = candidates(problem, rows, limits)
    return _known[key]


def _prefill_candidates(problem: AttentionProblem, rows: int, limits: DeviceLimits) -> Sequence[LaunchConfig]:
    itemsize, widest = _size(problem)
    entries = PREFILL[min(key for key in PREFILL if key[0] == itemsize and key[1] >= widest)]
    if _latent_8bit_rocm(problem, limits):
        entries = LATENT_8BIT_ROCM
    elif itemsize == 2 and widest <= 256:
        if problem.mask is not None:
            entries = PREFILL_MASK
        elif problem.k_scales is not None and limits.arch:
            space = PREFILL_8BIT[max(arch for arch in PREFILL_8BIT if arch <= max(80, limits.arch))]
            entries = space[min(dim for dim in space if dim >= widest)]
        elif 64 < widest <= 128 and limits.arch == 90:
            entries = PREFILL_WGMMA_128
        elif 0 < limits.arch < 90:
            space = PREFILL_MMA_EDGES if problem.window is not None or problem.chunk is not None else PREFILL_MMA
            entries = space[min(dim for dim in space if dim >= widest)]
        elif limits.arch == 0 and problem.k_scales is not None:
            entries = SMALL  # wider ones do not fit into registers
    return _configs(problem, rows, limits, entries)


def _decode_candidates(problem: AttentionProblem, rows: int, limits: DeviceLimits) -> Sequence[LaunchConfig]:
    itemsize, widest = _size(problem)
    tallest = 16 if itemsize == 4 else 64 if widest <= 256 else 32
    tile_m = bucket(rows, 16, tallest)
    shapes = DECODE[min(key for key in DECODE if key[0] == itemsize and key[1] >= widest)]
    if widest <= 256 and (tile_m == 64 or (itemsize == 2 and tile_m > 16 and problem.mask is not None)):
        shapes = DECODE_TALL
    entries = tuple((tile_m, *shape) for shape in shapes)
    if _latent_8bit_rocm(problem, limits):
        entries = tuple(entry for entry in LATENT_8BIT_ROCM if entry[0] == tile_m)
    elif limits.arch == 0 and problem.k_scales is not None:
        entries = tuple(entry for entry in entries if entry[1] < 128)  # spilled
    return _configs(problem, rows, limits, entries)


def choose_num_splits(problem: AttentionProblem, limits: DeviceLimits, tile_m: int) -> int:
    """Power-of-two splits that fill the device up to twice over and leave each split enough tokens."""
    programs = problem.batch * problem.num_kv_heads * cdiv(problem.packed_rows, tile_m)
    return _num_splits(programs, max(0, problem.span - problem.shared_prefix), limits)


def choose_prefix_splits(problem: AttentionProblem, limits: DeviceLimits, tile_m: int) -> int:
    """`choose_num_splits` of the pass over the shared prefix."""
    programs = problem.num_kv_heads * cdiv(problem.packed_rows * problem.batch, tile_m)
    return _num_splits(programs, problem.shared_prefix, limits)


def _num_splits(programs: int, tokens: int, limits: DeviceLimits) -> int:
    wanted = limits.processors * 2 // programs
    return 1 << (max(1, min(wanted, tokens // MIN_SPLIT_TOKENS, MAX_SPLITS)).bit_length() - 1)


def _latent_8bit_rocm(problem: AttentionProblem, limits: DeviceLimits) -> bool:
    itemsize, widest = _size(problem)
    return limits.arch == 0 and problem.k_scales is not None and itemsize == 2 and widest > 256


def _size(problem: AttentionProblem) -> tuple[int, int]:
    return problem.q.element_size(), max(problem.head_dim, problem.v_head_dim)


def _configs(
    problem: AttentionProblem, rows: int, limits: DeviceLimits, entries: tuple[Entry, ...]
) -> Sequence[LaunchConfig]:
    """Drop tiles more than half empty and what a processor has no room for; one choice if interpreted."""
    if INTERPRETED:
        return [LaunchConfig(tile_m=16, tile_n=16, num_warps=4, num_stages=1)]
    kept = [entry for entry in entries if entry[0] <= rows] or entries
    return [_config(entry, limits) for entry in fitting(problem, limits, kept)]


def _config(entry: Entry, limits: DeviceLimits) -> LaunchConfig:
    """A page's address comes from a load of its own: the CUDA pipeliner spends two stages on each buffer."""
    tile_m, tile_n, num_warps, num_buffers = entry
    num_stages = 2 * num_buffers + 1 if limits.arch else num_buffers
    return LaunchConfig(tile_m, tile_n, num_warps, num_stages)
