"""The index arrays of a step on their way to a GPU: many arrays, one copy that nothing waits for.

The order of a step is `begin`, `put` for each array, `upload`, and only then the kernels that read
them. A step with arrays of the same shapes, put in the same order, has them at the same addresses,
as a captured graph needs.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ullage_engine.kernels.arena import ALIGNMENT

Indices = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class CopyEvent(Protocol):
    """A point in the work of a stream."""

    def record(self) -> None:
        """Mark the end of what the current stream has been given."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream is past the mark; at once if there is none."""
        ...


class _AtOnce:
    """The end of a copy on a CPU, which is over when it returns."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def copy_event(device: torch.device) -> CopyEvent:
    """Make an event of the device's current stream."""
    return torch.cuda.Event() if device.type == "cuda" else _AtOnce()  # type: ignore[no-untyped-call]


class Staging:
    """Host memory where a step's index arrays are packed, and their place on the device.

    Two pieces of pinned host memory take turns: the copy of one step may still wait behind the
    kernels of the step before when the next one is prepared. The device needs no second piece,
    because its work is in order.
    """

    def __init__(self, place: torch.Tensor) -> None:
        """`place`: memory of the device, bytes."""
        device, size = place.device, place.numel()
        self._place = place
        self._hosts = [
            torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self._copied = [copy_event(device) for _ in range(2)]
        self._turn = 0
        self._end = 0
        self._parts: dict[int, tuple[Indices, torch.Tensor]] = {}

    def begin(self) -> None:
        """Forget the arrays of the step before."""
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        self._end = 0
        self._parts.clear()

    def put(self, array: Indices) -> torch.Tensor:
        """Return where an array will be on the device after `upload`; one that is put twice is
        there once."""
        if id(array) not in self._parts:
            # The array is kept, or another one could have its id.
            self._parts[id(array)] = (array, self._packed(array))
        return self._parts[id(array)][1]

    def upload(self) -> None:
        """Begin to copy all arrays."""
        host = self._hosts[self._turn]
        self._place[: self._end].copy_(host[: self._end], non_blocking=True)
        self._copied[self._turn].record()

    def _packed(self, array: Indices) -> torch.Tensor:
        # Kernels are compiled once more for a pointer that is not a multiple of 16 bytes.
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        end = start + array.nbytes
        assert end <= self._place.numel(), f"{end} bytes of indices, room for {self._place.numel()}"

        part = self._hosts[self._turn][start:end].numpy()
        part.view(array.dtype).reshape(array.shape)[...] = array
        self._end = end
        return self._place[start:end].view(_TYPES[array.dtype]).view(array.shape)
