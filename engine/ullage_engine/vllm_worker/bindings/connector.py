"""vLLM KV connector that keeps KV in tiers outside the device.

vLLM creates one connector for its scheduler, in the worker's process, and one in each rank's
process. The scheduler's connector delegates to `ConnectorTransfers` once `use` has been called.
Each rank's connector copies between KV blocks on its device and the shared memory of the host tier.
A slot stores one block: the data of all tensor-parallel ranks, one after another.
"""

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ullage_engine.pinned_memory import PinnedMemory
from ullage_engine.vllm_worker.bindings.blocks import group_kind
from ullage_engine.vllm_worker.tiers import ConnectorTransfers, Copies
from ullage_engine.worker.device import HostTier
from ullage_kv import Arena


def transfer_config(host_tier: HostTier) -> KVTransferConfig:
    """Return the vLLM configuration that selects this connector."""
    return KVTransferConfig(
        kv_connector=TierConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_connector_extra_config={"host_tier": tuple(host_tier)},
    )


@dataclass
class _StepCopies(KVConnectorMetadata):  # type: ignore[misc]
    copies: Copies


@dataclass
class _StepCopied(KVConnectorWorkerMetadata):  # type: ignore[misc]
    number: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self  # all ranks have made the copies of this step


class TierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV connector between vLLM and the KV tiers. It does nothing until `use` is called."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._tiers: ConnectorTransfers | None = None
        self._manager: KVCacheManager | None = None
        self._requests: dict[str, Request] = {}
        """Active requests by vLLM's request ids."""
        self.part: RankPart | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        # Blocks that fail to load are recomputed.
        return False

    # of the scheduler ----------------------------------------------------------------------------

    def use(self, tiers: ConnectorTransfers) -> None:
        """Start delegating the scheduler's calls to `tiers`."""
        self._tiers = tiers

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager

    def on_new_request(self, request: Request) -> None:
        if self._tiers is not None:
            self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._tiers is None or self._manager is None:
            return 0, False
        size = self._vllm_config.cache_config.block_size
        num_blocks = self._tiers.num_matched(
            request.request_id, request.all_token_ids, num_computed_tokens // size
        )
        # The step that starts the request copies the blocks in.
        return None if num_blocks is None else num_blocks * size, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._tiers is not None and num_external_tokens:
            num_blocks = num_external_tokens // self._vllm_config.cache_config.block_size
            self._tiers.load(request.request_id, blocks.get_block_ids()[0], num_blocks)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._tiers is None or self._manager is None:
            return _StepCopies(Copies(0))
        for name in scheduler_output.num_scheduled_tokens:
            request = self._requests.get(name)
            if request is not None:
                cached = self._cached_blocks(name)
                self._tiers.offer(name, request.all_token_ids, cached)
        return _StepCopies(self._tiers.plan())

    def _cached_blocks(self, name: str) -> Sequence[int]:
        """Return a request's leading blocks, up to the first that is not in the prefix cache."""
        assert self._manager is not None
        [blocks] = self._manager.get_blocks(name).blocks
        num_cached = 0
        for block in blocks:
            if block.block_hash is None:
                break
            num_cached += 1
        return [block.block_id for block in blocks[:num_cached]]

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        copied = connector_output.kv_connector_worker_meta
        if self._tiers is not None and isinstance(copied, _StepCopied):
            self._tiers.on_copied(copied.number)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        # If True, vLLM steps even without a request.
        return self._tiers is not None and self._tiers.has_granted

    # of a rank -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not refusal(self._kv_cache_config, self._vllm_config):
            path, num_bytes = self._kv_transfer_config.kv_connector_extra_config["host_tier"]
            num_blocks = self._kv_cache_config.num_blocks
            rank = self._vllm_config.parallel_config.rank
            host_tier = HostTier(path, num_bytes)
            with contextlib.suppress(ValueError):
                self.part = RankPart(host_tier, kv_caches.values(), num_blocks, rank)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.part is not None:
            self.part.load(self._get_connector_metadata().copies.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because all layers are loaded before the first layer is computed."""

    def save_kv_layer(self, layer_name: str, *_: Any, **__: Any) -> None:
        """Do nothing, because blocks are copied once all layers have been computed."""

    def wait_for_save(self) -> None:
        if self.part is not None:
            self.part.store(self._get_connector_metadata().copies.stores)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        number = self._get_connector_metadata().copies.number
        return _StepCopied(number) if number else None


class RankPart:
    """Copies one rank's part of KV blocks between its device and the host tier's shared memory."""

    def __init__(
        self,
        host_tier: HostTier,
        kv_caches: Iterable[torch.Tensor],
        num_blocks: int,
        tensor_rank: int,
    ) -> None:
        """Attach to the shared memory of the host tier.

        Raises:
            ArenaError: the process that owns the shared memory has exited.
            ValueError: the bytes of a block are not contiguous in a layer's tensor.
        """
        self._pools = [_by_block(each, num_blocks) for each in _apart(kv_caches)]
        self.block_bytes = sum(pool.shape[1] for pool in self._pools)
        self._start = tensor_rank * self.block_bytes
        arena = Arena.attach(*host_tier)
        arena.make_resident()
        self.arena = arena
        memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        device = self._pools[0].device
        self._pinned = PinnedMemory(memory, device, "memory.tiers.host")
        self._is_async = device.type == "cuda"

    def load(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy host-tier slots to device blocks, before the device's next computation."""
        for slot, block in copies:
            for pool, part in zip(self._pools, self._parts(slot), strict=True):
                pool[block].copy_(part, non_blocking=self._is_async)

    def store(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks to host-tier slots, and wait until the copies are complete."""
        for block, slot in copies:
            for pool, part in zip(self._pools, self._parts(slot), strict=True):
                part.copy_(pool[block], non_blocking=self._is_async)
        if self._is_async and copies:
            torch.cuda.current_stream().synchronize()

    def _parts(self, slot: int) -> Sequence[torch.Tensor]:
        start = slot * self.arena.slot_bytes + self._start
        own = self._pinned.tensor[start : start + self.block_bytes]
        return torch.split(own, [pool.shape[1] for pool in self._pools])


def _apart(kv_caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the KV tensors without duplicates, because several layers may share a tensor."""
    return list({each.data_ptr(): each for each in kv_caches}.values())


def _by_block(layer: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View a layer's KV tensor [kernel block, ...] as a byte matrix [vLLM block, byte].

    vLLM may split its blocks into smaller blocks for the kernels.

    Raises:
        ValueError: the bytes of a block are not contiguous.
    """
    # vLLM may split its blocks into smaller ones for the kernels.
    parts, rest = divmod(layer.shape[0], num_blocks)
    pairs = list(zip(layer.shape[1:], layer.stride()[1:], strict=True))
    length = math.prod(size for size, _ in pairs)
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    if rest or span != length or (parts > 1 and layer.stride(0) != length):
        raise ValueError(f"KV {tuple(layer.shape)} with strides {layer.stride()}")
    memory = torch.empty(0, dtype=torch.uint8, device=layer.device)
    return memory.set_(
        layer.untyped_storage(),
        layer.storage_offset() * layer.itemsize,
        (num_blocks, parts * length * layer.itemsize),
        (parts * layer.stride(0) * layer.itemsize, 1),
    )


def refusal(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> str:
    """Return why a model's blocks cannot be copied to tiers, or "" if they can."""
    groups = kv_cache_config.kv_cache_groups
    kinds = [group_kind(group, vllm_config) for group in groups]
    if len(groups) != 1 or kinds[0].window_tokens or kinds[0].state_blocks:
        return "its layers keep KV of several kinds, or with windows or states"
    if vllm_config.speculative_config is not None:
        return "it computes with a draft model"
    return ""


def part_format(worker: Any) -> tuple[int, list[str]]:
    """Return how many bytes of each block one rank copies, and a description of their layout.

    The description names the attention backends and the KV layout, but not the model.

    Args:
        worker: vLLM's worker for the rank. The function runs in the worker's process.

    Returns:
        The size in bytes, or 0 if the rank cannot copy its blocks, and a list of strings that
        describe the layout.
    """
    connector = get_kv_transfer_group()
    assert isinstance(connector, TierConnector)
    if connector.part is None:
        return 0, []
    layers = worker.vllm_config.compilation_config.static_forward_context
    facts = {
        f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}"
        for layer in layers.values()
        if hasattr(layer, "get_attn_backend")
    }
    layout = worker.vllm_config.cache_config.kv_cache_layout
    return connector.part.block_bytes, [*sorted(facts), str(layout)]


def cut_slots(_worker: Any, block_bytes: int) -> None:
    """Divide one rank's mapping of the host tier's shared memory into slots.

    Args:
        block_bytes: size of a slot in bytes, which holds one block's data from all ranks.
    """
    connector = get_kv_transfer_group()
    assert isinstance(connector, TierConnector)
    assert connector.part is not None, "nothing is copied"
    connector.part.arena.cut(block_bytes)


def content_of(pool: BlockPool, block: int) -> object:
    """Return the hash of a block's cached content, or None if the block is not cached."""
    return pool.blocks[block].block_hash
