"""Tenants: what is made in their blocks is theirs, and their quotas hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from paged_inductor import ConfigurationError, KVBudgetExceeded, QuotaExceeded, configure, tenant
from paged_inductor._config import reset_config
from paged_inductor.runtime import CacheGroup, Manager, SiteSpec
from paged_inductor.runtime import manager as process_manager
from paged_inductor.runtime.tenants import Tenant

SITE = SiteSpec(2, 8, torch.float32, torch.device("cpu"))
BLOCK = 16 * 2 * 8 * 4


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """A manager of its own, which `tenant` speaks to."""
    own = Manager()
    monkeypatch.setattr("paged_inductor.tenancy.manager", lambda: own)
    yield own
    own.check_integrity()


def group_of(runtime: Manager) -> CacheGroup:
    return runtime.group((SITE,), 16)


def used(runtime: Manager) -> dict[str, int]:
    return {who.name: who.used // BLOCK for who in runtime.tenants.all()}


def test_caches_are_charged_to_whose_block_made_them(runtime: Manager) -> None:
    group = group_of(runtime)
    with tenant("a"):
        first = runtime.create(group, 2, 20, "first").view
        with tenant("b"):
            inner = runtime.create(group, 1, 5, "inner").view
        assert used(runtime) == {"default": 0, "a": 4, "b": 1}
    own = runtime.create(group, 1, 1, "own").view
    longer = runtime.append(inner, 20).view  # by nobody in particular: its owner's
    assert used(runtime) == {"default": 1, "a": 4, "b": 2}
    del first, own, inner
    assert used(runtime)["a"] == 0
    del longer
    with runtime.locked():
        pass
    assert used(runtime) == {"default": 0, "a": 0, "b": 0}


def test_a_fork_pays_only_for_what_it_writes(runtime: Manager) -> None:
    group = group_of(runtime)
    with tenant("a"):
        whole = runtime.create(group, 1, 40, "whole").view
    with tenant("b"):
        fork = runtime.derive(whole, whole.rows, whole.lengths, whole.length)
        assert used(runtime) == {"default": 0, "a": 3, "b": 0}
        longer = runtime.append(fork, 1).view
        other = runtime.append(whole, 1).view
    assert used(runtime)["b"] == 1
    assert longer.tenant.name == "b"
    del whole, fork, other, longer


def test_a_quota_is_hard_and_leaves_everything_as_it_was(runtime: Manager) -> None:
    group = group_of(runtime)
    with tenant("a", quota=4 * BLOCK):
        held = runtime.create(group, 1, 48, "held").view
        with pytest.raises(QuotaExceeded, match=r"tenant 'a' holds .*quota.*held: .*raise the quota"):
            runtime.create(group, 1, 33, "too much")
        assert used(runtime) == {"default": 0, "a": 3}
        grown = runtime.append(held, 16).view
        with pytest.raises(QuotaExceeded):
            runtime.append(grown, 1)
    with tenant("b"):
        other = runtime.create(group, 4, 64, "other").view
    assert used(runtime) == {"default": 0, "a": 4, "b": 16}
    del held
    runtime.check_integrity()
    del grown, other


def test_errors_of_quotas_are_budget_errors_with_the_tenants_own_holders(runtime: Manager) -> None:
    group = group_of(runtime)
    other = runtime.create(group, 1, 100, "other").view
    with tenant("a", quota=BLOCK):
        own = runtime.create(group, 1, 16, "own").view
        with pytest.raises(KVBudgetExceeded) as caught:
            runtime.append(own, 1)
    assert caught.value.holders == [("own", BLOCK)]
    del other, own


def test_threads_and_tasks_have_their_own(runtime: Manager) -> None:
    seen: list[str] = []

    def elsewhere() -> None:
        seen.append(runtime.tenants.current().name)

    async def task(name: str) -> str:
        with tenant(name):
            await asyncio.sleep(0)
            return runtime.tenants.current().name

    async def both() -> list[str]:
        return await asyncio.gather(task("x"), task("y"))

    with tenant("a"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert asyncio.run(both()) == ["x", "y"]
        assert runtime.tenants.current().name == "a"
    assert seen == ["default"]


def test_settings_stay_until_they_are_changed(runtime: Manager) -> None:
    with tenant("a", quota="1MiB", priority=3, share="tenant", salt="s") as who:
        pass
    with tenant("a") as again:
        assert again is who
        assert (who.limit, who.priority, who.share, who.salt) == (2**20, 3, "tenant", b"s")
    with tenant("a", quota="none"):
        assert who.limit == float("inf")


@pytest.mark.parametrize(
    "options",
    [{"quota": "much"}, {"quota": -1}, {"priority": "high"}, {"priority": True}, {"share": "all"}, {"salt": 7}],
    ids=str,
)
def test_bad_settings_are_refused_and_change_nothing(runtime: Manager, options: dict) -> None:
    name = next(iter(options))
    with tenant("a", quota="1MiB", priority=3, share="system") as who:
        before = (who.limit, who.priority, who.share, who.salt)
        with pytest.raises(ConfigurationError, match=f"{name}="), tenant("a", **options):
            pass
        assert (who.limit, who.priority, who.share, who.salt) == before
        assert runtime.tenants.current() is who
    with pytest.raises(ConfigurationError, match="tenant name"), tenant(""):
        pass


def test_the_books_of_the_process_hold(runtime: Manager) -> None:
    """A tenant that is charged for what it does not hold is found."""
    who = runtime.tenants.named("a")
    assert isinstance(who, Tenant)
    who.used = 5
    with pytest.raises(AssertionError, match="tenant a pays for 0 B, not 5"):
        runtime.check_integrity()
    who.used = 0
    assert process_manager() is not runtime


def test_who_goes_on_from_anothers_swapped_cache_pays_only_for_what_is_new(runtime: Manager) -> None:
    """What comes back is charged to its owner, whose quota it fills to the last byte."""
    configure(swap_host="1GiB")
    group = group_of(runtime)
    with tenant("a", quota=3 * BLOCK):
        view = runtime.create(group, 1, 48, "a's").view
    with runtime.using(view):
        pass
    with runtime.locked():
        assert runtime.swap.out(group, 3, ()) == 3
    assert used(runtime) == {"default": 0, "a": 0}
    with tenant("b", quota=BLOCK):
        longer = runtime.append(view, 16).view
    assert used(runtime) == {"default": 0, "a": 3, "b": 1}
    with runtime.using(longer):
        assert all(block > 0 for block in longer.rows[0].blocks)
    reset_config()
