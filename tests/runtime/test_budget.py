"""The byte budget, growth, trimming, and the options that govern them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paged_inductor import ConfigurationError, KVBudgetExceeded, configure
from paged_inductor._amounts import size
from paged_inductor._config import config, parse_bytes, reset_config
from paged_inductor.runtime import CacheGroup, Manager, SiteSpec, View

SITES = (SiteSpec(1, 4, torch.float32, torch.device("cpu")),)
OTHER = (SiteSpec(1, 8, torch.float32, torch.device("cpu")),)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("KV_BUDGET", "BLOCK_SIZE", "ON_MATERIALIZE", "TRITON_ON_CPU"):
        monkeypatch.delenv(f"PAGED_INDUCTOR_{name}", raising=False)
    reset_config()
    yield
    reset_config()


@pytest.fixture
def manager() -> Manager:
    return Manager()


def group_with(manager: Manager, blocks: int) -> CacheGroup:
    group = manager.group(SITES, 8)
    configure(kv_budget=blocks * group.block_bytes)
    return group


def filled(manager: Manager, group: CacheGroup, batch: int, count: int, label: str) -> View:
    view = manager.create(group, batch, count, label).view
    for i, row in enumerate(view.rows):
        for block in row.blocks:
            group.arenas[0][block] = 100 * i + block
    return view


def values(view: View) -> list[float]:
    return [view.group.arenas[0][block, 0, 0, 0].item() for row in view.rows for block in row.blocks]


def test_exhaustion_names_holders_and_the_next_step(manager: Manager) -> None:
    group = group_with(manager, 10)
    big, small = filled(manager, group, 2, 24, "chat"), filled(manager, group, 1, 16, "search")
    before = (values(big), values(small), group.pool.num_used, manager.check_integrity())
    with pytest.raises(KVBudgetExceeded) as caught:
        manager.create(group, 1, 24, "more")
    message = str(caught.value)
    assert caught.value.holders == [("chat", 6 * group.block_bytes), ("search", 2 * group.block_bytes)]
    assert f"this step needs 1 more block(s) of {size(group.block_bytes)}. Held now by chat: " in message
    assert "Existing caches are intact: drop some of them, shorten the batch, raise the limit" in message
    assert "configure(kv_budget=" in message
    assert isinstance(caught.value, MemoryError)
    assert (values(big), values(small), group.pool.num_used, manager.check_integrity()) == before
    with pytest.raises(KVBudgetExceeded):
        manager.append(big, 24)
    assert (values(big), values(small), group.pool.num_used, manager.check_integrity()) == before
    del small
    more = manager.create(group, 1, 24, "more").view
    assert len(more.rows[0].blocks) == 3


def test_nobody_is_named_where_nobody_holds_memory(manager: Manager) -> None:
    group = group_with(manager, 2)
    with pytest.raises(KVBudgetExceeded, match=r"B\. Shorten the batch, raise the limit") as caught:
        manager.create(group, 5, 24, "large")
    assert caught.value.holders == []


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1000, "1000 B"), (1536, "1.5 KiB"), (2**26, "64.0 MiB"), (3 * 2**29, "1.50 GiB")]
)
def test_amounts_are_shown_in_the_unit_that_suits_them(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_last_block_of_the_budget_can_be_used(manager: Manager, batch: int) -> None:
    """What is asked for is what is needed, not an estimate above it."""
    group = group_with(manager, 2 * batch)
    view = filled(manager, group, batch, 8, "exact")
    longer = manager.append(view, 8).view
    assert group.pool.num_used == 2 * batch
    with pytest.raises(KVBudgetExceeded, match=rf"needs {batch} more"):
        manager.append(longer, 1)


def test_a_budget_raised_in_between_helps(manager: Manager) -> None:
    group = group_with(manager, 1)
    view = filled(manager, group, 1, 8, "one")
    with pytest.raises(KVBudgetExceeded):
        manager.append(view, 1)
    configure(kv_budget=2 * group.block_bytes)
    assert manager.append(view, 1).view.length == 9


def test_idle_groups_give_way(manager: Manager) -> None:
    group = group_with(manager, 8)
    view = filled(manager, group, 1, 64, "first")
    del view
    other = manager.group(OTHER, 8)  # twice as large blocks
    kept = manager.create(other, 1, 32, "second").view
    assert group.pool.capacity == 1
    assert len(kept.rows[0].blocks) == 4
    manager.check_integrity()


def test_growth_keeps_values_and_trim_gives_memory_back(manager: Manager) -> None:
    group = group_with(manager, 200)
    first = filled(manager, group, 2, 24, "kept")
    wanted = values(first)
    second = filled(manager, group, 4, 160, "dropped")
    assert manager.counters.arena_growths >= 2
    assert values(first) == wanted
    del second
    free = group.pool.num_free
    assert manager.trim() == free * group.block_bytes
    assert (group.pool.num_free, group.arenas[0].shape[0]) == (0, group.pool.capacity)
    assert values(first) == wanted
    assert manager.append(first, 8).view.length == 32
    del first
    manager.trim()
    assert group.arenas[0].shape[0] == 1
    manager.check_integrity()


@pytest.mark.parametrize("operation", ["grow", "trim"])
def test_no_memory_for_new_arenas_changes_nothing(
    manager: Manager, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_with(manager, 200)
    kept = filled(manager, group, 1, 24, "kept")
    filled(manager, group, 1, 80, "dropped")
    wanted = values(kept)

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    steps = {"trim": manager.trim, "grow": lambda: manager.create(group, 1, 800, "large")}
    with monkeypatch.context() as patch:
        patch.setattr(SiteSpec, "new_arena", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            steps[operation]()
    manager.check_integrity()
    assert values(kept) == wanted
    manager.trim()
    assert group.pool.num_used == 3
    assert values(kept) == wanted


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (MemoryError, ""),
        (torch.OutOfMemoryError, "CUDA out of memory.\nmore"),
        (RuntimeError, "can't allocate memory: 9 B"),
    ],
)
def test_a_device_without_memory_is_like_an_exhausted_budget(
    manager: Manager, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First others go, then it is said what the device said."""
    group = group_with(manager, 200)
    kept, cold = filled(manager, group, 1, 24, "kept"), filled(manager, group, 1, 80, "cold")
    wanted = values(kept), values(cold)
    new_arena = SiteSpec.new_arena

    def fail(site: SiteSpec, num_blocks: int, block_size: int) -> torch.Tensor:
        if num_blocks > 30:
            raise kind(text)
        return new_arena(site, num_blocks, block_size)

    monkeypatch.setattr(SiteSpec, "new_arena", fail)
    with pytest.raises(KVBudgetExceeded, match=r"the device gives no memory.*\(.+\): this step needs \d+ more"):
        manager.create(group, 1, 200, "large")
    small = manager.create(group, 1, 64, "small").view
    for view in (cold, small, kept):
        with manager.using(view):
            pass
    configure(swap_host="1GiB")
    large = manager.create(group, 1, 200, "large").view
    assert group.pool.num_swapped == 21
    del large
    with manager.using(kept):
        assert values(kept) == wanted[0]
    with manager.using(cold):
        assert values(cold) == wanted[1]
    manager.check_integrity()


def test_groups_survive_forgetting(manager: Manager) -> None:
    """A compiled program holds its group: after `reset()` its dead views must still be released."""
    group = group_with(manager, 20)
    filled(manager, group, 1, 24, "dropped")
    manager.forget_unused()
    assert group.pool.capacity == 1
    view = filled(manager, group, 1, 24, "again")
    assert manager.group(SITES, 8) is group
    del view
    assert group.pool.num_used == 0


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bugdet": 1}, r"unknown option 'kv_bugdet': the options are .*kv_budget.*block_size.*on_materialize"),
        ({"block_size": 12}, r"block_size=12 is not allowed: choose a power of two from 8 to 256"),
        ({"block_size": 4}, "power of two from 8 to 256"),
        ({"block_size": 512}, "power of two from 8 to 256"),
        ({"block_size": 16.0}, "power of two"),
        ({"block_size": True}, "power of two"),
        ({"kv_budget": 0}, r"kv_budget=0 is not an amount of memory.*8GiB"),
        ({"kv_budget": -5}, "not an amount of memory"),
        ({"kv_budget": "lots"}, "not an amount of memory"),
        ({"kv_budget": "8 XiB"}, "not an amount of memory"),
        ({"kv_budget": True}, "not an amount of memory"),
        (
            {"on_materialize": "shout"},
            r"on_materialize='shout' is not allowed: choose one of 'warn', 'error', 'silent'",
        ),
        ({"triton_on_cpu": "perhaps"}, "choose True or False"),
    ],
)
def test_bad_options_teach_and_change_nothing(options: dict[str, Any], message: str) -> None:
    before = config()
    with pytest.raises(ConfigurationError, match=message):
        configure(**{"on_materialize": "silent", **options})
    assert config() == before


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (1, 1),
        ("123", 123),
        ("1kb", 10**3),
        ("8GiB", 8 * 2**30),
        (" 512 MiB ", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("1TiB", 2**40),
    ],
)
def test_amounts_of_memory(text: int | str, wanted: int) -> None:
    assert parse_bytes(text) == wanted
    assert configure(kv_budget=text).kv_budget == wanted


@pytest.mark.parametrize("none", [None, 0])
def test_no_disk(none: int | None) -> None:
    configure(swap_disk="1GiB")
    assert configure(swap_disk=none).swap_disk == 0


def test_sizes_of_blocks() -> None:
    for tokens in (8, 16, 32, 64, 128, 256):
        assert configure(block_size=tokens).block_size == tokens


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"KV_BUDGET": "3GiB", "BLOCK_SIZE": "64", "ON_MATERIALIZE": "error", "TRITON_ON_CPU": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PAGED_INDUCTOR_{name}", value)
    now = config()
    assert (now.kv_budget, now.block_size, now.on_materialize, now.triton_on_cpu) == (3 * 2**30, 64, "error", True)
    assert configure(block_size=32).kv_budget == 3 * 2**30
    monkeypatch.setenv("PAGED_INDUCTOR_KV_BUDGET", "1048576")
    reset_config()
    assert config().kv_budget == 2**20


@pytest.mark.parametrize(("name", "value"), [("BLOCK_SIZE", "12"), ("BLOCK_SIZE", "x"), ("KV_BUDGET", "much")])
def test_bad_environment(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"PAGED_INDUCTOR_{name}", value)
    with pytest.raises(ConfigurationError, match=value):
        config()
