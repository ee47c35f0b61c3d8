"""Counts the KV blocks that only idle sessions hold, without a walk over all sessions."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class SharedBlock(Protocol):
    """A KV block as vLLM's pool describes it."""

    @property
    def block_id(self) -> int: ...

    @property
    def ref_cnt(self) -> int:
        """Number of requests and prefixes that hold the block."""


@dataclass(slots=True)
class _Kept:
    block: SharedBlock
    num_lasting: int = 0
    """Number of sessions that hold the block until they end."""
    num_windows: int = 0
    """Number of sessions that hold the block as part of a sliding window or recurrent state."""


class SessionBlocks:
    """The blocks that sessions hold, each once, with the number of its sessions."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        """Blocks by id, because vLLM's block objects are not hashable."""

    def add(self, lasting: Iterable[SharedBlock], windows: Iterable[SharedBlock]) -> None:
        """Count the blocks of a session that begins.

        Args:
            lasting: blocks that every holder keeps until it ends.
            windows: blocks that a holder releases as its sequence grows.
        """
        for block in lasting:
            self._kept.setdefault(block.block_id, _Kept(block)).num_lasting += 1
        for block in windows:
            self._kept.setdefault(block.block_id, _Kept(block)).num_windows += 1

    def remove(self, lasting: Iterable[SharedBlock], windows: Iterable[SharedBlock]) -> None:
        """Stop counting the blocks of a session that ends."""
        for block in lasting:
            self._kept[block.block_id].num_lasting -= 1
            self._drop_unused(block)
        for block in windows:
            self._kept[block.block_id].num_windows -= 1
            self._drop_unused(block)

    def num_reclaimable(self) -> float:
        """Return the number of blocks that become free if all sessions end.

        A block of a window is divided equally among its holders. If requests hold the block too,
        the result includes only the fractions of the sessions.
        """
        # vLLM changes the references of blocks with each request, so they are read here.
        total = 0.0
        for kept in self._kept.values():
            num_held = kept.block.ref_cnt
            total += kept.num_lasting == num_held
            if kept.num_windows:
                total += kept.num_windows / num_held
        return total

    def _drop_unused(self, block: SharedBlock) -> None:
        kept = self._kept[block.block_id]
        if not (kept.num_lasting or kept.num_windows):
            del self._kept[block.block_id]
