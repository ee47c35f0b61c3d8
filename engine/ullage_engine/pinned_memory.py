"""Pinned host memory, which a GPU can copy to and from directly because its pages cannot move.

This module maps the memory and registers it with CUDA. torch's own allocator rounds pinned memory
up to a power of two, so that 40 GiB would pin 64 GiB, and keeps the memory after it is freed.

How torch treats registered memory (ATen/native/cuda/Copy.cu, ATen/cuda/detail/CUDAHooks.cpp):

* `Tensor.is_pinned` calls cudaPointerGetAttributes, which also recognises registered pages.
* `copy_(non_blocking=True)` is one cudaMemcpyAsync, whether the memory is pinned or not. CUDA
  stages copies of unpinned memory: a copy to the device returns once the source has been read, and
  a copy to the host returns once the data has arrived. A failed registration therefore makes copies
  slower, but never incorrect.
* torch's host allocator keeps memory alive until copies are done, but only memory that it allocated
  itself. After starting a copy from or to registered memory, wait for an event before you write,
  read or free that memory.
"""

import contextlib
import logging
import mmap
import weakref

import torch

log = logging.getLogger("ullage.engine.memory")


def whole_pages(num_bytes: int) -> int:
    """Round a size in bytes up to a multiple of the page size."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PinnedMemory:
    """Host memory that stays registered with CUDA until this object is closed or dropped.

    If the device is a CPU, the memory is not pinned. If CUDA refuses to pin it, it stays unpinned
    and a warning is logged once.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device, name: str) -> None:
        """Register existing memory for copies to and from `device`.

        Args:
            tensor: a contiguous CPU tensor. Its memory is kept alive while it is registered.
            name: name of the setting that requires the memory, for log messages.
        """
        self.tensor = tensor
        self._unregister: weakref.finalize[[torch.Tensor, torch.device], PinnedMemory] | None = None
        if device.type == "cuda" and tensor.nbytes and _register(tensor, name):
            # Memory must not be unmapped while it is registered, so the finalizer keeps it alive.
            self._unregister = weakref.finalize(self, _unregister, tensor, device)
            # At exit the driver does it, and torch's CUDA may be gone before.
            self._unregister.atexit = False

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device, name: str) -> "PinnedMemory":
        """Allocate `num_bytes` of page-aligned, zeroed memory whose pages are all resident."""
        if not num_bytes:
            return cls(torch.empty(0, dtype=torch.uint8), device, name)

        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)

        # Several threads touch the pages here, cudaHostRegister would do it with one.
        return cls(torch.frombuffer(mapping, dtype=torch.uint8).zero_(), device, name)

    @property
    def is_pinned(self) -> bool:
        return self._unregister is not None and self._unregister.alive

    def close(self) -> None:
        """Wait for all copies, then unregister the memory. Views stay valid but are unpinned."""
        if self._unregister is not None:
            self._unregister()


def _register(tensor: torch.Tensor, name: str) -> bool:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(status) == 0:
        return True

    log.warning(
        "%s: %d MiB of host memory cannot be pinned (CUDA error %d, %s), so copies between it and "
        "the GPU are slower; raise the container's memory limit, and its limit of locked memory "
        "(ulimit -l)",
        name,
        tensor.nbytes >> 20,
        int(status),
        cudart.cudaGetErrorString(status),
    )
    _clear_last_error()
    return False


def _unregister(tensor: torch.Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostUnregister(tensor.data_ptr())
    if int(status):
        message = cudart.cudaGetErrorString(status)
        log.warning("pinned host memory is not released (CUDA error %d, %s)", int(status), message)
        _clear_last_error()


def _clear_last_error() -> None:
    """Clear CUDA's last error, which torch would otherwise attribute to the next kernel launch.

    torch has no function for this, but launching a kernel reports the error and clears it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
