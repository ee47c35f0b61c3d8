"""Selective write-through: copies blocks to lower tiers if they are likely to be read again."""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future

from ullage_kv.arena import Arena
from ullage_kv.fetch import PART_BLOCKS, parts_of
from ullage_kv.futures import Steps, run
from ullage_kv.index import Lease, SlotIndex
from ullage_kv.results import Result
from ullage_kv.tier import LowerTier, Transfer

_MIN_USES = 2
"""Number of uses after which an ordinary block is copied to lower tiers.

Blocks whose `Block.is_kept` is set are copied on their first use.
"""

_PART_BYTES = 16 << 20
"""Maximum bytes per `save` call to a lower tier.

The blocks stay pinned until the call completes.
"""


class WriteThrough:
    """Copies blocks from host memory to lower tiers in the background. Thread-safe."""

    def __init__(
        self,
        arena: Arena,
        block_bytes: int,
        index: SlotIndex,
        lease: Lease,
        tiers: Sequence[LowerTier],
    ) -> None:
        """Create the copier.

        Args:
            arena: the memory of the host tier.
            block_bytes: bytes per block.
            index: the blocks in host memory.
            lease: lease under which blocks are pinned while they are being copied.
            tiers: tiers below host memory, the fastest first.
        """
        self._arena = arena
        self._block_bytes = block_bytes
        self._index = index
        self._lease = lease
        self._tiers = tiers
        self._part_blocks = max(1, min(PART_BLOCKS, _PART_BYTES // block_bytes))

    def copy(self, keys: Sequence[bytes], *, are_kept: bool = False) -> None:
        """Start copying blocks that have been used often enough. If `are_kept` is set, copy all."""
        if not self._tiers:
            return

        min_uses = 1 if are_kept else _MIN_USES
        uses = self._index.uses_of_each(keys)
        chosen = [key for key, num_uses in zip(keys, uses, strict=True) if num_uses >= min_uses]
        for tier in self._tiers:
            run(self._copy_each(tier, chosen))

    def _copy_each(self, tier: LowerTier, keys: Sequence[bytes]) -> Steps:
        """Copy blocks to a tier, a limited number at a time, until the tier accepts no more."""
        for part in parts_of(len(keys), self._part_blocks):
            saving = self._save(tier, keys[part.start : part.stop])
            if saving is None:
                continue
            yield saving
            if any(result.is_refusal for result in saving.result()):
                return

    def _save(self, tier: LowerTier, keys: Sequence[bytes]) -> "Future[list[Result]] | None":
        """Start saving those blocks that the tier wants.

        Returns:
            A future for the results of these blocks, or None if there are none to save.
        """
        wanted = itertools.compress(keys, tier.wants(keys))
        pinned = [(key, ref) for key in wanted if (ref := self._lease.pin(key)) is not None]
        if not pinned:
            return None

        def unpin(_: object) -> None:
            for _, ref in pinned:
                self._lease.unpin(ref)

        transfers = [
            Transfer(key, self._arena.slot(ref.slot, self._block_bytes), self._index.parent(key))
            for key, ref in pinned
        ]
        saving = tier.save(transfers)
        saving.add_done_callback(unpin)
        return saving
