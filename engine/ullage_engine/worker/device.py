"""The device of a rank: which one it is, and how much of its memory may be and is used."""

import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import psutil
import torch

from ullage_common.config.engine import EngineConfig
from ullage_common.process.cores import usable_cores
from ullage_common.process.memory import container_limit, free_bytes, trim_heap, usable_bytes
from ullage_engine.kernels import triton
from ullage_engine.memory.ledger import Ledger, mib
from ullage_engine.protocol.errors import WorkerStartError

log = logging.getLogger("ullage.engine.worker")


class HostTier(NamedTuple):
    """Memory of the host tier, as a command line says it; see `ullage_kv.Arena.attach`."""

    path: str
    num_bytes: int


def prepare_device(config: EngineConfig, rank: int) -> torch.device:
    """Prepares a rank's device with everything that computing starts there, and returns it.

    Raises:
        WorkerStartError: there is no such device.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise WorkerStartError(
            f"device: cuda is asked for, but torch finds no GPU: {_why_no_gpu()}"
        )
    torch.set_num_threads(config.server.threads or max(1, usable_cores() // config.gpus))
    device = torch.device("cpu")
    if has_cuda and config.device != "cpu":
        device = _cuda_device(config, rank)
    # Starts the thread pool and the libraries, whose memory is the context; then the kernels.
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
    """Opens the ledger of this rank's device: a GPU, or its share of the host's memory.

    `host_tier`: bytes of host memory that KV outside the device has taken.
    """
    memory = config.memory
    if device.type == "cpu":
        if memory.tiers.asked_host_bytes is None:
            host_tier = 0  # it lies in what the threshold leaves
        total = _cpu_bytes(memory.device_bytes, config.gpus, host_tier)
        return Ledger(total, memory.threshold, configurable=True)
    total = int(torch.cuda.mem_get_info(device)[1])
    return Ledger(total, memory.threshold, configurable=False)


def with_budget(config: EngineConfig, device_bytes: int | None) -> EngineConfig:
    """Returns the configuration with the CPU budget that rank 0 decided; None leaves it as it
    is."""
    if device_bytes is None:
        return config
    memory = msgspec.structs.replace(config.memory, device_bytes=device_bytes)
    return msgspec.structs.replace(config, memory=memory)


def _cpu_bytes(configured: int | None, num_ranks: int, host_tier: int) -> int:
    """Returns the budget of one worker process: as configured, else its share of what is usable.

    `host_tier`: bytes of the host tier, which is beside it.
    """
    limit = container_limit()
    if configured is None:
        # The host tier has its memory already: what the machine has free is what remains.
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


_PAGE = 4096


class MemoryMeter:
    """A meter of memory in use: resident bytes of this process, or used bytes of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self.shared_bytes = 0
        """Resident bytes that belong to another process and do not count."""

    def used_bytes(self) -> int:
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return int(total - free)
        return int(self._process.memory_info().rss) - self.shared_bytes

    def free_bytes(self) -> int:
        """Bytes of the device that are free; on a CPU, those that the container may take."""
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return free_bytes()


def processor_of(device: torch.device) -> str:
    """Names what decides in which order and precision a device computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def check_pinned(num_bytes: int, free_host_bytes: int, num_ranks: int) -> None:
    """Checks that the host has the memory that one rank pins for swapped KV.

    Raises:
        WorkerStartError: it has not; the kernel would end the pod.
    """
    if num_bytes > free_host_bytes:
        raise WorkerStartError(
            f"memory.hostKV: {mib(num_bytes * num_ranks)} of pinned host memory are more than the "
            f"{mib(free_host_bytes * num_ranks)} that this container may still take; raise its "
            "memory limit or set less"
        )


def touch_pages(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Makes mapped weights resident now; else they would be read while serving."""
    if device.type != "cpu":
        return
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8)[::_PAGE].sum()


def give_back_freed() -> None:
    """Returns freed memory to the kernel, so that what loading took is not taken for used."""
    trim_heap()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
