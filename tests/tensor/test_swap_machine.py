"""The tensor machine with swapping: caches go to host memory and to disk, and come back, in the middle of
everything."""

from __future__ import annotations

import errno
import os
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import rule

from paged_inductor import configure, trim
from paged_inductor.runtime import manager

from .test_tensor_machine import TensorMachine

PLENTY = 2**30


class SwapMachine(TensorMachine):
    """Swapping changes nothing that a handle shows, whatever the tier and whatever goes wrong on the way out."""

    def __init__(self) -> None:
        super().__init__()
        configure(swap_host=0, swap_disk=PLENTY)

    def out(self, wanted: int) -> int:
        runtime = manager()
        with runtime.locked():
            return sum(runtime.swap.out(group, wanted, ()) for group in runtime.groups)

    @rule(wanted=st.integers(1, 30), host=st.sampled_from([0, 4000, PLENTY]))
    def swap_out(self, wanted: int, host: int) -> None:
        configure(swap_host=host)
        before = manager().counters.swaps_out
        moved = self.out(wanted)
        assert manager().counters.swaps_out == before + moved

    @rule(wanted=st.integers(1, 30))
    def swap_out_to_a_full_disk(self, wanted: int) -> None:
        configure(swap_host=0)
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch.object(os, "pwrite", side_effect=full):
            assert self.out(wanted) == 0

    @rule(wanted=st.integers(1, 30))
    def swap_out_where_no_tier_is(self, wanted: int) -> None:
        configure(swap_host=0, swap_disk=0)
        assert self.out(wanted) == 0
        configure(swap_disk=PLENTY)

    @rule()
    def compact(self) -> None:
        trim()
        for group in manager().groups:
            assert group.pool.num_used == group.pool.capacity - 1


TestSwapMachine = SwapMachine.TestCase
