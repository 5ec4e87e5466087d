"""What will be used next comes back before it is."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from paged_inductor import SwapError, configure
from paged_inductor.runtime import CacheGroup, Manager, SiteSpec, View
from paged_inductor.runtime.ahead import _rows
from paged_inductor.runtime.tenants import entered
from paged_inductor.runtime.tiers import HostTier

SITES = (SiteSpec(2, 8, torch.float32, torch.device("cpu")),)


@pytest.fixture
def runtime(runtime: Manager) -> Manager:
    configure(swap_host="1GiB")
    return runtime


def group_of(runtime: Manager, blocks: int) -> CacheGroup:
    group = runtime.group(SITES, 16)
    configure(kv_budget=blocks * group.block_bytes)
    return group


def cache(runtime: Manager, group: CacheGroup, value: float) -> View:
    """Three blocks full of a value."""
    view = runtime.create(group, 1, 48, str(value)).view
    for block in view.rows[0].blocks:
        group.arenas[0][block] = value
    use(runtime, view)
    return view


def use(runtime: Manager, view: View) -> None:
    with runtime.using(view):
        pass
    runtime._ahead._executor.submit(lambda: None).result()  # the fetch has ended


def swap_out(runtime: Manager, group: CacheGroup) -> None:
    with runtime.locked():
        runtime.swap.out(group, 1000, ())


def away(*views: View) -> list[bool]:
    return [view.rows[0].blocks[0] < 0 for view in views]


def test_who_followed_last_time_is_fetched(runtime: Manager) -> None:
    group = group_of(runtime, 12)
    views = [cache(runtime, group, i) for i in range(4)]
    a, b, c, d = views
    swap_out(runtime, group)
    for view in (a, b, c, a, d):  # learned from the first swap on
        use(runtime, view)
    swap_out(runtime, group)
    before = runtime.counters.swaps_ahead
    use(runtime, a)
    assert away(a, b, c, d) == [False, True, True, False]  # the last time, d came after a
    assert runtime.counters.swaps_ahead == before + 3
    use(runtime, b)
    assert away(a, b, c, d) == [False, False, False, False]
    for i, view in enumerate(views):
        with runtime.using(view):
            assert all((group.arenas[0][block] == i).all() for block in view.rows[0].blocks)


def test_colder_caches_make_room_and_running_steps_do_not(runtime: Manager) -> None:
    group = group_of(runtime, 6)
    a, b = cache(runtime, group, 1), cache(runtime, group, 2)
    swap_out(runtime, group)
    c = cache(runtime, group, 3)
    runtime.prefetch([a])
    use(runtime, c)
    assert away(a, b, c) == [False, True, False]
    with runtime.using(c):
        runtime.prefetch([b])
        use(runtime, c)
        assert away(a, b, c) == [True, False, False]  # a was fetched, but not used since
        with runtime.using(b):
            runtime.prefetch([a])
            use(runtime, c)
            assert away(a, b, c) == [True, False, False]


def test_higher_priorities_and_the_running_conversation_stay(runtime: Manager) -> None:
    group = group_of(runtime, 6)
    a = cache(runtime, group, 1)
    swap_out(runtime, group)
    runtime.tenants.named("important").priority = 1
    token = entered.set("important")
    try:
        b = cache(runtime, group, 2)
    finally:
        entered.reset(token)
    c = cache(runtime, group, 3)
    runtime.prefetch([a])
    runtime._ahead._executor.submit(lambda: None).result()
    assert away(a, b, c) == [False, False, True]
    runtime._ahead._submit(_rows([c]), _rows([a]))  # a is used in turn with c, and b more important
    runtime._ahead._executor.submit(lambda: None).result()
    assert away(a, b, c) == [False, False, True]


def test_the_order_is_known_after_a_reset(runtime: Manager) -> None:
    group = group_of(runtime, 12)
    a, b = cache(runtime, group, 1), cache(runtime, group, 2)
    swap_out(runtime, group)
    runtime.counters.clear()
    for view in (a, b, a, b):
        use(runtime, view)
    swap_out(runtime, group)
    use(runtime, a)
    assert away(a, b) == [False, False]


def test_what_was_fetched_is_not_the_coldest(runtime: Manager) -> None:
    group = group_of(runtime, 9)
    a, b, c = (cache(runtime, group, i) for i in range(3))
    swap_out(runtime, group)
    use(runtime, b)
    use(runtime, c)
    runtime.prefetch([a])
    use(runtime, c)
    with runtime.locked():
        runtime.swap.out(group, 1, ())
    assert away(a, b, c) == [False, True, False]


def test_a_failed_fetch_is_told_to_who_needs_the_tokens(runtime: Manager) -> None:
    group = group_of(runtime, 6)
    a = cache(runtime, group, 1)
    swap_out(runtime, group)
    with mock.patch.object(type(HostTier(1).make([], 0)), "read", side_effect=SwapError("broken")):
        runtime.prefetch([a])
        runtime._ahead._executor.submit(lambda: None).result()
        assert away(a) == [True]
        with pytest.raises(SwapError, match="broken"):
            use(runtime, a)
    use(runtime, a)
    assert away(a) == [False]
