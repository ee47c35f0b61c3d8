"""Many small host arrays, one copy to the device."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

HostArrays = Mapping[str, npt.NDArray[np.generic]]

_ALIGNMENT = 16
"""Bytes that every array's start is a multiple of."""

_TYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def upload(arrays: HostArrays, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the arrays as tensors on the device, views of one buffer; nothing waits for the copy.

    The host's buffer is new each time. torch caches pinned memory, and reuses a piece of it only
    after the copy that reads it.
    """
    if not arrays:
        return {}
    starts = {}
    end = 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT

    staged = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = staged.numpy()
    for name, array in arrays.items():
        part = host[starts[name] : starts[name] + array.nbytes]
        part.view(array.dtype).reshape(array.shape)[...] = array

    there = staged.to(device, non_blocking=True)
    return {
        name: there[starts[name] : starts[name] + array.nbytes]
        .view(_TYPES[array.dtype])
        .view(array.shape)
        for name, array in arrays.items()
    }
