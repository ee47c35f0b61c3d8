"""The KV pool with its memory of what was computed: blocks in use, kept for reuse, and free."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ullage_engine.kv.blocks import BlockPool
from ullage_engine.kv.radix import RadixTree
from ullage_engine.kv.sessions import Sessions


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """What is kept of KV that no running sequence needs."""

    prefix_cache: bool = True
    """Keep full blocks for requests that begin alike."""
    session_blocks: int = 0
    """Most blocks pinned for one session."""
    session_idle: float = 300.0
    """Seconds after which a session that is not used ends."""
    host_slots: int = 0
    """Blocks of host memory for swapped sequences."""


class KvStore:
    """Reference-counted blocks under a prefix cache, which holds one reference of each it knows.

    Blocks that only the cache holds are reclaimable: `allocate` evicts them as it needs them, so
    they count as available. A block the cache knows is never written again.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        policy: KvPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = BlockPool(num_blocks, block_tokens)
        self._tree = RadixTree(block_tokens)
        self._sessions = Sessions(self._tree, policy.session_blocks, policy.session_idle, clock)
        self._has_cache = policy.prefix_cache
        self._num_frees = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def block_tokens(self) -> int:
        return self._pool.block_tokens

    @property
    def has_cache(self) -> bool:
        return self._has_cache

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_reclaimable(self) -> int:
        """Blocks that are kept for reuse and can be had at once."""
        return self._tree.num_idle

    @property
    def num_available(self) -> int:
        return self._pool.num_free + self._tree.num_idle

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_available

    @property
    def num_cached_used(self) -> int:
        """Of the blocks that sequences hold, those in the cache, all of them full."""
        return self._tree.num_blocks - self._tree.num_idle

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_session_blocks(self) -> int:
        return self._tree.num_pinned

    def num_holders(self, block: int) -> int:
        """Sequences that hold the block."""
        return self._pool.references(block) - (block in self._tree)

    def is_cached(self, block: int) -> bool:
        return block in self._tree

    def is_shared(self, block: int) -> bool:
        """Whether anybody but one sequence reads the block, so that it must not be written."""
        return self._pool.references(block) > 1

    def match(self, token_ids: list[int]) -> list[int]:
        """Cached blocks of the longest beginning of `token_ids`, its last token excluded."""
        return self._tree.match(token_ids) if self._has_cache else []

    def num_idle(self, cached: Iterable[int]) -> int:
        """How many of these cached blocks are reclaimable."""
        return sum(self._tree.is_idle(block) for block in cached)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Takes `count` blocks, evicting what the cache keeps as far as needed.

        Raises:
            PoolExhaustedError: fewer are available.
        """
        missing = min(count - self._pool.num_free, self._tree.num_idle)
        for _ in range(missing):
            self._pool.free([self._evict()])
        return self._pool.allocate(count, after)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference for one more sequence."""
        blocks = list(blocks)
        self._pool.share(blocks)
        for block in blocks:
            if block in self._tree:
                self._tree.set_busy(block)

    def free(self, blocks: Iterable[int]) -> None:
        """Drops a sequence's references; what the cache knows stays, reclaimable."""
        blocks = list(blocks)
        self._num_frees += 1
        self._pool.free(blocks)
        for block in blocks:
            if block in self._tree:
                self._tree.set_used(block, self._num_frees)
                if self._pool.references(block) == 1:
                    self._tree.set_idle(block)

    def remember(self, token_ids: list[int], table: list[int], first: int, end: int) -> int:
        """Caches the full blocks `first` to `end` - 1 of a table, all before them being cached.

        Where the cache has the same tokens in another block, the table gets that one instead and
        its own is freed. The number of blocks saved that way.
        """
        if not self._has_cache:
            return 0
        size, num_merged = self.block_tokens, 0
        for index in range(first, end):
            parent, own = table[index - 1] if index else None, table[index]
            is_known = own in self._tree
            kept = self._tree.add(parent, tuple(token_ids[index * size : (index + 1) * size]), own)
            if kept != own:
                self.share([kept])
                self.free([own])
                table[index] = kept
                num_merged += 1
            elif not is_known:
                self._pool.share([own])
        return num_merged

    def keep_session(self, session_id: str, cached: list[int]) -> None:
        """Pins the cached blocks a session ended with; see `Sessions`."""
        self._sessions.keep(session_id, cached)

    def use_session(self, session_id: str) -> None:
        self._sessions.use(session_id)

    def end_idle_sessions(self) -> None:
        self._sessions.end_idle()

    def evict_all(self) -> None:
        """Forgets everything that no sequence uses."""
        while self._tree.num_idle:
            self._pool.free([self._evict()])

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Asserts that sequences with `tables` and the cache hold exactly what is allocated."""
        present = [list(table) for table in tables]
        held = {block for table in present for block in table}
        cached = [block for block in range(self.num_blocks) if block in self._tree]
        self._pool.check_integrity([*present, cached])
        self._tree.check_integrity()
        for block in cached:
            assert self._tree.is_idle(block) == (block not in held), f"block {block}: wrongly idle"

    def _evict(self) -> int:
        """Forgets one block: of no session if possible, else of the one used longest ago."""
        while (block := self._tree.evict()) is None:
            was_ended = self._sessions.end_oldest()
            assert was_ended, "idle blocks, and none of them evictable"
        return block
