"""Memory nodes, on a faked topology: which group lives where, who writes to its arenas first, and where steps run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paged_inductor.runtime import Manager, SiteSpec, group, numa
from paged_inductor.runtime.numa import Node, Nodes, parse_cpus, this_host, topology
from paged_inductor.runtime.storage import Storage

SITE = SiteSpec(2, 8, torch.float32, torch.device("cpu"))
ALLOWED = os.sched_getaffinity(0)
FIRST, LAST = min(ALLOWED), max(ALLOWED)  # the same where there is one core


@pytest.fixture(autouse=True)
def _affinity_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    yield
    assert os.sched_getaffinity(0) == ALLOWED


def faked(root: Path, *cpulists: str) -> Path:
    for i, cpus in enumerate(cpulists):
        (root / f"node{i}").mkdir(parents=True)
        (root / f"node{i}" / "cpulist").write_text(cpus + "\n")
    (root / "possible").write_text("0-7")
    return root


def two_nodes() -> Nodes:
    return Nodes([Node(0, frozenset({FIRST})), Node(1, frozenset({LAST}))])


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3", {0, 1, 2, 3}), ("0-1,8,10-11\n", {0, 1, 8, 10, 11}), ("5", {5}), ("", set()), ("\n", set())],
)
def test_lists_of_cores(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


def test_nodes_with_cores_that_may_be_used(tmp_path: Path) -> None:
    root = faked(tmp_path, str(FIRST), f"{LAST},100000", "100001-100003", "", "nonsense")
    (root / "node7").mkdir()  # going offline: it has no list any more
    assert topology(root) == [Node(0, frozenset({FIRST})), Node(1, frozenset({LAST}))]
    assert this_host(root) is not None


def test_one_node_or_no_word_of_any_is_nothing_to_do(tmp_path: Path) -> None:
    assert this_host(faked(tmp_path / "one", f"0-{LAST}")) is None
    assert this_host(faked(tmp_path / "bound", f"0-{LAST}", "100000")) is None
    assert this_host(tmp_path / "nothing") is None
    view = Manager(None).create(Manager(None).group((SITE,), 16), 1, 5, "x").view
    assert view.group.node is None


def test_groups_are_spread_and_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {FIRST, LAST, 100000})
    runtime = Manager(two_nodes())
    groups = [runtime.group((SITE,) * n, 16) for n in (1, 2, 3)]
    assert [found.node.number for found in groups if found.node] == [0, 1, 0]
    assert runtime.group((SITE,), 16).node == groups[0].node
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {LAST})
    bound = Nodes([Node(0, frozenset({100000})), Node(1, frozenset({LAST}))])
    assert [bound.home().number for _ in range(3)] == [1, 1, 1]  # where their thread is bound to
    monkeypatch.undo()


def test_host_memory_for_a_gpus_blocks_is_next_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {0: "0", 1: "1", 2: "-1", 3: "5", 4: "nonsense"}
    for index, node in places.items():
        folder = tmp_path / f"0001:{index:02x}:0a.0"
        folder.mkdir()
        (folder / "numa_node").write_text(node + "\n")
    monkeypatch.setattr(numa, "PCI", tmp_path)
    facts = {i: SimpleNamespace(pci_domain_id=1, pci_bus_id=i, pci_device_id=10) for i in range(6)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts[device.index])
    nodes = two_nodes()
    found = [nodes.next_to(torch.device("cuda", i)) for i in range(6)]
    assert [node.number if node else None for node in found] == [0, 1, None, None, None, None]
    storage = Storage((), nodes)
    for i, core in ((0, FIRST), (1, LAST)):
        with storage._near(torch.device("cuda", i)):
            assert os.sched_getaffinity(0) == {core}
    with storage._near(torch.device("cpu")), storage._near(torch.device("cuda", 2)):
        assert os.sched_getaffinity(0) == ALLOWED


def test_arenas_are_first_written_to_on_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, set[int]]] = []

    def touched(arena: torch.Tensor) -> None:
        numa.touch(arena)
        written.append((arena.shape[0], os.sched_getaffinity(0)))
        assert not arena.any()

    monkeypatch.setattr(group, "touch", touched)
    runtime = Manager(Nodes([Node(3, frozenset({LAST}))]))
    made = runtime.group((SITE, SITE), 16)
    view = runtime.create(made, 1, 40, "x").view
    made.arenas[0][view.rows[0].blocks] = 2
    longer = runtime.append(view, 100).view
    assert (made.arenas[0][view.rows[0].blocks[:3]] == 2).all()
    assert {tuple(cpus) for _, cpus in written} == {(LAST,)}
    assert sorted({blocks for blocks, _ in written})[:2] == [1, 4]
    del longer


def test_steps_run_on_the_node_of_their_pages() -> None:
    runtime = Manager(Nodes([Node(0, frozenset({LAST}))]))
    view = runtime.create(runtime.group((SITE,), 16), 1, 5, "x").view
    seen = []

    def elsewhere() -> None:
        seen.append(os.sched_getaffinity(0))

    with runtime.using(view):
        assert os.sched_getaffinity(0) == {LAST}
        with runtime.using(view):
            assert os.sched_getaffinity(0) == {LAST}
        assert os.sched_getaffinity(0) == {LAST}
    assert os.sched_getaffinity(0) == ALLOWED
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [ALLOWED]


def test_cores_that_were_taken_away_stop_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Manager(Nodes([Node(0, frozenset({100000}))]))
    view = runtime.create(runtime.group((SITE,), 16), 1, 5, "x").view
    with runtime.using(view):
        assert os.sched_getaffinity(0) == ALLOWED


def test_steps_with_more_threads_than_a_node_has_cores_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    runtime = Manager(two_nodes())
    view = runtime.create(runtime.group((SITE,), 16), 1, 5, "x").view
    assert view.group.node is None
    with runtime.using(view):
        assert os.sched_getaffinity(0) == ALLOWED


def test_arenas_on_other_devices_have_no_node() -> None:
    site = SiteSpec(2, 8, torch.float32, torch.device("meta"))
    runtime = Manager(two_nodes())
    assert runtime.group((site,), 16).node is None
