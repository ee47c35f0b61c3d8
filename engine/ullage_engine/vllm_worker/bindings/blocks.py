"""Access to the KV blocks in vLLM's pool, and the type of KV data in each cache group."""

from collections.abc import Iterable, Mapping, Sequence

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock, _pool_bytes_per_block
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.vllm_worker.interface import Prefix
from ullage_engine.vllm_worker.session_blocks import SessionBlocks


class _Prefix:
    def __init__(self, groups: Sequence[Sequence[KVCacheBlock]], slides: Sequence[bool]) -> None:
        """Create a prefix from the cached blocks of each cache group.

        Args:
            groups: cached blocks of each cache group.
            slides: for each cache group, whether a sequence releases blocks as it grows, as with
                sliding windows and recurrent states.
        """
        pairs = list(zip(groups, slides, strict=True))
        self.lasting = [each for group, has_window in pairs if not has_window for each in group]
        self.windows = [
            each for group, has_window in pairs if has_window for each in group if not each.is_null
        ]

    @property
    def blocks(self) -> list[KVCacheBlock]:
        return self.lasting + self.windows

    @property
    def num_blocks(self) -> int:
        return len(self.lasting) + len(self.windows)

    @property
    def num_held(self) -> float:
        return len(self.lasting) + _shares(self.windows)


def _shares(blocks: Iterable[KVCacheBlock]) -> float:
    """Return the number of blocks, where a block shared by n requests counts as 1/n."""
    return sum(1 / int(each.ref_cnt) for each in blocks if not each.is_null)


class VllmBlocks:
    """The KV blocks in vLLM's pool. See `interface.Blocks`."""

    def __init__(self, scheduler: Scheduler, requests: Mapping[str, Request]) -> None:
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        managers = self._manager.coordinator.single_type_managers
        self._tables = [each.req_to_blocks for each in managers]
        # State blocks are shared like window blocks: sequences move on to other ones.
        self._slides = [
            isinstance(each.kv_cache_spec, SlidingWindowSpec | MambaSpec) for each in managers
        ]
        self._requests = requests
        self._session_blocks = SessionBlocks()

    @property
    def num_blocks(self) -> int:
        # Leave out the null block, which replaces all blocks that windows have left behind.
        return max(0, int(self._pool.num_gpu_blocks) - 1)

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def num_held(self, request_id: str) -> float:
        request = self._requests.get(request_id)
        if request is None:
            return 0
        num_held = 0.0
        for table, slides in zip(self._tables, self._slides, strict=True):
            blocks = table.get(request.request_id, ())
            num_held += _shares(blocks) if slides else len(blocks)
        return num_held

    def num_in_tables(self, request_id: str) -> int:
        request = self._requests.get(request_id)
        if request is None:
            return 0
        tables = [table.get(request.request_id, ()) for table in self._tables]
        return sum(not block.is_null for table in tables for block in table)

    def num_computed(self, request_id: str) -> int:
        request = self._requests.get(request_id)
        return int(request.num_computed_tokens) if request else 0

    def num_cached(self, request: Request) -> int:
        """Return how many of a request's tokens are in the prefix cache."""
        return int(self._manager.get_computed_blocks(request)[1])

    def hold_prefix(self, request_id: str) -> Prefix:
        groups = self._manager.get_computed_blocks(self._requests[request_id])[0].blocks
        prefix = _Prefix(groups, self._slides)
        self._pool.touch(prefix.blocks)
        return prefix

    @property
    def num_reclaimable(self) -> float:
        return self._session_blocks.num_reclaimable()

    def on_session(self, prefix: Prefix) -> None:
        assert isinstance(prefix, _Prefix)
        self._session_blocks.add(prefix.lasting, prefix.windows)

    def on_session_end(self, prefix: Prefix) -> None:
        assert isinstance(prefix, _Prefix)
        self._session_blocks.remove(prefix.lasting, prefix.windows)

    def release(self, prefix: Prefix) -> None:
        assert isinstance(prefix, _Prefix)
        # Evict the end of a prefix first. It is useless without the beginning.
        self._pool.free_blocks(reversed(prefix.blocks))


class GroupKind:
    """Kind of KV in a cache group: full attention, a sliding window or recurrent states."""

    def __init__(self, block_tokens: int, window_tokens: int = 0, state_blocks: int = 0) -> None:
        self.block_tokens = block_tokens
        """Tokens per block. Not meaningful for recurrent states."""
        self.window_tokens = window_tokens
        self.state_blocks = state_blocks


def group_kind(group: KVCacheGroupSpec, config: VllmConfig) -> GroupKind:
    """Return what kind of KV one of vLLM's cache groups keeps.

    Raises:
        WorkerStartError: the memory use of this kind of KV cannot be predicted.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, SlidingWindowSpec):
        # vLLM keeps this many more tokens than the window.
        window_tokens = spec.sliding_window + spec.extra_retained_tokens
        return GroupKind(spec.block_size, window_tokens=window_tokens)
    if isinstance(spec, MambaSpec):
        blocks = -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        return GroupKind(spec.block_size, state_blocks=blocks)
    if isinstance(spec, FullAttentionSpec):
        return GroupKind(spec.block_size)
    raise WorkerStartError(
        f"model.source: its layers keep {type(spec).__name__}, whose memory cannot be predicted"
    )


def pool_block_bytes(rank: KVCacheConfig, config: VllmConfig) -> int:
    """Return the size of a KV block on one rank, in bytes. All cache groups use the same size."""
    return int(_pool_bytes_per_block(config, rank.kv_cache_groups))
