"""Hosts with several memory nodes: the arenas of a cache group lie on one node, and its steps run on that node's cores.

Linux places a page on the node of the core that first writes to it. So a group has a home node; its arenas are written
to once by a thread that is bound to that node's cores, before anybody else sees them; and while a step of the group
runs, its thread is bound to them, too. On a host with one node nothing of this happens, nor where a step uses more
threads than the node has cores (torch.get_num_threads()): binding would take cores from it.

Host memory for swapped blocks of a GPU is taken on the node that the GPU is attached to.

Only the thread that runs a step is bound: OpenMP threads that were started before stay where they are. A model that is
to use the cores of all nodes is best run as one process per node, each bound by `numactl`: then each sees one node.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["PCI", "ROOT", "Node", "Nodes", "parse_cpus", "this_host", "topology", "touch"]

ROOT = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Node:
    """A memory node and the cores next to it."""

    number: int
    cpus: frozenset[int]


def parse_cpus(text: str) -> frozenset[int]:
    """The cores in a list as the kernel writes it: "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def topology(root: Path = ROOT) -> list[Node]:
    """The nodes that have cores which this process may use; none if the system does not tell."""
    usable = os.sched_getaffinity(0)
    found = []
    for folder in root.glob("node[0-9]*"):
        try:
            cpus = parse_cpus((folder / "cpulist").read_text()) & usable
        except (OSError, ValueError):
            continue  # a node that is being taken offline
        if cpus:
            found.append(Node(int(folder.name.removeprefix("node")), cpus))
    return sorted(found, key=lambda node: node.number)


def touch(arena: Tensor) -> None:
    """Write to every page of a fresh CPU tensor, in this thread alone. It is zero then."""
    ctypes.memset(arena.data_ptr(), 0, arena.untyped_storage().nbytes())


class Nodes:
    """The nodes of a host that has several: which group lives where, and threads that are bound."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = list(nodes)
        self._homes = dict.fromkeys(self._nodes, 0)
        self._before = threading.local()

    def home(self) -> Node | None:
        """A node for a new group: the one whose cores this thread is bound to, else that with the fewest groups. None
        if a step's threads do not fit on it."""
        allowed = os.sched_getaffinity(0)
        near = [node for node in self._nodes if allowed <= node.cpus]
        node = near[0] if near else min(self._nodes, key=self._homes.__getitem__)
        if torch.get_num_threads() > len(node.cpus):
            return None
        self._homes[node] += 1
        return node

    def next_to(self, device: torch.device) -> Node | None:
        """The node that a GPU is attached to; None if the system does not tell, or this process may not use it."""
        facts: Any = torch.cuda.get_device_properties(device)
        try:
            address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
            number = int((PCI / address / "numa_node").read_text())
        except (AttributeError, OSError, ValueError):
            return None
        return next((node for node in self._nodes if node.number == number), None)

    def bind(self, node: Node | None) -> None:
        """Keep this thread on a node's cores until `unbind`; calls may be nested. None: leave it where it is."""
        stack = self._before.__dict__.setdefault("stack", [])
        stack.append(None)
        if node is None:
            return
        with suppress(
            OSError
        ):  # the cores were taken away since: steps run all the same, only farther from their pages
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, node.cpus)
            stack[-1] = before

    def unbind(self) -> None:
        """Undo the last `bind` of this thread."""
        before = self._before.stack.pop()
        if before is not None:
            with suppress(OSError):  # see `bind`
                os.sched_setaffinity(0, before)

    @contextmanager
    def near(self, node: Node | None) -> Iterator[None]:
        """`bind` and `unbind` around a block of code."""
        self.bind(node)
        try:
            yield
        finally:
            self.unbind()


def this_host(root: Path = ROOT) -> Nodes | None:
    """The nodes of this host, or None if it has one, or this process may use the cores of only one."""
    nodes = topology(root)
    return Nodes(nodes) if len(nodes) > 1 else None
