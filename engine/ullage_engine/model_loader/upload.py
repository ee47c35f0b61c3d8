"""Uploads weights from the mapped file to a device through pinned memory.

The driver copies pageable memory through its own staging buffer, one tensor at a time. This module
overlaps the two steps: the CPU fills one pinned staging buffer while the device copies from
another.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Protocol

import torch

from ullage_engine.pinned_memory import PinnedMemory

STAGING_BYTES = 32 << 20
"""Size in bytes of each of the two staging buffers.

Copying one buffer over PCIe takes more than a millisecond, so the cost of launching the copy is
negligible.
"""

Wait = Callable[[], None]
Place = Callable[[torch.Tensor], torch.Tensor]
"""A function that takes a tensor in host memory and returns its copy on the device."""


class CopyStream(Protocol):
    """Protocol for queueing asynchronous copies to a device. Copies run in call order."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy to a tensor of the same shape.

        The source must not change until the copy is done.
        """
        ...

    def record(self) -> Wait:
        """Return a function that waits until all copies queued so far are done."""
        ...


class CudaCopies:
    """Queues copies on the device's current stream.

    Work that is queued on the stream afterwards sees the copied data.
    """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> Wait:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize


class Uploader:
    """Copies host tensors to a device through alternating staging buffers."""

    def __init__(
        self, device: torch.device, staging: Sequence[torch.Tensor], stream: CopyStream
    ) -> None:
        """Create an uploader.

        Args:
            device: the device.
            staging: byte buffers of equal length, from which `stream` copies to the device.
            stream: stream that performs the copies to the device.
        """
        self._device = device
        self._staging = staging
        self._stream = stream
        self._waits: list[Wait] = [_no_wait] * len(staging)
        self._current = 0
        self._used = 0
        """Number of bytes in the current staging buffer that pending copies may still read."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device, and return the contiguous copy.

        Work that is queued on the stream afterwards may use the copy. The host tensor may be
        modified or freed as soon as this method returns.
        """
        placed = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source = as_bytes(tensor.contiguous())
        target = as_bytes(placed)

        begin = 0
        while begin < len(source):
            free = self._free()
            end = min(len(source), begin + len(free))
            piece = free[: end - begin]

            piece.copy_(source[begin:end])
            self._stream.copy(target[begin:end], piece)

            self._used += end - begin
            begin = end
        return placed

    def _free(self) -> torch.Tensor:
        """Return the free part of the current staging buffer.

        If the current buffer is full, switch to the next one and wait until it is free.
        """
        if self._used == len(self._staging[self._current]):
            self._waits[self._current] = self._stream.record()
            self._current = (self._current + 1) % len(self._staging)
            self._waits[self._current]()
            self._used = 0
        return self._staging[self._current][self._used :]


@contextmanager
def placing(device: torch.device) -> Iterator[Place]:
    """Yield a function that copies tensors to a device, on a GPU through pinned memory.

    On a CPU, tensors are not copied.
    """
    if device.type != "cuda":
        yield lambda tensor: tensor.to(device)
        return

    memory = PinnedMemory.allocate(2 * STAGING_BYTES, device, "staging of weights")
    with closing(memory):  # closing waits for the last copies
        uploader = Uploader(device, memory.tensor.chunk(2), CudaCopies())
        yield uploader.upload


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat byte tensor."""
    return tensor.view(-1).view(torch.uint8)


def _no_wait() -> None:
    pass
