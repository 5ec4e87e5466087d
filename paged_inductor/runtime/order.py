"""The order of work on a device: what one stream does with a group's blocks comes after what others did with them.

Books change when a kernel is launched, not when it has run: a block that a cache gave back may still be read, by a
kernel that waits in the queue of another stream, when the block's next owner writes it. On one stream, work is done in
the order of its launch. PyTorch's allocator keeps memory apart by stream for the same reason. Blocks are not kept
apart, so that any step can have any of them; streams wait for each other instead, on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["StreamOrder"]


class StreamOrder:
    """Which streams may have unfinished work on a group's blocks. Obligation: the caller holds the manager's lock.

    several: whether more than one stream ever had.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._behind: list[torch.Stream] = []  # who follows waits for these: the work of all others is before theirs
        self._first: torch.Stream | None = None
        self.several = False

    def follow(self) -> None:
        """Let what this thread launches from now on come after all that was launched on the group's blocks before."""
        stream = torch.accelerator.current_stream(self._device)
        if self._behind == [stream]:
            return
        for other in self._behind:
            if other != stream:
                stream.wait_stream(other)
        self._behind = [stream]
        self._note(stream)

    def launched(self) -> None:
        """This thread has launched what others must wait for."""
        stream = torch.accelerator.current_stream(self._device)
        if stream not in self._behind:
            self._behind.append(stream)
            self._note(stream)

    def _note(self, stream: torch.Stream) -> None:
        if self._first is None:
            self._first = stream
        self.several |= stream != self._first

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """`record_stream` for this thread's stream, if there are several: the tensors' memory is not used again before
        the stream is done with them."""
        if self.several:
            stream = torch.accelerator.current_stream(self._device)
            for tensor in tensors:
                tensor.record_stream(stream)
