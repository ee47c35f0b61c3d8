"""A rank's device: selection, memory budget and memory usage."""

import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import psutil
import torch

from ullage_common.config.engine import EngineConfig
from ullage_common.process.cores import usable_cores
from ullage_common.process.memory import container_limit, free_bytes, trim_heap, usable_bytes
from ullage_engine.gpu.nvml import Gpu, Nvml, NvmlUnavailableError
from ullage_engine.kernels import triton
from ullage_engine.kernels.first_calls import make_first_calls
from ullage_engine.memory.ledger import Ledger, mib
from ullage_engine.memory.shared_device import (
    allocator_fraction,
    bytes_of_others,
    differs,
    find_own,
    own_bytes,
    wait_for_memory,
)
from ullage_engine.protocol.errors import WorkerStartError

log = logging.getLogger("ullage.engine.worker")

_PAGE = 4096
_MIB = 1 << 20

# The start.
_IDLE_BYTES = 2048 * _MIB
"""Maximum bytes in use, including the driver's own memory, for a GPU to count as idle at
startup."""

# The probe: an allocation by which a process finds itself in the driver's list. The size is one of
# several, so that two engines that start together seldom choose the same.
_PROBE_BYTES = 40 * _MIB
"""Minimum size in bytes of the probe, an allocation that a process makes to recognise itself in the
driver's list of processes."""
_PROBE_STEP = 2 * _MIB
"""Difference in bytes between consecutive possible sizes of the probe."""
_PROBE_SIZES = 64
"""Number of possible sizes of the probe. Engines that start together rarely pick the same one."""

# The workspace while serving.
_HOST_PROBE_BYTES = 8 << 20
"""Bytes to allocate in order to test whether a step can be retried after running out of host
memory."""
_SMALL_SEGMENTS = 16 * _MIB
"""Bytes of the workspace that `Workspace.restore` does not have to reallocate.

They allow for small tensors, which the allocator places in segments of 2 MiB.
"""
_FREE_FOR_LIBRARIES = 16 * _MIB
"""Bytes to leave free outside torch's allocator, so that libraries can load kernels."""
_RECENT_S = 1.0
"""Minimum seconds between measurements of a GPU's memory usage while the worker is serving."""


class HostTier(NamedTuple):
    """Path and size of the host tier's memory. See `ullage_kv.Arena.attach`."""

    path: str
    num_bytes: int


class GpuAtStart(NamedTuple):
    """A GPU and its memory as reported by the driver before this process used any of it."""

    gpu: Gpu
    free_bytes: int
    """Number of bytes that were free once exited processes had released their memory."""
    total_bytes: int


def open_driver(config: EngineConfig, rank: int) -> GpuAtStart | None:
    """Return a rank's GPU and its free memory at startup, or None on a CPU.

    The free memory is measured after exited processes have released their memory. The result is
    also None if the driver does not report the memory. Call this before anything uses the GPU,
    because creating a CUDA context takes up GPU memory.
    """
    if config.device == "cpu" or not torch.cuda.is_available():
        return None

    gpus = visible_gpus(rank + 1)
    return at_start(gpus[rank]) if len(gpus) > rank else None


def visible_gpus(num_gpus: int) -> list[Gpu]:
    """Return the first `num_gpus` GPUs visible to CUDA, or fewer if the driver lists fewer."""
    try:
        return Nvml().gpus(os.environ, num_gpus)
    # AttributeError comes from other bindings of NVML.
    except (NvmlUnavailableError, AttributeError) as error:
        log.info("the driver does not show which process holds which memory of a GPU: %s", error)
        return []


def at_start(gpu: Gpu) -> GpuAtStart | None:
    """Wait until exited processes have freed a GPU's memory, and return how much is free.

    Returns:
        The GPU and its memory, or None if the driver does not report the GPU's memory.
    """
    memory = gpu.free_and_total_bytes()
    if memory is None:
        return None
    total = memory[1]

    started = time.monotonic()
    free = wait_for_memory(lambda: free_of(gpu), total - _IDLE_BYTES)
    seconds = round(time.monotonic() - started, 1)
    extra = {"free_bytes": free, "seconds": seconds}
    log.info("%s of the GPU are free at the start", mib(free), extra=extra)

    return GpuAtStart(gpu, free, total)


def free_of(gpu: Gpu) -> int:
    """Return a GPU's free bytes without creating a CUDA context, or 0 if the query fails."""
    memory = gpu.free_and_total_bytes()
    return memory[0] if memory else 0


def names_of(sizes: Mapping[int, int]) -> str:
    """Format processes and their memory usage for use in messages, largest first."""
    largest = sorted(sizes.items(), key=lambda entry: entry[1], reverse=True)
    listed = [f"process {pid} with {mib(size)}" for pid, size in largest]
    return ", ".join(listed) or "other processes"


def prepare_device(config: EngineConfig, rank: int) -> torch.device:
    """Set up the device, threads and libraries of a rank, and return the device.

    Raises:
        WorkerStartError: the configured device does not exist.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise WorkerStartError(
            f"device: cuda is asked for, but torch finds no GPU: {_why_no_gpu()}"
        )

    torch.set_num_threads(config.server.threads or max(1, usable_cores() // config.gpus))
    make_first_calls()
    device = torch.device("cpu")
    if has_cuda and config.device != "cpu":
        device = _cuda_device(config, rank)

    # The product starts the thread pool and the libraries, whose memory counts as the context.
    torch.ones((256, 256), device=device) @ torch.ones((256, 256), device=device)
    triton.runs_on(device)
    return device


def _why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "this image's torch is for CPUs; use one like engine-cuda, or set device: cpu"
    return "see the container's devices and the node's driver, or set device: cpu"


def _cuda_device(config: EngineConfig, rank: int) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if config.gpus > num_gpus:
        raise WorkerStartError(
            f"pools.{config.server.pool}.gpus: {config.gpus} are asked for, but torch finds "
            f"{num_gpus}; set {num_gpus} or fewer, and parallelism to match"
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def open_ledger(config: EngineConfig, device: torch.device, host_tier: int = 0) -> Ledger:
    """Open the memory ledger for this rank's device: a GPU, or the rank's part of host memory.

    `host_tier` is the size in bytes of the KV host tier, which also takes up host memory.
    """
    memory = config.memory
    if device.type == "cpu":
        if memory.tiers.asked_host_bytes is None:
            # A tier that is not configured lies in the memory that the threshold leaves free.
            host_tier = 0
        total = _cpu_bytes(memory.device_bytes, config.gpus, host_tier)
        return Ledger(total, memory.threshold, configurable=True)

    total = int(torch.cuda.mem_get_info(device)[1])
    return Ledger(total, memory.threshold, configurable=False)


def with_budget(config: EngineConfig, device_bytes: int | None) -> EngineConfig:
    """Return a copy of the configuration with `device_bytes` as the CPU memory budget.

    If `device_bytes` is None, return the configuration itself.
    """
    if device_bytes is None:
        return config
    memory = msgspec.structs.replace(config.memory, device_bytes=device_bytes)
    return msgspec.structs.replace(config, memory=memory)


def _cpu_bytes(configured: int | None, num_ranks: int, host_tier: int) -> int:
    """Return a worker process's memory budget, as configured or as a fraction of usable memory.

    The budget excludes the host tier, whose size in bytes is `host_tier`.
    """
    limit = container_limit()
    if configured is None:
        # The host tier has its memory already, so the machine's free memory excludes the tier.
        usable = usable_bytes()
        return (usable if limit is None else min(usable, limit - host_tier)) // num_ranks

    if limit is not None and configured * num_ranks + host_tier > limit:
        share = mib(configured) + (f" for each of {num_ranks} workers" if num_ranks > 1 else "")
        beside = f" beside the {mib(host_tier)} of memory.tiers.host.size" if host_tier else ""
        raise WorkerStartError(
            f"memory.deviceBytes: {share}{beside} is more than the container's limit of "
            f"{mib(limit)}; raise the limit or set less"
        )

    return configured


class MemoryMeter:
    """Measures how much memory this process uses: resident memory, or memory on a CUDA device."""

    def __init__(self, device: torch.device, driver: GpuAtStart | None = None) -> None:
        """Create a meter for a device.

        `driver` has the memory that the driver reported before this process used the GPU.
        """
        self._device = device
        self._process = psutil.Process()
        self._recent = (0, -_RECENT_S)
        self.shared_bytes = 0
        """Resident bytes to exclude, because they are accounted for by another process."""

        self._driver = driver if driver is not None and self._is_shown_by(driver) else None
        self._pid = self._probe(self._driver) if self._driver is not None else None
        """Process id under which the driver lists this process, or None if unknown."""
        if device.type == "cuda":
            log.info("source of the GPU's own bytes: %s", self.source, extra={"pid": self._pid})

    @property
    def source(self) -> str:
        """How memory usage is measured: `resident`, `nvml`, `difference` or `device`.

        On a CPU, the process's resident memory is measured (`resident`). On a GPU, the driver
        usually lists the memory of each process (`nvml`). If the driver does not list this process,
        its usage is estimated from the decrease in free memory since startup (`difference`). If the
        driver's reports cannot be used at all, the usage is estimated from all memory in use on the
        device (`device`).
        """
        if self._device.type != "cuda":
            return "resident"
        if self._driver is None:
            return "device"
        return "difference" if self._pid is None else "nvml"

    def used_bytes(self) -> int:
        """Return the number of bytes that this process is using."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            free_before = total if self._driver is None else self._driver.free_bytes
            return own_bytes(self._listed(), free_before, int(free), self.reserved_bytes())
        return int(self._process.memory_info().rss) - self.shared_bytes

    def recent_bytes(self) -> int:
        """Return `used_bytes`, cached for a second on GPUs because driver queries are slow."""
        if self._device.type != "cuda":
            return self.used_bytes()

        measured, measured_at = self._recent
        now = time.monotonic()
        if now - measured_at >= _RECENT_S:
            measured = self.used_bytes()
            self._recent = (measured, now)
        return measured

    def reserved_bytes(self) -> int:
        """Return the device bytes that torch's allocator has reserved, or 0 on a CPU."""
        if self._device.type != "cuda":
            return 0
        return torch.cuda.memory_reserved(self._device)

    def others(self) -> str:
        """Format the device's other processes and their memory usage for use in messages."""
        if self._driver is None or self._pid is None:
            return names_of({})
        listed = self._driver.gpu.process_bytes()
        return names_of({pid: size for pid, size in listed.items() if pid != self._pid})

    def free_bytes(self) -> int:
        """Return the free bytes of the GPU, or of the container if the device is a CPU."""
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return free_bytes()

    def wait_for_free(self, enough: int) -> int:
        """Wait until exited processes have released their memory. See `wait_for_memory`."""
        if self._device.type != "cuda":
            return self.free_bytes()
        return wait_for_memory(self.free_bytes, enough)

    def _listed(self) -> int | None:
        if self._driver is None or self._pid is None:
            return None
        return self._driver.gpu.process_bytes().get(self._pid)

    def _is_shown_by(self, driver: GpuAtStart) -> bool:
        """Return whether CUDA and the driver refer to the same GPU. Log a warning if not.

        On a machine with different GPU models, they may refer to different ones, because CUDA
        orders GPUs by speed and the driver orders them by PCI bus.
        """
        used = str(torch.cuda.get_device_properties(self._device).uuid).removeprefix("GPU-")
        shown = driver.gpu.uuid
        if used in shown or not shown.startswith("GPU-"):
            return True

        log.warning(
            "CUDA uses the GPU %s where the driver shows %s, which is not asked any more; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID",
            used,
            shown,
        )
        return False

    def _probe(self, driver: GpuAtStart) -> int | None:
        """Find this process in the driver's list of processes by briefly allocating GPU memory.

        The process whose memory usage grows and shrinks accordingly is this one.

        Returns:
            The process id in the list, or None if the process was not found.
        """
        torch.cuda.empty_cache()
        reserved = self.reserved_bytes()
        before = driver.gpu.process_bytes()
        size = _PROBE_BYTES + _PROBE_STEP * secrets.randbelow(_PROBE_SIZES)
        try:
            probe = torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return None

        grown = self.reserved_bytes() - reserved
        during = driver.gpu.process_bytes()
        del probe
        torch.cuda.empty_cache()

        return find_own(before, during, driver.gpu.process_bytes(), grown)


def reserve_for_others(
    ledger: Ledger,
    device: torch.device,
    meter: MemoryMeter,
    *,
    safety_reserve: int,
    longest_kv: int,
) -> None:
    """Reserve the GPU memory that other processes use, so that it is not allocated to requests.

    Args:
        ledger: the ledger of the GPU.
        device: the device. On a CPU, nothing is reserved.
        meter: the device's memory meter.
        safety_reserve: size of the safety reserve in bytes.
        longest_kv: KV bytes of the longest possible sequence. If memory is short, this KV may use
            part of the safety reserve (see `bytes_of_others`).
    """
    if device.type != "cuda":
        return

    available = ledger.available_bytes
    unallocated = ledger.reserved_bytes - ledger.allocated_bytes
    free = meter.wait_for_free(available + unallocated)

    others = bytes_of_others(available, free, unallocated, safety_reserve, longest_kv)
    if not others:
        return

    names = meter.others()
    ledger.reserve_for_others(others, names)
    extra = {"free_bytes": free, "others_bytes": others}
    log.warning("%s of the budget are held by %s", mib(others), names, extra=extra)


def enforce_ledger(ledger: Ledger, device: torch.device, meter: MemoryMeter) -> None:
    """Check a GPU's final ledger against measured usage, and cap torch's memory accordingly.

    With the cap, torch raises an out-of-memory error before other processes or the driver run
    short.
    """
    if device.type != "cuda":
        return

    allocated = ledger.allocated_bytes
    used = meter.used_bytes()
    reserved = meter.reserved_bytes()

    figures = {"ledger_bytes": allocated, "own_bytes": used, "reserved_bytes": reserved}
    text = (
        f"the ledger has {mib(allocated)} allocated, the process {mib(used)} by {meter.source}, "
        f"{mib(reserved)} of them in torch's allocator"
    )
    log.info(text, extra=figures)
    if differs(allocated, used):
        log.warning("the ledger is wrong by more than 2 %%: %s", text, extra=figures)

    # torch multiplies this figure by the fraction.
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = allocator_fraction(ledger.promised_bytes, used - reserved, reserved, total)
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    log.info("torch's allocator may have %s of the GPU", mib(int(fraction * total)))


class Workspace:
    """The memory that torch's allocator keeps for a step's temporary tensors.

    Before the allocator raises an out-of-memory error, it frees all of this memory, which other
    processes may then take. The workspace must therefore be reallocated immediately afterwards.
    """

    def __init__(self, device: torch.device, meter: MemoryMeter) -> None:
        """Record the size of the workspace. Call this at the end of startup."""
        self._device = device
        self._meter = meter
        self._reserved = meter.reserved_bytes()

    def restore(self) -> bool:
        """Reallocate the freed memory. Return False if other processes have taken it.

        Call this outside the exception handler, where stack frames would keep the step's tensors
        alive.
        """
        if self._device.type != "cuda":
            return _has_host_memory()
        if not self._take_back():
            return False
        if self._meter.free_bytes() >= _FREE_FOR_LIBRARIES:
            return True

        # Libraries need memory that the allocator has taken in excess of the workspace. Only then
        # is the cache emptied, since the workspace is given away with it for a moment.
        if self._meter.reserved_bytes() <= self._reserved:
            return False
        torch.cuda.empty_cache()
        return self._take_back() and self._meter.free_bytes() >= _FREE_FOR_LIBRARIES

    def _take_back(self) -> bool:
        """Make the allocator reserve as much memory as at startup, and return whether it could."""
        lost = self._reserved - self._meter.reserved_bytes() - _SMALL_SEGMENTS
        try:
            if lost > 0:
                torch.empty(lost, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return False
        return True


def _has_host_memory() -> bool:
    """Return whether host memory can be allocated, possibly by reusing freed memory."""
    try:
        torch.empty(_HOST_PROBE_BYTES, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True


def check_pinned(num_bytes: int, free_host_bytes: int, num_ranks: int) -> None:
    """Check that the host has enough memory for the buffer that one rank pins for swapped KV.

    Raises:
        WorkerStartError: the host has too little memory, so the kernel would kill the pod.
    """
    if num_bytes > free_host_bytes:
        raise WorkerStartError(
            f"memory.hostKV: {mib(num_bytes * num_ranks)} of pinned host memory are more than the "
            f"{mib(free_host_bytes * num_ranks)} that this container may still take; raise its "
            "memory limit or set less"
        )


def touch_pages(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Page in memory-mapped weights now, so that no request has to wait for the disk."""
    if device.type != "cpu":
        return
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8)[::_PAGE].sum()


def give_back_freed() -> None:
    """Return freed memory to the system, so that it no longer counts as used after loading."""
    trim_heap()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
