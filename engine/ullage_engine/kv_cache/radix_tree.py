"""The radix tree that finds cached KV blocks by the tokens that they store.

The path from the root to a block spells out the cache salt and all tokens up to the end of the
block. Only requests with the same salt may read the block.

Layers with sliding windows keep their KV in separate blocks. A cached block may therefore have a
window block, which stores the same tokens for these layers. Once no window reaches back to a window
block, that block can be reclaimed even though its sequence is still running. A match must therefore
end at a position where the whole preceding window is still cached.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

_ROOT = -1

_Key = tuple[str, tuple[int, ...]]
"""Key of a node among its siblings: cache salt (only for a text's first block) and tokens."""


@dataclass(slots=True, eq=False)
class _Node:
    """One cached block. Its KV depends on the tokens of all its ancestors."""

    parent: "_Node | None"
    key: _Key
    block: int
    children: dict[_Key, "_Node"] = field(default_factory=dict)
    num_pins: int = 0
    is_reclaimable: bool = False
    is_idle: bool = False
    """Whether the session that last used the block has expired."""
    last_used: int = 0
    """Logical clock tick of the block's last use."""
    window_block: int | None = None
    num_window_pins: int = 0
    is_window_reclaimable: bool = False
    window_last_used: int = 0
    content_key: bytes | None = None
    """Content key of the block's copies in other tiers, or None if no key was set."""


Path = list[_Node]
"""Nodes on a path from the root, which is excluded. Some may have been evicted since."""


class RadixTree:
    """Finds KV blocks by their tokens, and decides which cached block is evicted next.

    A cached block is in use while a sequence holds it and reclaimable otherwise. A sequence that
    holds a block also holds all its ancestors, so reclaimable blocks form whole subtrees. They are
    evicted leaf by leaf: leaves of expired sessions first, then the least recently used leaves.
    Pinned blocks are never evicted. Every operation on one block is O(1).
    """

    def __init__(self, block_tokens: int, window_tokens: int = 0) -> None:
        """Create an empty tree.

        Args:
            block_tokens: tokens per block.
            window_tokens: length of the sliding windows, or 0 if blocks have no window blocks.
        """
        self._block_tokens = block_tokens
        self._window_tokens = window_tokens
        self._root = _Node(None, ("", ()), _ROOT)
        self._by_block: dict[int, _Node] = {}
        self._by_window: dict[int, _Node] = {}
        """Maps each window block to the node it is attached to."""

        # Eviction queues, the least recently used first.
        self._evictable: OrderedDict[int, _Node] = OrderedDict()
        """Reclaimable, unpinned leaf blocks, except those in `_idle`."""
        self._idle: OrderedDict[int, _Node] = OrderedDict()
        """Reclaimable, unpinned leaf blocks of expired sessions, which are evicted first."""
        self._evictable_windows: OrderedDict[int, _Node] = OrderedDict()
        """Reclaimable, unpinned window blocks, least recently used first."""

        self.num_reclaimable = 0
        """Number of blocks that no sequence holds, including window blocks and pinned blocks."""
        self.num_pinned = 0

    @property
    def num_blocks(self) -> int:
        return len(self._by_block) + len(self._by_window)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block or block in self._by_window

    def is_reclaimable(self, block: int) -> bool:
        node = self._by_window.get(block)
        return self._by_block[block].is_reclaimable if node is None else node.is_window_reclaimable

    def first_window_block(self, position: int) -> int:
        """Return the index of the first block that overlaps a window ending at this position."""
        return max(0, position - self._window_tokens + 1) // self._block_tokens

    def window_blocks(self, path: list[int]) -> list[int]:
        """Return the sliding-window blocks that a sequence needs to continue after `path`."""
        if not self._window_tokens:
            return []
        first = self.first_window_block(len(path) * self._block_tokens)
        window_blocks = [self._by_block[block].window_block for block in path[first:]]
        return [block for block in window_blocks if block is not None]

    def window_block(self, block: int) -> int | None:
        """Return the sliding-window block that belongs to a cached block, or None."""
        return self._by_block[block].window_block

    def add_window(self, block: int, window_block: int) -> None:
        """Attach an in-use window block to the cached block that stores the same tokens."""
        node = self._by_block[block]
        assert node.window_block is None, "cached already"
        assert window_block not in self, "cached already"
        node.window_block = window_block
        self._by_window[window_block] = node

    def set_content_key(self, block: int, content_key: bytes) -> bool:
        """Attach a content key to a cached block and its window block.

        The key identifies copies of the block in tiers outside the device.

        Returns:
            Whether the block had no content key before.
        """
        node = self._by_block[block]
        is_new = node.content_key is None
        node.content_key = content_key
        return is_new

    def content_key(self, block: int, *, is_window: bool = False) -> bytes | None:
        """Return the content key of a cached block or window block, or None if it has none.

        `is_window` selects whether `block` is looked up among window blocks or ordinary blocks.
        """
        node = (self._by_window if is_window else self._by_block).get(block)
        return node.content_key if node else None

    def take_keys(self, block: int | None) -> None:
        """Clear the content keys of a block and its descendants, or of all blocks if given None.

        This is done when the blocks' copies in tiers outside the device are discarded.
        """
        branch = [self._root if block is None else self._by_block[block]]
        for node in branch:
            branch.extend(node.children.values())
            node.content_key = None

    def match(self, token_ids: list[int], salt: str = "", path: Path | None = None) -> list[int]:
        """Find the cached blocks of the longest prefix of `token_ids` under a cache salt.

        The prefix excludes the last token, which is always computed because its logits are needed.
        It ends at a position where all window blocks that the next token needs are cached.

        Args:
            token_ids: tokens of a text.
            salt: cache salt of the request.
            path: nodes found by the last match of this text and salt, which are updated in place.
                The tokens of these nodes are not compared again.

        Returns:
            The blocks in the order of their tokens.
        """
        nodes = [] if path is None else path
        # `evict_branch` changes the key of a first block that is still held.
        if nodes and nodes[0].key != (salt, tuple(token_ids[: self._block_tokens])):
            nodes.clear()
        # A block stays cached as long as those below it, so only the end may be gone.
        while nodes and self._by_block.get(nodes[-1].block) is not nodes[-1]:
            nodes.pop()
        self._extend(nodes, token_ids, salt)

        blocks = [node.block for node in nodes]
        return blocks[: self._readable(nodes)] if self._window_tokens else blocks

    def _extend(self, nodes: Path, token_ids: list[int], salt: str) -> None:
        """Extend a path with the cached blocks that store the next tokens of the text."""
        size = self._block_tokens
        node = nodes[-1] if nodes else self._root
        for start in range(len(nodes) * size, (len(token_ids) - 1) // size * size, size):
            tokens = tuple(token_ids[start : start + size])
            child = node.children.get(("" if start else salt, tokens))
            if child is None:
                return
            nodes.append(child)
            node = child

    def _readable(self, nodes: Path) -> int:
        """Return how many of a path's first nodes a new sequence can reuse.

        With sliding windows, the token after the reused nodes also needs the window blocks of its
        whole window. The result is the largest number for which these are all cached.
        """
        num_windows = length = 0
        for count, node in enumerate(nodes, start=1):
            num_windows = 0 if node.window_block is None else num_windows + 1
            if num_windows >= count - self.first_window_block(count * self._block_tokens):
                length = count
        return length

    def insert(
        self, parent: int | None, tokens: tuple[int, ...], block: int, salt: str = ""
    ) -> int:
        """Cache `block`, which stores `tokens`, below `parent`.

        Args:
            parent: block of the preceding tokens, or None at the beginning of a text.
            tokens: the block's tokens.
            block: the block, which counts as in use.
            salt: cache salt, which matters only for the first block of a text.

        Returns:
            The block that the tree keeps: either `block`, or the block that already stored the same
            tokens.
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
        """Mark a block as in use by a sequence."""
        if (node := self._by_window.get(block)) is not None:
            self.num_reclaimable -= node.is_window_reclaimable
            node.is_window_reclaimable = False
            self._evictable_windows.pop(block, None)
            return

        node = self._by_block[block]
        self.num_reclaimable -= node.is_reclaimable
        node.is_reclaimable = False
        self._queue(node).pop(block, None)
        node.is_idle = False

    def touch(self, block: int, tick: int) -> None:
        """Record the logical clock tick of a block's last use. It determines the eviction order."""
        if (node := self._by_window.get(block)) is not None:
            node.window_last_used = tick
        else:
            self._by_block[block].last_used = tick

    def set_reclaimable(self, block: int) -> None:
        """Mark a block as no longer used by any sequence."""
        if (node := self._by_window.get(block)) is not None:
            self.num_reclaimable += not node.is_window_reclaimable
            node.is_window_reclaimable = True
            self._add_window_if_evictable(node)
            return

        node = self._by_block[block]
        self.num_reclaimable += not node.is_reclaimable
        node.is_reclaimable = True
        self._add_if_evictable(node)

    def pin(self, block: int, *, with_window: bool = False) -> None:
        """Protect a block from eviction until every call to `pin` is matched by one to `unpin`.

        If `with_window`, the block's window block is pinned as well. Pass the same value to
        `unpin`.
        """
        node = self._by_block[block]
        if with_window:
            node.num_window_pins += 1
            self._evictable_windows.pop(
                -1 if node.window_block is None else node.window_block, None
            )
        self.num_pinned += node.num_pins == 0
        node.num_pins += 1
        self._queue(node).pop(block, None)

    def unpin(
        self, block: int, idle_since: int | None = None, *, with_window: bool = False
    ) -> None:
        """Undo one call to `pin`.

        Args:
            block: the pinned block.
            idle_since: the tick at which an expired session last used the block, or None if the
                session has not expired. Blocks of expired sessions are evicted before all other
                blocks, unless another request has used them since.
            with_window: the value that was passed to `pin`.
        """
        node = self._by_block[block]
        assert node.num_pins > 0, f"block {block} is not pinned"
        if with_window:
            node.num_window_pins -= 1
            self._add_window_if_evictable(node)

        node.num_pins -= 1
        self.num_pinned -= node.num_pins == 0

        # `is_idle` selects the queue, so the node leaves the old one before it changes.
        self._queue(node).pop(block, None)
        is_idle = idle_since is not None and node.last_used <= idle_since
        node.is_idle = is_idle and node.is_reclaimable and not node.num_pins
        self._add_if_evictable(node)

    def evict(self) -> int | None:
        """Evict the next leaf or window block in eviction order.

        Returns:
            The evicted block, or None if no block is evictable.
        """
        queue = self._idle or self._evictable
        leaf = next(iter(queue.values()), None)
        window = next(iter(self._evictable_windows.values()), None)

        # The least recently used goes first, but leaves of idle sessions before all others.
        if leaf is not None and window is not None:
            is_first = leaf.is_idle or leaf.last_used < window.window_last_used
            window = None if is_first else window

        # A leaf's window block goes before the leaf, without which it would be of no use.
        if window is None and leaf is not None and leaf.window_block is not None:
            window = leaf

        if window is not None:
            return self._evict_window(window)
        if leaf is None:
            return None
        return self._evict_leaf(leaf)

    def evict_branch(self, block: int) -> list[int]:
        """Evict a text's first block and all blocks below it.

        Blocks that are in use or pinned stay cached, but `match` no longer finds them.

        Returns:
            The evicted blocks.
        """
        first = self._by_block[block]
        del self._root.children[first.key]
        # No text has a negative token, so no match finds this key.
        first.key = ("", (-1 - block,))
        self._root.children[first.key] = first

        branch = [first]
        evicted = []
        for node in branch:
            branch.extend(node.children.values())

        # In reverse, so that children come before their parents.
        for node in reversed(branch):
            if node.window_block is not None and self._is_window_evictable(node):
                evicted.append(self._evict_window(node))
            if self._is_evictable(node):
                evicted.append(self._evict_leaf(node))
        return evicted

    def _evict_leaf(self, node: _Node) -> int:
        parent = node.parent
        assert parent is not None, "the root is no leaf"
        self._queue(node).pop(node.block)
        del self._by_block[node.block], parent.children[node.key]
        self.num_reclaimable -= 1
        self._add_if_evictable(parent)

        # A parent last used together with its child is as old as the child was, so it comes next.
        # A parent used later counts as new. That keeps this O(1), where an exact order would need a
        # search.
        queue = self._queue(parent)
        if parent.block in queue and parent.last_used <= node.last_used:
            queue.move_to_end(parent.block, last=False)
        return node.block

    def check_integrity(self) -> None:
        """Assert that the tree's links and counts are consistent."""
        nodes = list(self._by_block.values())
        num_reclaimable = sum(node.is_reclaimable + node.is_window_reclaimable for node in nodes)
        assert num_reclaimable == self.num_reclaimable, "reclaimable blocks miscounted"

        windows = {node.window_block: node for node in nodes if node.window_block is not None}
        assert windows == self._by_window, "window blocks lost or doubled"
        evictable = {block for block, node in windows.items() if self._is_window_evictable(node)}
        assert evictable == self._evictable_windows.keys(), "window blocks missing or doubled"
        for node in windows.values():
            assert node.is_window_reclaimable or not node.is_reclaimable, "outlives its block"

        assert sum(node.num_pins > 0 for node in nodes) == self.num_pinned, "pins miscounted"
        ready = {node.block for node in nodes if self._is_evictable(node)}
        assert ready == self._evictable.keys() | self._idle.keys(), "leaves missing or doubled"
        assert all(node.is_idle for node in self._idle.values()), "evicted before its turn"
        assert not any(node.is_idle for node in self._evictable.values()), "idle, and not first"

        for node in nodes:
            parent = node.parent
            assert parent is not None, "broken branch"
            assert parent.children[node.key] is node, "broken branch"
            assert node.is_reclaimable or not parent.is_reclaimable, (
                f"block {node.block} outlives its prefix"
            )
        assert sum(len(node.children) for node in [self._root, *nodes]) == len(nodes), "lost branch"

    def _is_evictable(self, node: _Node) -> bool:
        return node.is_reclaimable and not node.num_pins and not node.children

    def _add_if_evictable(self, node: _Node) -> None:
        if self._is_evictable(node):
            self._queue(node)[node.block] = node

    def _is_window_evictable(self, node: _Node) -> bool:
        return node.is_window_reclaimable and not node.num_window_pins

    def _add_window_if_evictable(self, node: _Node) -> None:
        if node.window_block is not None and self._is_window_evictable(node):
            self._evictable_windows[node.window_block] = node

    def _evict_window(self, node: _Node) -> int:
        block = node.window_block
        assert block is not None, "its window block is in use"
        assert node.is_window_reclaimable, "its window block is in use"
        self._evictable_windows.pop(block, None)
        del self._by_window[block]
        node.window_block = None
        node.is_window_reclaimable = False
        self.num_reclaimable -= 1
        return block

    def _queue(self, node: _Node) -> OrderedDict[int, _Node]:
        return self._idle if node.is_idle else self._evictable
