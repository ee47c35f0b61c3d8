"""Uploads several host arrays to a GPU in one asynchronous copy.

`upload` allocates memory on each call, whereas `Staging` copies a step's index arrays to fixed
memory on the device. If two steps stage arrays of the same shapes in the same order, the arrays end
up at the same addresses, which captured CUDA graphs rely on.
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
    """Upload arrays to the device asynchronously into one buffer.

    Return the arrays' views into this buffer, keyed by array name.

    For a GPU, the host memory is pinned. Torch reuses this memory only after the copy has read it.
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
    """Return a view of the memory at `start` with the shape and type of this array."""
    part = memory[start : start + array.nbytes]
    return part.view(_TYPES[array.dtype]).view(array.shape)


class CopyEvent(Protocol):
    """A point in a stream's queued work, with the interface of `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark the end of the work that is queued on the current stream."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has passed the mark. Return immediately if there is no mark."""
        ...


class _AtOnce:
    """Stands in for `CopyEvent` on a CPU, where copies are synchronous and need no waiting."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def copy_event(device: torch.device) -> CopyEvent:
    """Create an event for copies to the device."""
    return torch.cuda.Event() if device.type == "cuda" else _AtOnce()  # type: ignore[no-untyped-call]


class Staging:
    """Packs the index arrays of every step into the same device memory.

    In each step, call `begin`, `put` for each array, and `upload`. Only then launch the kernels
    that read the arrays. Two buffers of pinned host memory take turns, because the previous step's
    copy may still be queued behind older kernels while the next step is prepared. The device needs
    only one buffer because its stream runs in order.
    """

    def __init__(self, place: torch.Tensor) -> None:
        """Create a packer that uploads arrays to `place`, a uint8 tensor on the device."""
        device = place.device
        self._place = place
        self._hosts = [_host_memory(place.numel(), device) for _ in range(2)]
        self._copied = [copy_event(device) for _ in range(2)]
        self._turn = 0
        self._end = 0
        self._parts: dict[int, tuple[Indices, torch.Tensor]] = {}

    def begin(self) -> None:
        """Begin a step: drop the previous step's arrays, and wait until a host buffer is free."""
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        self._end = 0
        self._parts.clear()

    def put(self, array: Indices) -> torch.Tensor:
        """Add an array to the step. Return the device tensor that will hold it after `upload`.

        If an array is put twice, both calls return the same tensor.
        """
        if id(array) not in self._parts:
            # A reference to the array is kept, since another array could otherwise get its id.
            self._parts[id(array)] = (array, self._packed(array))
        return self._parts[id(array)][1]

    def upload(self) -> None:
        """Start copying all arrays to the device."""
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
