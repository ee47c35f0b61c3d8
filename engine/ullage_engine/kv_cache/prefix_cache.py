"""The prefix cache: which KV blocks are in use, kept for reuse, or free.

Sequences allocate blocks here and release them. A full block stays cached by content after its
sequence has ended, and a session's blocks are pinned between its turns. Cached blocks form a radix
tree: the path from the root to a block spells the tokens whose KV the block continues, and begins
with the cache salt of the requests that may read it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ullage_engine.kv_cache.block_pool import BlockPool

_ROOT = -1

_Key = tuple[str, tuple[int, ...]]
"""What tells the children of a block apart: the cache salt, at the beginning of a sequence only,
and the tokens."""


@dataclass(slots=True, eq=False)
class _Node:
    """One block of KV, valid only after all blocks above it."""

    parent: "_Node | None"
    key: _Key
    block: int
    children: dict[_Key, "_Node"] = field(default_factory=dict)
    num_pins: int = 0
    is_reclaimable: bool = False
    is_idle: bool = False
    """Whether the session that used the block last has ended because it was idle."""
    last_used: int = 0
    """Tick of the block's last use; ticks only grow."""


class RadixTree:
    """Maps token blocks to KV blocks and decides which cached block is evicted next.

    A cached block is in use while a sequence holds it and reclaimable otherwise. A sequence that
    holds a block holds all blocks above it, so the reclaimable blocks are whole branches and each
    can be evicted in its turn: leaves first, those of idle sessions before others, the least
    recently used first, pinned ones never. Every operation on one block is O(1).
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._root = _Node(None, ("", ()), _ROOT)
        self._by_block: dict[int, _Node] = {}
        # Reclaimable, unpinned and without children; the least recently used first.
        self._evictable: OrderedDict[int, _Node] = OrderedDict()
        # Those of idle sessions, which are evicted before the others.
        self._idle: OrderedDict[int, _Node] = OrderedDict()
        self.num_reclaimable = 0
        """Blocks that no sequence holds, pinned ones included."""
        self.num_pinned = 0

    @property
    def num_blocks(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def is_reclaimable(self, block: int) -> bool:
        return self._by_block[block].is_reclaimable

    def match(self, token_ids: list[int], salt: str = "") -> list[int]:
        """Finds the longest run of blocks that store a beginning of `token_ids` under a salt.

        It ends before the last token, which is always computed because its logits are needed.
        """
        size, node = self._block_tokens, self._root
        blocks: list[int] = []
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            tokens = tuple(token_ids[start : start + size])
            child = node.children.get(("" if start else salt, tokens))
            if child is None:
                break
            blocks.append(child.block)
            node = child
        return blocks

    def insert(
        self, parent: int | None, tokens: tuple[int, ...], block: int, salt: str = ""
    ) -> int:
        """Caches `block` as what stores `tokens` below `parent`, or, at the beginning, where the
        parent is None, as what stores them under a salt.

        Returns the block that the tree keeps: `block`, now in use, or the one that stored the same
        tokens before.
        """
        above = self._root if parent is None else self._by_block[parent]
        key = (salt if parent is None else "", tokens)
        node = above.children.get(key)
        if node is None:
            assert block not in self._by_block, f"block {block} is cached for other tokens"
            node = _Node(above, key, block)
            above.children[key] = self._by_block[block] = node
            self._queue(above).pop(above.block, None)
        return node.block

    def set_in_use(self, block: int) -> None:
        node = self._by_block[block]
        self.num_reclaimable -= node.is_reclaimable
        node.is_reclaimable = False
        self._queue(node).pop(block, None)
        node.is_idle = False

    def touch(self, block: int, tick: int) -> None:
        """Records when the block was last used, for the order of eviction."""
        self._by_block[block].last_used = tick

    def set_reclaimable(self, block: int) -> None:
        node = self._by_block[block]
        self.num_reclaimable += not node.is_reclaimable
        node.is_reclaimable = True
        self._add_if_evictable(node)

    def pin(self, block: int) -> None:
        """Keeps the block from being evicted until `unpin` was called as often."""
        node = self._by_block[block]
        self.num_pinned += node.num_pins == 0
        node.num_pins += 1
        self._queue(node).pop(block, None)

    def unpin(self, block: int, idle_since: int | None = None) -> None:
        """Undoes one `pin`.

        `idle_since`: the tick of the last use by the session that pinned the block, which ends
        because it is idle. Unless the block was used since, it is evicted before others.
        """
        node = self._by_block[block]
        assert node.num_pins > 0, f"block {block} is not pinned"
        node.num_pins -= 1
        self.num_pinned -= node.num_pins == 0
        self._queue(node).pop(block, None)
        is_idle = idle_since is not None and node.last_used <= idle_since
        node.is_idle = is_idle and node.is_reclaimable and not node.num_pins
        self._add_if_evictable(node)

    def evict(self) -> int | None:
        """Drops the leaf whose turn it is; returns its block, or None if none is evictable."""
        queue = self._idle or self._evictable
        if not queue:
            return None
        block, node = queue.popitem(last=False)
        parent = node.parent
        assert parent is not None, "the root is no leaf"
        del self._by_block[block], parent.children[node.key]
        self.num_reclaimable -= 1
        self._add_if_evictable(parent)
        # A parent last used together with its child is as old as that one was; one used later by
        # itself counts as new, which keeps this O(1) where an exact order would need a search.
        queue = self._queue(parent)
        if parent.block in queue and parent.last_used <= node.last_used:
            queue.move_to_end(parent.block, last=False)
        return block

    def check_integrity(self) -> None:
        """Asserts that links and counts agree with one another."""
        nodes = list(self._by_block.values())
        assert sum(node.is_reclaimable for node in nodes) == self.num_reclaimable, (
            "reclaimable blocks miscounted"
        )
        assert sum(node.num_pins > 0 for node in nodes) == self.num_pinned, "pins miscounted"
        ready = {node.block for node in nodes if self._is_evictable(node)}
        assert ready == self._evictable.keys() | self._idle.keys(), "leaves missing or doubled"
        assert all(node.is_idle for node in self._idle.values()), "evicted before its turn"
        assert not any(node.is_idle for node in self._evictable.values()), "idle, and not first"
        for node in nodes:
            parent = node.parent
            assert parent is not None and parent.children[node.key] is node, "broken branch"
            assert node.is_reclaimable or not parent.is_reclaimable, (
                f"block {node.block} outlives its prefix"
            )
        assert sum(len(node.children) for node in [self._root, *nodes]) == len(nodes), "lost branch"

    def _is_evictable(self, node: _Node) -> bool:
        return node.is_reclaimable and not node.num_pins and not node.children

    def _add_if_evictable(self, node: _Node) -> None:
        if self._is_evictable(node):
            self._queue(node)[node.block] = node

    def _queue(self, node: _Node) -> OrderedDict[int, _Node]:
        return self._idle if node.is_idle else self._evictable


_MAX_SESSIONS = 1024


@dataclass(frozen=True, slots=True)
class _Session:
    path: list[int]
    """Pinned blocks, from the beginning of the conversation on."""
    used_at: float
    last_used: int
    """Tick of the session's last use of its blocks."""


class Sessions:
    """Pins the cached prefix of each session until it is idle for long or memory is needed.

    Both end the session used longest ago first. Pinned blocks are only kept from being evicted
    before others; they can be had by ending their sessions. What an idle session leaves is evicted
    before anything that was used since.
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
        """Pins the first blocks of a cached path in place of the session's earlier pins.

        `last_used`: the tick at which the session gave the path back.
        """
        path = path[: self._max_blocks]
        # Pinned before the old path is unpinned: blocks of both never become evictable between.
        for block in path:
            self._tree.pin(block)
        self._end(session_id)
        if path:
            self._sessions[session_id] = _Session(path, self._clock(), last_used)
        while len(self._sessions) > _MAX_SESSIONS:
            self.end_oldest()

    def use(self, session_id: str) -> None:
        """Counts as a use: the session's next turn has come."""
        session = self._sessions.pop(session_id, None)
        if session:
            self._sessions[session_id] = replace(session, used_at=self._clock())

    def end_idle(self) -> None:
        """Ends sessions not used for the idle time."""
        latest = self._clock() - self._idle_s
        while self._sessions and next(iter(self._sessions.values())).used_at <= latest:
            self._end(next(iter(self._sessions)), is_idle=True)

    def end_oldest(self) -> bool:
        """Ends the session used longest ago; False: there is none."""
        if not self._sessions:
            return False
        self._end(next(iter(self._sessions)))
        return True

    def _end(self, session_id: str, *, is_idle: bool = False) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        # The deepest first: blocks then become evictable in the order leaf before parent.
        for block in reversed(session.path):
            self._tree.unpin(block, session.last_used if is_idle else None)


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """Limits of the KV that is kept although no running sequence needs it."""

    prefix_cache: bool = True
    """Whether full blocks are kept for requests that begin alike."""
    session_blocks: int = 0
    """Most blocks pinned for one session."""
    session_idle: float = 300.0
    """Seconds after which a session that is not used ends."""
    host_slots: int = 0
    """Blocks of host memory for swapped sequences."""


class PrefixCache:
    """Allocates reference-counted KV blocks and keeps full ones for sequences that begin alike.

    The cache holds one reference of each block it stores. Blocks that only the cache holds are
    reclaimable: `allocate` evicts them as it needs them, so they count as available. A cached block
    is never written again.
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
        self._num_frees = 0
        self.sessions = Sessions(self._tree, policy.session_blocks, policy.session_idle, clock)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.has_cache = policy.prefix_cache

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_reclaimable(self) -> int:
        """Blocks that only the cache holds: kept for reuse, evicted as soon as they are needed."""
        return self._tree.num_reclaimable

    @property
    def num_available(self) -> int:
        return self._pool.num_free + self._tree.num_reclaimable

    @property
    def num_cached_used(self) -> int:
        """Blocks that sequences hold and the cache knows, all of them full."""
        return self._tree.num_blocks - self._tree.num_reclaimable

    @property
    def num_session_blocks(self) -> int:
        return self._tree.num_pinned

    def ref_count(self, block: int) -> int:
        """Counts the sequences that hold the block, without the cache's own reference."""
        return self._pool.ref_count(block) - (block in self._tree)

    def is_cached(self, block: int) -> bool:
        return block in self._tree

    def is_private(self, block: int) -> bool:
        """Whether one sequence holds the block and the cache does not."""
        return self._pool.ref_count(block) == 1 and block not in self._tree

    def is_shared(self, block: int) -> bool:
        """Whether more than one sequence, or the cache too, reads the block: it must not be
        written."""
        return self._pool.ref_count(block) > 1

    def match(self, token_ids: list[int], salt: str = "") -> list[int]:
        """Finds the cached blocks of the longest prefix of `token_ids`, its last token excluded.

        Only requests with the same cache salt find one another's blocks.
        """
        return self._tree.match(token_ids, salt) if self.has_cache else []

    def count_reclaimable(self, cached: Iterable[int]) -> int:
        """Counts the blocks among `cached` that no sequence holds."""
        return sum(self._tree.is_reclaimable(block) for block in cached)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocates `count` blocks, preferably after block `after`; evicts cached ones as needed.

        Raises:
            PoolExhaustedError: fewer are available.
        """
        missing = min(count - self._pool.num_free, self._tree.num_reclaimable)
        for _ in range(missing):
            self._pool.free([self._evict()])
        return self._pool.allocate(count, after)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block for one more sequence."""
        blocks = list(blocks)
        self._pool.share(blocks)
        for block in blocks:
            if block in self._tree:
                self._tree.set_in_use(block)

    def free(self, blocks: Iterable[int]) -> None:
        """Drops a sequence's references; cached blocks stay and become reclaimable."""
        blocks = list(blocks)
        self._num_frees += 1
        self._pool.free(blocks)
        for block in blocks:
            if block in self._tree:
                self._tree.touch(block, self._num_frees)
                if self._pool.ref_count(block) == 1:
                    self._tree.set_reclaimable(block)

    def keep_session(self, session_id: str, path: list[int]) -> None:
        """Pins the cached `path`, which a request of the session has just given back by `free`."""
        self.sessions.keep(session_id, path, self._num_frees)

    def insert(
        self, token_ids: list[int], table: list[int], first: int, end: int, salt: str = ""
    ) -> int:
        """Caches the full blocks `first` to `end` - 1 of a block table; those before are cached.

        Where the cache stores the same tokens in another block, the table gets that block and its
        own is freed. Returns the number of blocks merged that way.
        """
        if not self.has_cache:
            return 0
        size, num_merged = self.block_tokens, 0
        for index in range(first, end):
            parent, own = table[index - 1] if index else None, table[index]
            is_known = own in self._tree
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            kept = self._tree.insert(parent, tokens, own, salt)
            if kept != own:
                self.share([kept])
                self.free([own])
                table[index] = kept
                num_merged += 1
            elif not is_known:
                self._pool.share([own])
        return num_merged

    def evict_all(self) -> None:
        """Evicts every block that no sequence holds."""
        while self._tree.num_reclaimable:
            self._pool.free([self._evict()])

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Asserts that sequences with `tables` and the cache hold exactly what is allocated."""
        present = [list(table) for table in tables]
        held = {block for table in present for block in table}
        cached = [block for block in range(self.num_blocks) if block in self._tree]
        self._pool.check_integrity([*present, cached])
        self._tree.check_integrity()
        for block in cached:
            is_unused = block not in held
            assert self._tree.is_reclaimable(block) == is_unused, f"block {block}: wrong state"

    def _evict(self) -> int:
        """Evicts one block: of no session if possible, else of the session used longest ago."""
        while (block := self._tree.evict()) is None:
            was_ended = self.sessions.end_oldest()
            assert was_ended, "reclaimable blocks, and none of them evictable"
        return block
