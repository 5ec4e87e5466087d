"""What a launch configuration takes of a processor, estimated without compiling it: prunes the tuner's candidates."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from .launch import DeviceLimits
from .problem import AttentionProblem

Entry = tuple[int, int, int, int]  # tile_m, tile_n, num_warps, num_buffers
T = TypeVar("T")

MIN_RESIDENT_WARPS = 8  # two for each of a processor's four schedulers: one waits for memory, the other computes
ADDRESS_REGISTERS = 56  # pointers, masks, operands: the least that ptxas was seen to use beside the tiles


def shared_bytes(problem: AttentionProblem, entry: Entry) -> int:
    """Shared memory of the Q tile and of the buffers of K and V."""
    tile_m, tile_n, _, num_buffers = entry
    dims = sum(problem.head_tiles)
    buffered = dims if problem.v_is_k else dims + problem.value_tile
    buffers = num_buffers * tile_n * buffered * problem.k_arena.element_size()
    return tile_m * dims * problem.q.element_size() + buffers


def registers(problem: AttentionProblem, entry: Entry, limits: DeviceLimits) -> int:
    """Registers per thread: the float32 accumulator, the scores and the weights made of them.

    A lower bound, because a configuration that is dropped here is never timed.
    """
    tile_m, tile_n, num_warps, _ = entry
    tiles = tile_m * problem.value_tile + tile_m * tile_n
    return ADDRESS_REGISTERS + tiles // (num_warps * limits.warp_threads)


def resident_warps(problem: AttentionProblem, entry: Entry, limits: DeviceLimits) -> int:
    """Warps that one processor holds at a time, if nothing but this kernel runs."""
    num_warps = entry[2]
    threads = num_warps * limits.warp_threads
    programs = min(
        limits.shared_bytes // max(1, shared_bytes(problem, entry)),
        limits.registers // (registers(problem, entry, limits) * threads),
        limits.warps // num_warps,
    )
    return programs * num_warps


def fitting(problem: AttentionProblem, limits: DeviceLimits, entries: Sequence[Entry]) -> list[Entry]:
    """The entries that a processor has shared memory and registers for, and of those the ones that leave enough warps
    resident to hide the latency of memory. Never empty: the least demanding of the entries is always left."""
    kept = _those(entries, lambda entry: shared_bytes(problem, entry) <= limits.shared_bytes)
    if not kept:
        return [min(entries, key=lambda entry: shared_bytes(problem, entry))]
    kept = _those(kept, lambda entry: registers(problem, entry, limits) <= limits.thread_registers) or kept
    return _those(kept, lambda entry: resident_warps(problem, entry, limits) >= MIN_RESIDENT_WARPS) or kept


def _those(entries: Sequence[T], holds: Callable[[T], bool]) -> list[T]:
    return [entry for entry in entries if holds(entry)]
