"""The device of a rank and what of its memory may be used."""

import msgspec
import torch

from ullage_engine.config import EngineConfig
from ullage_engine.cores import usable_cores
from ullage_engine.kernels import triton
from ullage_engine.memory.ledger import Ledger, mib
from ullage_rpc.memory import container_limit, usable_bytes


class StartError(Exception):
    """The worker cannot serve with this configuration; one line naming the field."""


def prepare_device(config: EngineConfig, rank: int) -> torch.device:
    """A rank's device, with everything on it that computing starts.

    Raises:
        StartError: there is no such device.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise StartError(f"device: cuda is asked for, but torch finds no GPU: {_why_no_gpu()}")
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
    found = torch.cuda.device_count()
    if config.gpus > found:
        raise StartError(
            f"pools.{config.server.pool}.gpus: {config.gpus} are asked for, but torch finds "
            f"{found}; set {found} or fewer, and parallelism to match"
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def open_ledger(config: EngineConfig, device: torch.device) -> Ledger:
    """The ledger of this rank's device: a GPU, or its share of the host's memory."""
    memory = config.memory
    if device.type == "cpu":
        total = _cpu_bytes(memory.device_bytes, config.gpus)
        return Ledger(total, memory.threshold, configurable=True)
    total = int(torch.cuda.mem_get_info(device)[1])
    return Ledger(total, memory.threshold, configurable=False)


def with_budget(config: EngineConfig, device_bytes: int | None) -> EngineConfig:
    """The configuration of a rank whose CPU budget rank 0 has decided; None: as it was."""
    if device_bytes is None:
        return config
    memory = msgspec.structs.replace(config.memory, device_bytes=device_bytes)
    return msgspec.structs.replace(config, memory=memory)


def _cpu_bytes(configured: int | None, num_ranks: int) -> int:
    """Budget of one worker process: as configured, else its share of all that is to be had."""
    limit = container_limit()
    if configured is None:
        return usable_bytes() // num_ranks
    if limit is not None and configured * num_ranks > limit:
        wanted = mib(configured) + (f" for each of {num_ranks} workers" if num_ranks > 1 else "")
        raise StartError(
            f"memory.deviceBytes: {wanted} is more than the container's limit of "
            f"{mib(limit)}; raise the limit or set less"
        )
    return configured
