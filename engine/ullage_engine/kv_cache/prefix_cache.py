"""The prefix cache, which tracks whether KV blocks are in use, kept for reuse, or free.

Sequences allocate blocks here and release them. A full block stays cached by content after its
sequence has finished, and a session's blocks are pinned between its turns. `radix_tree` finds
cached blocks by their tokens and chooses which block to evict next.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ullage_engine.kv_cache.block_pool import BlockPool
from ullage_engine.kv_cache.radix_tree import Path, RadixTree

MAX_SESSIONS = 1024
"""Maximum number of sessions that an engine keeps. Of more, the least recently used one ends."""


@dataclass(frozen=True, slots=True)
class _Session:
    """The cached blocks that one session has pinned."""

    path: list[int]
    """Pinned blocks, starting at the beginning of the conversation."""
    used_at: float
    """Time of the session's last use, in seconds."""
    last_used: int
    """Logical clock tick at which the session last used its blocks."""
    num_windows: int
    """Number of trailing blocks in `path` whose sliding-window blocks are pinned as well."""


class Sessions:
    """Pins each session's cached prefix until the session expires or its memory is needed.

    A session expires if it is idle for too long. Memory is reclaimed from the least recently used
    session first. Pinned blocks count as reclaimable, because ending their sessions unpins them.
    Blocks of an expired session are evicted before all other blocks, unless they were used again.
    """

    def __init__(
        self, tree: RadixTree, max_blocks: int, idle_s: float, clock: Callable[[], float]
    ) -> None:
        self._tree = tree
        self._max_blocks = max_blocks
        self._idle_s = idle_s
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self, session_id: str, path: list[int], last_used: int) -> None:
        """Pin the first blocks of a cached prefix, replacing the session's earlier pins.

        `path` lists the prefix's blocks in order. Blocks beyond the per-session limit are not
        pinned. `last_used` is the logical clock tick at which the session released the blocks.
        """
        path = path[: self._max_blocks]
        num_windows = len(self._tree.window_blocks(path))

        # Pin before the old path is unpinned, so that blocks of both never become evictable.
        for index, block in enumerate(path):
            self._tree.pin(block, with_window=index >= len(path) - num_windows)
        self._end(session_id)

        if path:
            self._sessions[session_id] = _Session(path, self._clock(), last_used, num_windows)
        while len(self._sessions) > MAX_SESSIONS:
            self.end_oldest()

    def use(self, session_id: str) -> None:
        """Restart the session's idle timer, because its next turn has begun."""
        session = self._sessions.pop(session_id, None)
        if session:
            self._sessions[session_id] = replace(session, used_at=self._clock())

    def end_idle(self) -> None:
        """End the sessions that have been idle for at least the configured time."""
        latest = self._clock() - self._idle_s
        while self._sessions and next(iter(self._sessions.values())).used_at <= latest:
            self._end(next(iter(self._sessions)), is_idle=True)

    def end_branch(self, block: int) -> None:
        """End the sessions whose conversations begin with this cached block."""
        for session_id in [key for key, each in self._sessions.items() if each.path[0] == block]:
            self._end(session_id)

    def end_oldest(self) -> bool:
        """End the least recently used session. Return False if there are no sessions."""
        if not self._sessions:
            return False
        self._end(next(iter(self._sessions)))
        return True

    def _end(self, session_id: str, *, is_idle: bool = False) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return

        # The deepest block first, so that leaves become evictable before their parents.
        idle_since = session.last_used if is_idle else None
        for number, block in enumerate(reversed(session.path)):
            self._tree.unpin(block, idle_since, with_window=number < session.num_windows)


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """Settings that limit how much KV is kept while no running sequence uses it."""

    prefix_cache: bool = True
    """Whether full blocks are kept so that requests with the same prefix can reuse them."""
    session_blocks: int = 0
    """Maximum number of blocks pinned for one session."""
    session_idle: float = 300.0
    """Seconds after which an unused session ends."""
    host_slots: int = 0
    """Number of host memory blocks that can hold swapped-out sequences."""
    swap_bytes_per_second: float = 4 << 30
    """Bandwidth between device and host memory in bytes per second, summed over all ranks."""
    kv_space: bytes = b""
    """Namespace of the KV blocks in tiers outside the device, or b"" if there are no such tiers."""
    prefetch: bool = True
    """Whether KV from other tiers may be copied to the device while a step is being computed.

    This is not possible with several ranks. No rank can tell when another rank has finished its
    copies, so host memory slots might be released while another rank is still reading them.
    """


class PrefixCache:
    """Allocates reference-counted KV blocks and keeps full ones so that later requests reuse them.

    The cache holds one reference to each block that it stores. Blocks that only the cache holds are
    reclaimable: `allocate` evicts them when needed, so they count as available. Cached blocks are
    read-only.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        policy: KvPolicy,
        clock: Callable[[], float] = time.monotonic,
        window_tokens: int = 0,
    ) -> None:
        """Create an empty cache, whose blocks are all free.

        Args:
            num_blocks: number of blocks in the pool.
            block_tokens: tokens per block.
            policy: limits on what is kept for reuse.
            clock: returns the time in seconds.
            window_tokens: length of the sliding windows of layers that have separate blocks, or 0
                if there are no such layers.
        """
        self._pool = BlockPool(num_blocks, block_tokens)
        self._tree = RadixTree(block_tokens, window_tokens)
        self._num_frees = 0
        """Number of calls to `free`, used as the logical clock that orders evictions."""
        self.sessions = Sessions(self._tree, policy.session_blocks, policy.session_idle, clock)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.has_cache = policy.prefix_cache
        self.is_windowed = window_tokens > 0

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_reclaimable(self) -> int:
        """Return the number of blocks that only the cache holds, which `allocate` may evict."""
        return self._tree.num_reclaimable

    @property
    def num_available(self) -> int:
        return self._pool.num_free + self._tree.num_reclaimable

    @property
    def num_cached_used(self) -> int:
        """Return the number of cached blocks that sequences are using. All of them are full."""
        return self._tree.num_blocks - self._tree.num_reclaimable

    @property
    def num_session_blocks(self) -> int:
        return self._tree.num_pinned

    def ref_count(self, block: int) -> int:
        """Count the sequences that hold the block, excluding the cache's own reference."""
        return self._pool.ref_count(block) - (block in self._tree)

    def is_cached(self, block: int) -> bool:
        return block in self._tree

    def is_private(self, block: int) -> bool:
        """Return whether exactly one sequence holds the block and the cache does not."""
        return self._pool.ref_count(block) == 1 and block not in self._tree

    def is_shared(self, block: int) -> bool:
        """Return whether the block has several holders: sequences, or a sequence and the cache.

        A shared block must not be written.
        """
        return self._pool.ref_count(block) > 1

    def is_shared_at(self, table: list[int], index: int) -> bool:
        """Return whether this index is within the block table and refers to a shared block."""
        return 0 <= index < len(table) and self.is_shared(table[index])

    def match(self, token_ids: list[int], salt: str = "", path: Path | None = None) -> list[int]:
        """Find the cached blocks of the longest prefix of `token_ids`, excluding the last token.

        A request can only match blocks that requests with the same cache salt have computed.
        See `RadixTree.match` for the meaning of `path`.
        """
        return self._tree.match(token_ids, salt, path) if self.has_cache else []

    def window_blocks(self, hits: list[int]) -> list[int]:
        """Return the sliding-window blocks that a sequence needs to continue after `hits`.

        `hits` are the cached blocks that match the sequence's prefix.
        """
        return self._tree.window_blocks(hits)

    def first_window_block(self, position: int) -> int:
        """Return the index of the first block that overlaps a window ending at this position."""
        return self._tree.first_window_block(position)

    def count_reclaimable(self, cached: Iterable[int]) -> int:
        """Count the blocks in `cached` that no sequence holds."""
        return sum(self._tree.is_reclaimable(block) for block in cached)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate `count` blocks, evicting cached blocks if too few are free.

        The blocks directly follow the block `after` if possible.

        Raises:
            PoolExhaustedError: if too few blocks are available.
        """
        if count > self._pool.num_free:
            missing = min(count - self._pool.num_free, self._tree.num_reclaimable)
            for _ in range(missing):
                self._pool.free([self._evict()])
        return self._pool.allocate(count, after)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block on behalf of one more sequence."""
        blocks = list(blocks)
        self._pool.share(blocks)
        for block in blocks:
            if block in self._tree:
                self._tree.set_in_use(block)

    def free(self, blocks: Iterable[int]) -> None:
        """Drop a sequence's references. Cached blocks are kept and become reclaimable."""
        blocks = list(blocks)
        self._num_frees += 1
        self._pool.free(blocks)
        for block in blocks:
            if block in self._tree:
                self._tree.touch(block, self._num_frees)
                if self._pool.ref_count(block) == 1:
                    self._tree.set_reclaimable(block)

    def keep_session(self, session_id: str, path: list[int]) -> None:
        """Pin the cached blocks in `path`, which a request of the session has just released."""
        self.sessions.keep(session_id, path, self._num_frees)

    def insert(
        self, token_ids: list[int], table: list[int], first: int, end: int, salt: str = ""
    ) -> list[int]:
        """Cache the full blocks at indices `first` to `end` - 1 of a block table.

        All blocks before `first` must already be cached.

        Returns:
            The table itself, or a modified copy if some of the tokens are already cached in other
            blocks. The copy refers to those cached blocks, and the duplicates are freed.
        """
        if not self.has_cache:
            return table

        size = self.block_tokens
        merged = table
        for index in range(first, end):
            parent = merged[index - 1] if index else None
            own = table[index]
            is_known = own in self._tree
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            kept = self._tree.insert(parent, tokens, own, salt)

            if kept != own:
                self.share([kept])
                self.free([own])
                if merged is table:
                    merged = list(table)
                merged[index] = kept
            elif not is_known:
                self._pool.share([own])
        return merged

    def insert_windows(self, table: list[int], windows: list[int], first: int) -> None:
        """Attach window blocks to a block table's cached blocks, starting at index `first`.

        If a cached block already has a window block, the duplicate in `windows` is replaced with
        that block and released.
        """
        for index, own in enumerate(windows):
            if first + index >= len(table):
                return
            kept = self._tree.window_block(table[first + index])
            if kept is None:
                self._tree.add_window(table[first + index], own)
                self._pool.share([own])
            elif kept != own:
                self.share([kept])
                self.free([own])
                windows[index] = kept

    def set_content_key(self, block: int, content_key: bytes) -> bool:
        """Attach a content key to a cached block (see `RadixTree.set_content_key`)."""
        return self._tree.set_content_key(block, content_key)

    def content_key(self, block: int, *, is_window: bool = False) -> bytes | None:
        """Return a cached block's content key (see `RadixTree.content_key`)."""
        return self._tree.content_key(block, is_window=is_window)

    def take_keys(self, path: list[int] | None) -> None:
        """Clear the content keys of cached blocks whose copies outside the device are discarded.

        The keys of the first block of `path` and of all its descendants are cleared, or the keys of
        all cached blocks if `path` is None. Blocks that are cached below a block without a key are
        not offered to tiers.
        """
        if path is None:
            self._tree.take_keys(None)
        elif path and path[0] in self._tree:
            self._tree.take_keys(path[0])

    def window_block(self, block: int) -> int | None:
        """Return the sliding-window block that belongs to a cached block, or None."""
        return self._tree.window_block(block)

    def evict_branch(self, path: list[int]) -> None:
        """Evict the path's first block and its descendants, and end the sessions that use them.

        Blocks in use stay allocated but can no longer be matched.
        """
        if path and path[0] in self._tree:
            self.sessions.end_branch(path[0])
            self._pool.free(self._tree.evict_branch(path[0]))

    def evict_all(self) -> None:
        """Evict every block that no sequence holds."""
        while self._tree.num_reclaimable:
            self._pool.free([self._evict()])

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that these block tables and the cache account for all block references."""
        present = [list(table) for table in tables]
        held = {block for table in present for block in table}
        cached = [block for block in range(self.num_blocks) if block in self._tree]
        self._pool.check_integrity([*present, cached])
        self._tree.check_integrity()

        for block in cached:
            is_unused = block not in held
            assert self._tree.is_reclaimable(block) == is_unused, f"block {block}: wrong state"

    def _evict(self) -> int:
        """Evict one block, ending the least recently used sessions if all blocks are pinned."""
        while (block := self._tree.evict()) is None:
            was_ended = self.sessions.end_oldest()
            assert was_ended, "reclaimable blocks, and none of them evictable"
        return block
