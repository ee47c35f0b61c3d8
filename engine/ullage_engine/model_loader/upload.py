"""Weights on their way to a device: from the mapped file into pinned memory, and from there.

A copy from pageable memory waits for its own staging, one tensor after the other. Here the CPU
fills one staging buffer while the device copies another.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Protocol

import torch

from ullage_engine.pinned_memory import PinnedMemory

STAGING_BYTES = 32 << 20
"""Bytes of each of the two staging buffers: more than a millisecond of PCIe, so that starting a
copy costs nothing beside it."""

Wait = Callable[[], None]
Place = Callable[[torch.Tensor], torch.Tensor]
"""Function from a tensor in host memory to the same on its device."""


class CopyStream(Protocol):
    """Copies to a device, done in order, some time after they were asked for."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to a tensor of the same shape; the source stays as it is until then."""
        ...

    def record(self) -> Wait:
        """Return a function that returns when all copies so far are done."""
        ...


class CudaCopies:
    """Copies on the device's current stream, so that later work on it finds them done."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> Wait:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize


class Uploader:
    """Copies of host tensors on a device, by way of staging buffers that take turns."""

    def __init__(
        self, device: torch.device, staging: Sequence[torch.Tensor], stream: CopyStream
    ) -> None:
        """`staging`: buffers of bytes, all as long as the first, which copies of `stream` read."""
        self._device = device
        self._staging = staging
        self._stream = stream
        self._waits: list[Wait] = [_no_wait] * len(staging)
        self._current = 0
        self._used = 0
        """Bytes of the current buffer that copies may still read."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy on the device, complete for later work of the stream.

        The tensor may change or go when this returns: its bytes are staged.
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
        """Return the free end of a staging buffer, at least a byte; wait for it if need be."""
        if self._used == len(self._staging[self._current]):
            self._waits[self._current] = self._stream.record()
            self._current = (self._current + 1) % len(self._staging)
            self._waits[self._current]()
            self._used = 0
        return self._staging[self._current][self._used :]


@contextmanager
def placing(device: torch.device) -> Iterator[Place]:
    """Yield what places tensors on a device; on a CPU they stay where they are."""
    if device.type != "cuda":
        yield lambda tensor: tensor.to(device)
        return

    memory = PinnedMemory.allocate(2 * STAGING_BYTES, device, "staging of weights")
    with closing(memory):  # which waits for the last copies
        uploader = Uploader(device, memory.tensor.chunk(2), CudaCopies())
        yield uploader.upload


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _no_wait() -> None:
    pass
