"""A GPU that several processes share, behind torch.cuda's functions and behind NVML's."""

from types import SimpleNamespace

import pytest
import torch

MIB = 1 << 20
CUDA = torch.device("cuda", 0)


class _Block:
    """A tensor of a FakeGpu: its bytes go to the allocator's cache when it is no more."""

    def __init__(self, gpu: "FakeGpu", num_bytes: int) -> None:
        self._gpu = gpu
        self.nbytes = num_bytes

    def __del__(self) -> None:
        self._gpu.cached_bytes += self.nbytes


class FakeGpu:
    """The memory of one GPU: this process's context and allocator, and other processes' bytes.

    Installed, it takes the place of torch.cuda. Passed to `at_start` it is what NVML shows.
    """

    uuid = "GPU-12345678-9abc"

    def __init__(self, total_bytes: int = 80_000 * MIB, pid: int = 7) -> None:
        self.total_bytes = total_bytes
        self.pid = pid
        """The process's id as the driver knows it."""
        self.cuda_uuid = "12345678-9abc"
        self.context_bytes = 0
        self.cached_bytes = 0
        """What the allocator keeps for reuse."""
        self.reserved_bytes = 0
        self.fraction = 1.0
        self.others: dict[int, int] = {}
        """Bytes of other processes, by their id."""
        self.lists_processes = True
        self.returns_per_look = 0
        """Bytes of other processes that become free whenever the driver is asked."""

    @property
    def free_bytes(self) -> int:
        used = self.context_bytes + self.reserved_bytes + sum(self.others.values())
        return max(0, self.total_bytes - used)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        properties = SimpleNamespace(uuid=self.cuda_uuid, total_memory=self.total_bytes)

        def limit(fraction: float, device: torch.device) -> None:
            assert device == CUDA
            self.fraction = fraction

        for name, function in {
            "mem_get_info": lambda device: self.free_and_total_bytes(),
            "memory_reserved": lambda device: self.reserved_bytes,
            "get_device_properties": lambda device: properties,
            "set_per_process_memory_fraction": limit,
            "empty_cache": self._empty_cache,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch, "empty", lambda size, **_: self.allocate(size))

    def allocate(self, num_bytes: int) -> _Block:
        """Allocates as torch does: from what is cached, else of the device, and before it fails it
        gives back all that is cached."""
        if num_bytes > self.cached_bytes:
            self._empty_cache()
            if self.reserved_bytes + num_bytes > self.fraction * self.total_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory. 1 GiB allowed")
            if num_bytes > self.free_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            self.reserved_bytes += num_bytes
            self.cached_bytes += num_bytes
        self.cached_bytes -= num_bytes
        return _Block(self, num_bytes)

    def _empty_cache(self) -> None:
        self.reserved_bytes -= self.cached_bytes
        self.cached_bytes = 0

    # as the driver shows it ----------------------------------------------------------------------

    def free_and_total_bytes(self) -> tuple[int, int]:
        for pid, held in self.others.items():
            self.others[pid] = max(0, held - self.returns_per_look)
        return self.free_bytes, self.total_bytes

    def process_bytes(self) -> dict[int, int]:
        if not self.lists_processes:
            return {}
        own = self.context_bytes + self.reserved_bytes
        return {**self.others, **({self.pid: own} if own else {})}
