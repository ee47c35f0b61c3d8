"""Computed KV by content: a tree in which the path from the root to a block spells its tokens."""

from collections import OrderedDict
from dataclasses import dataclass, field

_ROOT = -1


@dataclass(slots=True, eq=False)
class _Node:
    """One block of KV, valid only after all blocks above it."""

    parent: "_Node | None"
    tokens: tuple[int, ...]
    block: int
    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)
    num_pins: int = 0
    is_idle: bool = False
    used: int = 0
    """When it was last in use; grows from use to use."""


class RadixTree:
    """Which blocks store which tokens, and which of them may be forgotten, in which order.

    A cached block is busy while a sequence uses it and idle otherwise. Whoever uses a block uses
    all above it, so the idle blocks are whole branches and each of them can be evicted in its turn:
    leaves first, the least recently used first, pinned ones never. Every operation on one block is
    O(1).
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._root = _Node(None, (), _ROOT)
        self._by_block: dict[int, _Node] = {}
        # Idle, unpinned, without children; the least recently used first.
        self._evictable: OrderedDict[int, _Node] = OrderedDict()
        self._num_idle = 0
        self._num_pinned = 0

    @property
    def num_blocks(self) -> int:
        return len(self._by_block)

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence uses, pinned ones included."""
        return self._num_idle

    @property
    def num_pinned(self) -> int:
        return self._num_pinned

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def is_idle(self, block: int) -> bool:
        return self._by_block[block].is_idle

    def match(self, token_ids: list[int]) -> list[int]:
        """The longest run of blocks that store a beginning of `token_ids`.

        It ends before the last token: that one is always computed, as its output is what is wanted.
        """
        size, node, found = self._block_tokens, self._root, []
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            found.append(child.block)
            node = child
        return found

    def add(self, parent: int | None, tokens: tuple[int, ...], block: int) -> int:
        """The block that stores `tokens` below the block `parent` (None: at the beginning).

        It is `block`, busy, from now on unless there is one already.
        """
        above = self._root if parent is None else self._by_block[parent]
        node = above.children.get(tokens)
        if node is None:
            assert block not in self._by_block, f"block {block} is cached for other tokens"
            node = _Node(above, tokens, block)
            above.children[tokens] = self._by_block[block] = node
            self._evictable.pop(above.block, None)
        return node.block

    def set_busy(self, block: int) -> None:
        node = self._by_block[block]
        self._num_idle -= node.is_idle
        node.is_idle = False
        self._evictable.pop(block, None)

    def set_used(self, block: int, used: int) -> None:
        self._by_block[block].used = used

    def set_idle(self, block: int) -> None:
        node = self._by_block[block]
        self._num_idle += not node.is_idle
        node.is_idle = True
        self._offer(node)

    def pin(self, block: int) -> None:
        """Keeps the block from being evicted until `unpin` was called as often."""
        node = self._by_block[block]
        self._num_pinned += node.num_pins == 0
        node.num_pins += 1
        self._evictable.pop(block, None)

    def unpin(self, block: int) -> None:
        node = self._by_block[block]
        assert node.num_pins > 0, f"block {block} is not pinned"
        node.num_pins -= 1
        self._num_pinned -= node.num_pins == 0
        self._offer(node)

    def evict(self) -> int | None:
        """Forgets the least recently used leaf; its block, or None if every leaf is in use."""
        if not self._evictable:
            return None
        block, node = self._evictable.popitem(last=False)
        parent = node.parent
        assert parent is not None, "the root is no leaf"
        del self._by_block[block], parent.children[node.tokens]
        self._num_idle -= 1
        self._offer(parent)
        # A parent last used together with its child is as old as that one was; one used later by
        # itself counts as new, which keeps this O(1) where an exact order would need a search.
        if parent.block in self._evictable and parent.used <= node.used:
            self._evictable.move_to_end(parent.block, last=False)
        return block

    def check_integrity(self) -> None:
        """Asserts that links and counts agree with one another."""
        nodes = list(self._by_block.values())
        assert sum(node.is_idle for node in nodes) == self._num_idle, "idle blocks miscounted"
        assert sum(node.num_pins > 0 for node in nodes) == self._num_pinned, "pins miscounted"
        ready = {node.block for node in nodes if self._is_evictable(node)}
        assert ready == self._evictable.keys(), "leaves missing or doubled"
        for node in nodes:
            parent = node.parent
            assert parent is not None and parent.children[node.tokens] is node, "broken branch"
            assert node.is_idle or not parent.is_idle, f"block {node.block} outlives its prefix"
        assert sum(len(node.children) for node in [self._root, *nodes]) == len(nodes), "lost branch"

    def _is_evictable(self, node: _Node) -> bool:
        return node.is_idle and not node.num_pins and not node.children

    def _offer(self, node: _Node) -> None:
        if self._is_evictable(node):
            self._evictable[node.block] = node
