"""Steps that are recorded once and replayed (`mode="reduce-overhead"`): their lengths, and how often they are recorded.

Inductor's CUDA graph trees record a step per set of integer inputs and of addresses of static inputs. Static are the
arenas, the tensors that hold lengths, and inputs that the step writes to; block tables and row lengths are copied into
the recording's own buffers before every replay. So a step is recorded again only when an arena or a table has grown,
when the batch size, the shared prefix or the position of a buffer's first token changed, or when what it writes to is
another tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .group_plan import GroupPlan
from .passes import GraphState
from .runtime import Schedule, View, manager

__all__ = ["Replay", "keep_in_place"]


def keep_in_place(state: GraphState) -> None:
    """Tell the inner compiler which inputs of the rewritten graph have the same address at every call."""
    static = [new.node for new in state.new_inputs if new.kind == "arena"]
    static += [held.node for held in state.held if held.kind == "length"]
    static += [state.captured[i] for i in state.written]  # else Inductor replays no step that writes to them
    for node in static:
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


class Replay:
    """The inputs of a replayed step that stand for the cache's length. Counts the recordings that its calls need."""

    def __init__(self, state: GraphState) -> None:
        self._held = state.held
        self._written = state.written
        self._local = threading.local()  # as Inductor's recordings: threads may run on streams of their own
        self._recorded: set[tuple[object, ...]] = set()

    def _buffers(self) -> dict[int, torch.Tensor]:
        """The calling thread's tensors of lengths, by the position of the argument that they hold."""
        if not hasattr(self._local, "buffers"):
            with torch.inference_mode(False):  # filled in every mode, whoever made them
                self._local.buffers = {
                    held.index: torch.zeros((), dtype=torch.int64, device=held.node.meta["example_value"].device)
                    for held in self._held
                    if held.kind == "length"
                }
        return self._local.buffers

    def inputs(
        self, args: Sequence[Any], plans: Sequence[GroupPlan], views: Sequence[View], schedules: Sequence[Schedule]
    ) -> list[Any]:
        """The held inputs for a call with `args`; `views` are those of the plans' groups that it reads and fills, and
        `schedules` theirs."""
        values: list[Any] = []
        buffers = self._buffers()
        for held in self._held:
            if held.kind == "length":
                values.append(buffers[held.index].fill_(args[held.index]))
            elif held.make is not None:
                capacity = schedules[held.index].block_table.shape[1] * plans[held.index].group.block_size
                values.append(held.make(args, capacity))
            elif held.kind == "width":
                values.append(schedules[held.index].block_table.shape[1])
            elif held.kind == "hidden":
                values.append(manager().hidden(views[held.index], schedules[held.index]))
            else:
                values.append(plans[held.index].group.arenas[0].shape[0])
        return values

    def note(self, args: Sequence[Any], inputs: Sequence[Any], plans: Sequence[GroupPlan]) -> None:
        """Count a call whose inputs are not where any earlier call's were: the compiler records the step anew."""
        places = [plan.group.arenas[site].data_ptr() for plan in plans for site in plan.sites]
        places += [buffer.data_ptr() for buffer in self._buffers().values()]
        places += [args[i].data_ptr() for i in self._written]
        sizes = [value for value in inputs if isinstance(value, int)]
        key = (*places, *sizes)
        if key not in self._recorded:
            with manager().locked():
                manager().counters.graph_recordings += key not in self._recorded
                self._recorded.add(key)
