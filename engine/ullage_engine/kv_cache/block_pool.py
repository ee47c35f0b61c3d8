"""The KV block pool, which tracks free blocks and each block's reference count."""

from collections import Counter
from collections.abc import Iterable

_END = -1


class PoolExhaustedError(Exception):
    """The caller requested more blocks than are free, without checking `num_free` first."""


class BlockPool:
    """Hands out numbered blocks of `block_tokens` tokens, each with a reference count.

    Allocating and freeing a block is O(1). Free blocks form a doubly linked list threaded through
    two arrays, so taking a block from the middle of the list costs the same as taking the first.
    This makes it cheap to give a sequence consecutive blocks: the pool prefers the block that
    follows the sequence's last block whenever it is free.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._ref_counts = [0] * num_blocks
        # A circular list of all blocks with a sentinel, which is both its head and its tail.
        self._head = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]
        self.num_free = num_blocks

    def ref_count(self, block: int) -> int:
        """Return the number of references to the block, or 0 if the block is free."""
        return self._ref_counts[block]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate `count` blocks, preferably a consecutive range that starts right after `after`.

        Raises:
            PoolExhaustedError: if too few blocks are free. No block is allocated in this case.
        """
        if count > self.num_free:
            raise PoolExhaustedError(f"{count} KV blocks requested, {self.num_free} free")

        last = _END if after is None else after
        blocks: list[int] = []
        for _ in range(count):
            last = self._take(self._best_after(last))
            blocks.append(last)
        return blocks

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which must already be in use."""
        for block in block_ids:
            assert self._ref_counts[block] > 0, f"block {block} is free"
            self._ref_counts[block] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each block, and free the blocks that have no references left."""
        for block in block_ids:
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._put(block)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that these block tables hold all references and that all other blocks are free."""
        held = Counter(block for table in tables for block in table)
        for block, ref_count in enumerate(self._ref_counts):
            assert held[block] == ref_count, f"block {block}: {held[block]} held, {ref_count}"

        free = self._walk()
        assert len(free) == len(set(free)) == self.num_free, "free list has a loop or a gap"
        assert all(self._ref_counts[block] == 0 for block in free), "free list holds a used block"

    def _best_after(self, block: int) -> int:
        successor = block + 1
        if block != _END and successor < self.num_blocks and self._ref_counts[successor] == 0:
            return successor
        return self._next[self._head]

    def _take(self, block: int) -> int:
        before = self._previous[block]
        behind = self._next[block]
        self._next[before] = behind
        self._previous[behind] = before
        self._ref_counts[block] = 1
        self.num_free -= 1
        return block

    def _put(self, block: int) -> None:
        # At the tail, so that blocks freed together stay neighbours in the list.
        last = self._previous[self._head]
        self._next[last] = block
        self._previous[block] = last
        self._next[block] = self._head
        self._previous[self._head] = block
        self.num_free += 1

    def _walk(self) -> list[int]:
        blocks: list[int] = []
        block = self._next[self._head]
        while block != self._head and len(blocks) <= self.num_blocks:
            assert self._previous[self._next[block]] == block, f"block {block}: broken links"
            blocks.append(block)
            block = self._next[block]
        return blocks
