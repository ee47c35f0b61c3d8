"""Records a vLLM worker's memory reservations in a ledger, and measures its memory usage."""

import logging
import math
import os
from pathlib import Path

import psutil
import torch

from ullage_common.config.engine import EngineConfig, kv_limit
from ullage_common.process.memory import free_bytes
from ullage_engine.memory.ledger import Ledger, mib
from ullage_engine.memory.shared_device import largest_share_of_others, own_bytes
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.vllm_worker import arguments
from ullage_engine.vllm_worker.adapters import num_slots, slot_bytes
from ullage_engine.vllm_worker.bindings import core as vllm_core
from ullage_engine.vllm_worker.oom_backoff import BackoffLimits
from ullage_engine.worker.device import (
    GpuAtStart,
    HostTier,
    MemoryMeter,
    at_start,
    free_of,
    names_of,
    visible_gpus,
)

log = logging.getLogger("ullage.engine.vllm")

_STAGING_BYTES = 64 << 20
"""Host memory in bytes for messages, token lists, grammars and queues, which vary with load."""


class StartMemory:
    """Builds a vLLM worker's memory ledger step by step during startup, on CPUs and GPUs."""

    def __init__(
        self,
        config: EngineConfig,
        host_tier: HostTier | None = None,
        limits: BackoffLimits = BackoffLimits(),  # noqa: B008 - immutable
    ) -> None:
        """Create the ledger before vLLM starts.

        Args:
            config: the engine's configuration.
            host_tier: memory for KV outside the device. None without a host tier.
            limits: limits on the KV pool and on a step, derived from earlier out-of-memory errors.
        """
        self._config = config
        self._limits = limits
        self.host_tier = host_tier
        self._shared_bytes = 0
        """Bytes of the host tier that are included in the resident memory of this node's ranks."""
        self._num_ranks = config.gpus
        self._num_nodes = config.group.nodes
        self._num_here = config.num_local_ranks
        self.is_cpu = vllm_core.is_cpu()
        self._process = psutil.Process()
        self._gpus: list[GpuAtStart] = []
        """This node's GPUs, one per rank. Empty on CPUs."""
        self._meter: MemoryMeter | None = None
        """The GPU's memory meter, if this process is the only rank.

        None on CPUs, or if the ranks are separate processes.
        """
        memory = config.memory
        if self.is_cpu:
            cores = sorted(os.sched_getaffinity(0))[: (config.server.threads or 1 << 20)]
            binding = arguments.core_binding(cores, self._num_here)
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding)
            total = vllm_core.cpu_budget(config, host_tier.num_bytes if host_tier else 0)
        else:
            self._gpus = _local_gpus(self._num_here)
            total = sum(gpu.total_bytes for gpu in self._gpus) * self._num_nodes
        self.ledger = Ledger(total, memory.threshold, configurable=self.is_cpu)
        self._context = self.used_bytes() if self.is_cpu else 0
        if self.is_cpu:
            self.ledger.record("context", self._context)
        else:
            self._reserve_for_others()
        if self.is_cpu and config.server.standby_worker:
            # The standby worker has already imported this process's libraries.
            self.ledger.reserve("standby", self._context // self._num_nodes)
        self.adapter_slots = 0
        """Maximum number of adapters that can be loaded at a time."""
        self._copy_bytes = 0
        """Maximum bytes of CPU memory that ranks need for an adapter in addition to its slot."""

    @property
    def rank_bytes(self) -> int:
        """Device memory per rank in bytes."""
        return self.ledger.total_bytes // self._num_ranks

    def plan_adapters(self, folder: Path, dtype: str, rank_bytes: int) -> None:
        """Decide how many adapters can be loaded at a time.

        All nodes use the same number: as many as fit on one of the leader's devices.

        Args:
            folder: folder of the checkpoint.
            dtype: dtype of the adapters' weights.
            rank_bytes: device memory per rank on the leader, in bytes.

        Raises:
            WeightsError: the checkpoint is incomplete.
        """
        config = self._config
        if not config.max_loras:
            return
        rank = arguments.lora_rank(config)
        size = slot_bytes(folder, rank, vllm_core.item_bytes(dtype))
        copy_bytes = size if self.is_cpu else 0  # vLLM keeps a copy next to the slots
        self.adapter_slots = num_slots(
            config.max_loras,
            int(rank_bytes * config.memory.adapter_share),
            # Each tensor rank counts with a whole slot, an upper bound of its part.
            -(-size // config.parallelism.pipeline),
            copy_bytes=copy_bytes,
            num_spare=arguments.spare_slots(self.is_cpu),
        )
        self._copy_bytes = copy_bytes * self._num_ranks
        facts = {"slot_bytes": size, "rank": rank}
        log.info(
            "%d of %d slots of adapters fit", self.adapter_slots, config.max_loras, extra=facts
        )

    @property
    def device_share(self) -> float | None:
        """Fraction of each GPU's memory that vLLM may use. None on CPUs.

        On CPUs, vLLM does not know how much memory the device has.
        """
        if self.is_cpu:
            return None
        reserve = self._config.memory.safety_reserve * self._num_ranks
        share = (self.ledger.budget_bytes - reserve) / self.ledger.total_bytes
        if share <= 0:
            raise self.ledger.shortage("safety_reserve", reserve)
        return share

    def _reserve_for_others(self) -> None:
        """Exclude memory held by other processes from the budget.

        vLLM uses the same fraction of every GPU's memory, and refuses to start if less is free. The
        GPU with the least free memory therefore determines the fraction for all GPUs.
        """
        memory = [(gpu.free_bytes, gpu.total_bytes) for gpu in self._gpus]
        share, fullest = largest_share_of_others(memory, self.ledger.threshold)
        if share <= 0.0:
            return
        names = names_of(self._gpus[fullest].gpu.process_bytes())
        size = math.ceil(share * self.ledger.total_bytes)
        self.ledger.reserve_for_others(size, names)
        log.warning("%.1f %% of each GPU are set aside for %s", 100 * share, names)

    def size_pool(
        self, vllm_bytes: list[int], adapter_bytes: int, free_first: list[int]
    ) -> list[int]:
        """Decide how many bytes of KV each rank gets.

        Args:
            vllm_bytes: bytes that vLLM leaves for KV on each rank. The rank's device context is not
                subtracted yet, because vLLM counts only memory that is allocated after the context.
            adapter_bytes: total bytes of all ranks' adapter slots.
            free_first: free bytes of each rank's GPU right after the rank created its context.
                Empty on CPUs.
        """
        config = self._config
        ledger = self.ledger
        reserve = config.memory.safety_reserve * self._num_ranks
        used = self.used_bytes() - self._context
        if not self.is_cpu:
            contexts = self._contexts(free_first)
            ledger.record("context", sum(contexts))
            vllm_bytes = [
                size - context for size, context in zip(vllm_bytes, contexts, strict=True)
            ]
            used = ledger.available_bytes - reserve - sum(vllm_bytes)

        self._record_model(used, adapter_bytes)
        ledger.reserve("staging", self._staging_bytes)
        most = self._limits.kv_bytes
        if most is not None:
            # Reserve only enough to keep the pool at its limit.
            spare = max(0, ledger.available_bytes - reserve - most)
            reserve += min(self._limits.reserve_bytes, spare)
        ledger.reserve("safety_reserve", reserve)

        share = ledger.available_bytes // self._num_ranks
        if share <= 0:
            raise ledger.shortage("kv_pool", 1 << 20)
        limit = kv_limit(config.memory, on_cpu=self.is_cpu)
        bound = share if limit is None else min(share, limit)
        if most is not None:
            bound = min(bound, most // self._num_ranks)
        log.info("KV: %s are free a rank, at most %s are taken", mib(share), mib(bound))
        return [min(bound, bound if self.is_cpu else size) for size in vllm_bytes]

    def _contexts(self, free_first: list[int]) -> list[int]:
        """Estimate the bytes taken by each rank's device context, libraries and transfer buffers.

        The estimate is the decrease in free memory while the rank started. The free memory before
        the start is known only for this node's GPUs. The GPUs of other nodes are assumed to have
        had as much free memory as the corresponding GPUs of this node.
        """
        before = [gpu.free_bytes for gpu in self._gpus] * self._num_nodes
        return [
            own_bytes(None, free_before, free, 0)
            for free_before, free in zip(before, free_first, strict=True)
        ]

    def settle(self, core: vllm_core.VllmCore) -> None:
        """Complete the ledger at the end of startup, by recording vLLM's KV pool.

        For a model without KV, this also records the model and the safety reserve. For other
        models, `size_pool` has already recorded them when vLLM asked for a pool size.
        """
        if "model" not in {each.name for each in self.ledger.states()}:
            # vLLM does not ask for a pool size if the model has no KV.
            adapter_bytes = core.blank_slots()
            self._record_model(self.used_bytes() - self._context, adapter_bytes)
            self.ledger.reserve(
                "safety_reserve", self._config.memory.safety_reserve * self._num_ranks
            )
        self.ledger.record("kv_pool", core.pool_bytes)
        if self._gpus and self._num_ranks == 1:
            self._meter = MemoryMeter(torch.device("cuda", 0), self._gpus[0])

    def attached(self) -> None:
        """Record the host tier in the ledger, once all ranks have mapped its memory."""
        assert self.host_tier is not None
        self.ledger.record_on_host("kv_host_tier", self.host_tier.num_bytes)
        self._shared_bytes = self.host_tier.num_bytes * self._num_here

    def _record_model(self, used: int, adapter_bytes: int) -> None:
        self.ledger.record("model", max(0, used - adapter_bytes))
        if self._config.max_loras:
            self.ledger.record("adapters", adapter_bytes)

    @property
    def _staging_bytes(self) -> int:
        if not self.is_cpu:
            return 0
        # An adapter that is checked before it is offered has a copy in host memory, but no slot.
        num_copies = self.adapter_slots + 1 if self.adapter_slots else 0
        return _STAGING_BYTES + num_copies * self._copy_bytes

    def used_bytes(self) -> int:
        """Return the bytes in use: resident memory of all ranks on CPUs, device memory on GPUs.

        Only this node is measured. The result assumes that every other node uses as much.
        """
        return self._used_here() * self._num_nodes

    def _used_here(self) -> int:
        if self._meter is not None:
            return self._meter.recent_bytes()
        if not self.is_cpu:
            # Memory that other processes took later is included. Ranks are separate processes, and
            # the driver may list them under ids of another namespace.
            return sum(max(0, each.free_bytes - free_of(each.gpu)) for each in self._gpus)
        used = int(self._process.memory_info().rss)
        if self._num_ranks > 1:
            for child in self._process.children(recursive=True):
                try:
                    used += int(child.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue
        return used - self._shared_bytes

    def allocator_bytes(self) -> int:
        """Return the bytes held by torch's GPU allocator, or 0 if this process is not a rank."""
        return 0 if self._meter is None else self._meter.reserved_bytes()

    def free_bytes(self) -> int:
        """Return the free bytes of the first GPU, or of the container on CPUs."""
        return free_bytes() if self.is_cpu else free_of(self._gpus[0].gpu)


def _local_gpus(num_ranks: int) -> list[GpuAtStart]:
    """Wait until exited processes have freed their GPU memory, and return the ranks' GPUs.

    Raises:
        WorkerStartError: the driver reports fewer GPUs than there are ranks.
    """
    gpus = [shown for gpu in visible_gpus(num_ranks) if (shown := at_start(gpu))]
    if len(gpus) < num_ranks:
        raise WorkerStartError(
            f"device: this node computes with {num_ranks} GPUs, but the driver shows the memory of "
            f"{len(gpus)}; see the container's devices and the node's driver, or set fewer gpus"
        )
    return gpus
