"""Host arrays on their way to a GPU: many arrays, one copy that nothing waits for.

`upload` takes new memory each time. `Staging` copies a step's index arrays to one place. Steps
whose arrays have the same shapes, put in the same order, have them at the same addresses, as a
captured graph needs.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ullage_engine.kernels.arena import aligned

Array = npt.NDArray[np.generic]
Indices = npt.NDArray[np.int32] | npt.NDArray[np.int64]
HostArrays = Mapping[str, Array]

_TYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def upload(arrays: HostArrays, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the arrays as tensors on the device, views of one buffer; nothing waits for the copy.

    torch caches pinned memory, and reuses a piece of it only after the copy that reads it.
    """
    if not arrays:
        return {}
    starts = list(accumulate((aligned(array.nbytes) for array in arrays.values()), initial=0))
    host = _host_memory(starts[-1], device)
    for array, start in zip(arrays.values(), starts, strict=False):
        _write(host, start, array)

    on_device = host.to(device, non_blocking=True)
    return {
        name: _view(on_device, start, array)
        for (name, array), start in zip(arrays.items(), starts, strict=False)
    }


def _host_memory(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _write(memory: torch.Tensor, start: int, array: Array) -> None:
    part = memory[start : start + array.nbytes].numpy()
    part.view(array.dtype).reshape(array.shape)[...] = array


def _view(memory: torch.Tensor, start: int, array: Array) -> torch.Tensor:
    """Return the tensor that an array becomes in memory from `start` on."""
    part = memory[start : start + array.nbytes]
    return part.view(_TYPES[array.dtype]).view(array.shape)


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
    """Packs the index arrays of one step after another into the same memory of the device.

    The order of a step is `begin`, `put` for each array, `upload`, and only then the kernels that
    read the arrays. Two pieces of pinned host memory take turns: the copy of one step may still
    wait behind the kernels of the step before when the next step is prepared. The device needs no
    second piece, because its work is in order.
    """

    def __init__(self, place: torch.Tensor) -> None:
        """`place`: memory of the device, bytes."""
        device = place.device
        self._place = place
        self._hosts = [_host_memory(place.numel(), device) for _ in range(2)]
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
        """Return the tensor that holds the array after `upload`. An array that is put twice has one
        place.
        """
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
        start = aligned(self._end)
        end = start + array.nbytes
        assert end <= self._place.numel(), f"{end} bytes of indices, room for {self._place.numel()}"

        _write(self._hosts[self._turn], start, array)
        self._end = end
        return _view(self._place, start, array)
