"""The scheduler's interface to KV tiers outside the device: offers, queries and copies.

Blocks are offered to the host tier as soon as they enter the prefix cache, so that evicting them
later costs nothing. The server answers by granting host slots. Blocks that are still cached when
the answer arrives are copied to these slots before the next step.

When a sequence starts, the worker asks the server whether any tier has further blocks of its
prefix, beyond those in the prefix cache. While the sequence waits for the answer, other sequences
are computed. It then continues after the loaded blocks. If the last blocks are still being loaded,
the sequence computes the blocks before them in the meantime. After that, it waits for the late
blocks, but only for a small fraction of the time that computing them would take.

The server owns the tiers themselves. `kv_exchange.py` implements the messages between worker and
server. This module decides which messages to send, and plans the copies between host slots and
device blocks. The slots of the host tier are numbered after those of swapped sequences.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from ullage_engine.kv_cache.prefix_cache import KvPolicy, PrefixCache
from ullage_engine.protocol.messages import (
    WINDOW_PART,
    FromKv,
    KvBlock,
    KvFound,
    KvRead,
    KvSlot,
)
from ullage_engine.protocol.step_plan import Chunk, Moves
from ullage_engine.scheduler.batch_plan import Transfers
from ullage_engine.scheduler.estimates import ThroughputEstimator
from ullage_engine.scheduler.kv_exchange import ANSWER_S, KvExchange, KvQuery
from ullage_engine.scheduler.reservations import BlockReservations
from ullage_engine.scheduler.sequence import Sequence
from ullage_kv.keys import CHAIN_BYTES, extend_keys, part_key

_WAIT_SHARE = 0.04
"""Maximum time to wait for late blocks, as a fraction of the time that computing all requested
blocks would take."""
_LEAST_WAIT_S = 0.02
"""Lower bound in seconds for the maximum time to wait for late blocks."""


@dataclass(slots=True)
class _Wait:
    """A sequence that waits for stored KV to be loaded to the device.

    It waits for the answer to its KV query first, and then for free blocks to load into. In the
    meantime, it computes the blocks before the first requested block.
    """

    query: KvQuery
    sequence: Sequence
    longest_s: float
    """Maximum seconds to wait once all blocks before the requested ones have been computed."""
    rest_s: float
    """Value of `longest_s` for a second query, for blocks that were still being loaded."""
    since: float | None = None
    is_late: bool = False
    """Whether the wait has timed out. A late answer may still supply blocks that have not been
    computed by then."""


class _Place(NamedTuple):
    """Where a block was cached when it was offered to the server.

    When the server answers, this shows whether the block is still cached there.
    """

    block: int
    content_key: bytes
    is_window: bool


class TierTransfers:
    """Exchanges messages about KV outside the device with the server, and plans block copies."""

    def __init__(
        self,
        cache: PrefixCache,
        reservations: BlockReservations,
        policy: KvPolicy,
        throughput: ThroughputEstimator,
        clock: Callable[[], float],
    ) -> None:
        """Start with no pending queries or copies. `clock` returns the time in seconds."""
        self._cache = cache
        self._reservations = reservations
        self._space = policy.kv_space
        self._first_slot = policy.host_slots
        self._prefetch = policy.prefetch
        self._throughput = throughput
        self._clock = clock

        self._exchange = KvExchange[_Place]()
        self._waiting: dict[Sequence, _Wait] = {}
        self._ins: list[tuple[int, int]] = []
        """Copies to the device for the next plan, as pairs of a host slot and a device block."""
        self._arriving: dict[Sequence, KvRead] = {}
        """Sequences whose KV the next plan loads, each with the report to send afterwards."""
        self._kept = Transfers()
        """Copies performed by plans without chunks, to be reported with a later plan."""

    @property
    def has_moves(self) -> bool:
        """Return whether a step must perform or report copies, even with nothing to compute."""
        return bool(self._exchange.has_granted or self._ins or self._kept != Transfers())

    def take_messages(self) -> list[FromKv]:
        """Return the messages to the server that have been queued since the last call."""
        return self._exchange.take_messages()

    # to the host tier ----------------------------------------------------------------------------

    def offer(self, sequence: Sequence, first: int, end: int) -> None:
        """Offer a sequence's newly cached blocks, `first` to `end` - 1, to the server."""
        keys = self._keys(sequence, end)
        is_kept = bool(sequence.request.session_id)
        for index in range(first, end):
            block = sequence.blocks.ids[index]
            key = keys[index]
            above = sequence.blocks.ids[index - 1] if index else None
            if above is not None and self._cache.content_key(above) is None:
                # `discard` took the key, as the KV of this text may be damaged.
                return

            is_new = self._cache.set_content_key(block, key)
            if not is_new or index < sequence.prefix.num_stored_blocks:
                continue

            parent = keys[index - 1] if index else None
            self._exchange.offer(KvBlock(key, parent, is_kept), _Place(block, key, is_window=False))
            if (window_block := self._cache.window_block(block)) is not None:
                part = KvBlock(part_key(key, WINDOW_PART), key, is_kept)
                self._exchange.offer(part, _Place(window_block, key, is_window=True))

    def on_granted(self, slots: list[KvSlot]) -> None:
        """Record which slots the server has granted for the oldest unanswered offer."""
        self._exchange.on_granted(slots)

    def discard(self, sequence: Sequence | None, path: list[int]) -> None:
        """Make all tiers discard the KV of every text that starts with the sequence's first block.

        Args:
            sequence: the sequence, or None to discard the KV of all texts.
            path: the sequence's cached blocks.
        """
        self._cache.take_keys(None if sequence is None else path)
        chains = None
        if sequence is not None:
            if len(sequence.token_ids) < self._cache.block_tokens:
                return
            chains = [self._keys(sequence, 1)[0][:CHAIN_BYTES]]
        self._exchange.discard(chains)

    # from all tiers ------------------------------------------------------------------------------

    def ask(self, sequence: Sequence) -> None:
        """Query the server for blocks of a starting sequence's prefix, if a tier may have some."""
        size = self._cache.block_tokens
        held = len(sequence.blocks.ids)
        # Without the last token, which is computed because its logits are needed.
        end = (len(sequence.token_ids) - 1) // size
        is_again = sequence.num_preemptions > 0
        stored = end if is_again else min(end, sequence.request.num_stored_blocks)
        if stored <= held or sequence.num_computed != held * size or sequence in self._waiting:
            return

        rest_wait_s = ANSWER_S
        if self._throughput.prefill_tokens_per_second:
            recompute_s = self._throughput.seconds_until((stored - held) * size, 0)
            rest_wait_s = min(ANSWER_S, max(_LEAST_WAIT_S, _WAIT_SHARE * recompute_s))

        keys = self._keys(sequence, end)[:end]
        self._ask(sequence, held, keys, ANSWER_S, rest_wait_s)

    def _ask(
        self,
        sequence: Sequence,
        first: int,
        keys: list[bytes],
        longest_s: float,
        rest_s: float,
        *,
        is_rest: bool = False,
    ) -> None:
        query = self._exchange.ask(sequence.request_id, first, keys, is_rest=is_rest)
        self._waiting[sequence] = _Wait(query, sequence, longest_s, rest_s)

    def on_found(self, answer: KvFound) -> None:
        """Record the server's answer to a query for stored blocks.

        If the query has ended in the meantime, release the slots in the answer.
        """
        self._exchange.on_found(answer)

    def is_waiting(self, sequence: Sequence) -> bool:
        """Return whether a sequence must wait for the answer to its query before it is computed."""
        wait = self._waiting.get(sequence)
        if wait is None or wait.is_late or sequence.num_computed < self._position(wait.query):
            return False

        now = self._clock()
        if wait.since is None:
            wait.since = now
        wait.is_late = now - wait.since > wait.longest_s
        return not wait.is_late

    def end(self, sequence: Sequence) -> int:
        """Return the position up to which steps may compute the sequence.

        While the sequence waits for stored KV, this is where the requested KV begins. Otherwise it
        is the end of the sequence's tokens.
        """
        wait = self._waiting.get(sequence)
        end = len(sequence.token_ids)
        return end if wait is None or wait.is_late else min(end, self._position(wait.query))

    def is_arriving(self, sequence: Sequence) -> bool:
        """Return whether the next plan will copy stored KV of this sequence to the device."""
        return sequence in self._arriving

    def place(self, in_flight: Container[Sequence]) -> None:
        """Allocate device blocks for the stored KV that the server has found for waiting sequences.

        Sequences in `in_flight` are skipped, and so are sequences that are still computing the
        blocks before the stored ones. If the server's answer says that further blocks are still
        being loaded, and the sequence has not computed these blocks yet, query the server for them.
        """
        for wait in list(self._waiting.values()):
            query = wait.query
            answer = query.answer
            sequence = wait.sequence
            if answer is None or sequence in in_flight:
                continue
            if answer.slots and sequence.num_computed < self._position(query):
                # It still computes the blocks before the loaded ones.
                continue

            del self._waiting[sequence]
            self._exchange.settle(query)
            if not self._place(sequence, query, answer):
                self._exchange.give_back(query.number)

            first = answer.more_from
            if first is not None and first * self._cache.block_tokens >= sequence.num_computed:
                self._ask(sequence, first, query.keys, wait.rest_s, wait.rest_s, is_rest=True)

    def forget(self, sequence: Sequence) -> bool:
        """Drop the pending query and copies of a sequence that is preempted or ends.

        Returns:
            True if copies were dropped, so that the blocks at the sequence's end have never been
            filled.
        """
        wait = self._waiting.pop(sequence, None)
        if wait is not None:
            self._exchange.drop(wait.query)

        read = self._arriving.pop(sequence, None)
        if read is not None:
            blocks = set(sequence.held_blocks)
            self._ins = [move for move in self._ins if move[1] not in blocks]
            self._exchange.give_back(read.number)
        return read is not None

    # plans ---------------------------------------------------------------------------------------

    def drain(self, computed: list[Chunk]) -> tuple[Moves, Transfers]:
        """Remove and return the pending copies for the plan that computes these chunks.

        Returns:
            The moves, and the transfers to report to the server once the plan has been computed.
        """
        arriving = {sequence.request_id for sequence in self._arriving}
        # KV goes in before the step if the step computes it, or has nothing else to do.
        is_waited_for = not computed or any(chunk.request_id in arriving for chunk in computed)
        is_waited_for = is_waited_for or not self._prefetch

        stored = self._exchange.take_granted(self._is_there)
        outs = [(place.block, self._first_slot + slot.slot) for slot, place in stored]
        moves = Moves(
            swap_out=outs,
            swap_in=self._ins if is_waited_for else [],
            prefetch=[] if is_waited_for else self._ins,
        )

        read = tuple(self._arriving.values())
        self._ins = []
        self._arriving = {}
        return moves, Transfers(tuple(slot for slot, _ in stored), read)

    def keep(self, transfers: Transfers) -> None:
        """Save a plan's copies, to be reported with the next plan that has chunks."""
        self._kept = self._kept.and_those_of(transfers)

    def take_kept(self) -> Transfers:
        """Remove and return the saved copies, to report them with a plan that has chunks."""
        kept = self._kept
        self._kept = Transfers()
        return kept

    def finish(self, transfers: Transfers) -> None:
        """Tell the server which copies are complete on all ranks."""
        self._exchange.report(transfers.stored, transfers.read)

    def _is_there(self, place: _Place) -> bool:
        content_key = self._cache.content_key(place.block, is_window=place.is_window)
        return content_key == place.content_key

    def _place(self, sequence: Sequence, query: KvQuery, answer: KvFound) -> bool:
        size = self._cache.block_tokens
        held = len(sequence.blocks.ids)
        end = query.first + len(answer.slots)
        # The first loaded block may be computed in part already. It is then overwritten.
        first = sequence.num_computed // size
        is_shared = any(self._cache.is_shared(block) for block in sequence.blocks.ids[first:])
        if not answer.slots or end <= first or held > end or is_shared:
            return False

        num_new = end - held
        # No sequence is preempted for it. Blocks without room are computed when their turn comes.
        blocks = self._reservations.take(sequence, num_new + len(answer.window_slots), ())
        if blocks is None:
            return False

        table = sequence.blocks.ids + blocks[:num_new]
        slots = answer.slots[first - query.first :] + answer.window_slots
        into = table[first:] + blocks[num_new:]
        self._ins += [(self._first_slot + slot, to) for slot, to in zip(slots, into, strict=True)]

        sequence.blocks.ids = table
        if self._cache.is_windowed:
            first_window = end - len(answer.window_slots)
            self._reservations.replace_windows(sequence, first_window, blocks[num_new:])
        sequence.set_computed(end * size)
        sequence.prefix.num_stored_blocks = end
        self._arriving[sequence] = KvRead(number=query.number, num_blocks=end - first)
        return True

    def _position(self, query: KvQuery) -> int:
        return query.first * self._cache.block_tokens

    def _keys(self, sequence: Sequence, end: int) -> list[bytes]:
        """Return the content keys of at least the sequence's first `end` blocks."""
        keys = sequence.prefix.content_keys
        if len(keys) < end:
            size = self._cache.block_tokens
            salt = sequence.request.cache_salt
            tokens = sequence.token_ids[: end * size]
            keys += list(extend_keys(self._space, keys, tokens, size, salt))
        return keys
