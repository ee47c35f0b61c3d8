"""Measures the memory that this process holds, and touches what it must hold."""

from collections.abc import Iterable

import psutil
import torch

from ullage_rpc.heap import give_back_heap

_PAGE = 4096


class MemoryMeter:
    """Memory in use: resident bytes of this process, or used bytes of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()

    def used_bytes(self) -> int:
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return int(total - free)
        return int(self._process.memory_info().rss)


def touch_pages(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Makes mapped weights resident now; else they would be read while serving."""
    if device.type != "cpu":
        return
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8)[::_PAGE].sum()


def give_back_freed() -> None:
    """Returns freed memory to the kernel, so that what loading took is not taken for used."""
    give_back_heap()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
