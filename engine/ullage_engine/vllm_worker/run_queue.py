"""Admitted sequences: those that vLLM computes, and those that wait for blocks or an adapter.

Blocks are reserved for a sequence before vLLM gets it, and more before it outgrows them. Where none
are left, the least important sequence is preempted: taken back from vLLM, to go on later as its
prompt and the tokens it has.
"""

import bisect
from collections.abc import Iterable

from msgspec import structs

from ullage_common.request_cost import MemoryProfile
from ullage_engine.protocol.messages import RequestFailed
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.vllm_worker.adapters import Adapters
from ullage_engine.vllm_worker.costs import BlockCosts
from ullage_engine.vllm_worker.interface import AdapterError, Core, InvalidRequestError
from ullage_engine.vllm_worker.reservations import Reservations
from ullage_engine.vllm_worker.sequence import EngineLimits, VllmSequence, rank_of

_MARGIN_TOKENS = 2
"""Tokens before the end of its charged length at which a sequence is charged for more."""


class RunQueue:
    """Starts, grows, preempts and removes sequences, the most important ones first."""

    def __init__(
        self,
        core: Core,
        profile: MemoryProfile,
        limits: EngineLimits,
        costs: BlockCosts,
        reservations: Reservations,
        adapters: Adapters,
        events: RequestEvents,
    ) -> None:
        self.by_id: dict[str, VllmSequence] = {}
        self.deferred: list[VllmSequence] = []
        """Sequences that wait for blocks or for an adapter's slot, the most important first."""
        self.failed: list[RequestFailed] = []
        """Requests given up, for the server."""
        self.num_preemptions = 0

        self._core = core
        self._block_tokens = profile.block_tokens
        self._has_windows = bool(profile.windows)
        self._limits = limits
        self._costs = costs
        self._reservations = reservations
        self._adapters = adapters
        self._events = events
        self._growing: dict[str, VllmSequence] = {}
        """Running sequences that are charged for less than they may become."""
        self._shrinking: dict[str, VllmSequence] = {}
        """Running sequences with blocks reserved that only their prompts needed."""

    @property
    def num_waiting(self) -> int:
        """Number of sequences that hold no blocks in vLLM."""
        num_held = self._core.blocks.num_held
        return sum(
            not (each.is_running and num_held(each.request_id)) for each in self.by_id.values()
        )

    @property
    def num_spared(self) -> int:
        """Blocks that new requests may not take: withheld ones, and those for the sequences that
        wait only for blocks.
        """
        return self.num_spared_for(self._adapters.with_slots(self.by_id.values(), self.deferred))

    def num_spared_for(self, waiting: Iterable[VllmSequence]) -> int:
        """Return the blocks that new requests may not take if these sequences wait for blocks."""
        num_blocks = sum(self._costs.charged_blocks(each) for each in waiting)
        return self._reservations.num_withheld + num_blocks

    def slot_for(self, sequence: VllmSequence) -> str | None:
        """Return the adapter that gives its slot to the sequence's; see `Adapters.slot_for`."""
        return self._adapters.slot_for(sequence, self.by_id.values(), self.deferred)

    # start and end -------------------------------------------------------------------------------

    def reserve_new(self, sequence: VllmSequence, spared: int) -> bool:
        """Start a new sequence, or reserve the blocks of one that waits for its parent; return
        False if they do not fit together with `spared` ones.
        """
        if sequence in self.deferred:  # its parent has just failed
            return True
        if sequence.parent is None:
            return self._start(sequence, spared)
        num_blocks = self._costs.charged_blocks(sequence)
        return self._reservations.reserve(sequence.request_id, num_blocks, spared)

    def defer(self, sequence: VllmSequence) -> None:
        """Let a sequence wait for blocks, by itself."""
        sequence.parent = None
        sequence.children = []
        bisect.insort(self.deferred, sequence, key=rank_of)

    def start_deferred(self) -> None:
        """Start the sequences that wait, the most important first.

        No sequence overtakes another for blocks: small ones would starve a large one. Sequences
        that wait for an adapter's slot are passed over.
        """
        while first := next(self._adapters.with_slots(self.by_id.values(), self.deferred), None):
            self.deferred.remove(first)
            if not self._start(first):
                self.defer(first)
                return

    def start_children(self, parent: VllmSequence) -> None:
        """Start the samples that waited until vLLM has the blocks of their prompt."""
        children = parent.children
        parent.children = []
        for child in children:
            child.parent = None
            self._reservations.release(child.request_id)
            if not self._start(child, is_cached=True):
                self.defer(child)

    def abort(self, sequence: VllmSequence) -> None:
        """Take a sequence back from vLLM for good, and keep its session's blocks."""
        if sequence.is_running:
            # Kept before it is dropped: its blocks are still its own.
            self._keep_session(sequence)
            self._core.abort(sequence.request_id)
        self.remove(sequence)

    def finish(self, sequence: VllmSequence, *, keeps_session: bool = False) -> None:
        """Remove a sequence that vLLM has ended."""
        if keeps_session:
            self._keep_session(sequence)
        self._core.forget(sequence.request_id)
        self.remove(sequence)

    def remove(self, sequence: VllmSequence) -> None:
        """Drop a sequence and its reservation."""
        self._stop(sequence)
        if sequence in self.deferred:
            self.deferred.remove(sequence)
        self.by_id.pop(sequence.request_id, None)

    def _start(self, sequence: VllmSequence, spared: int = 0, *, is_cached: bool = False) -> bool:
        """Give a sequence to vLLM with all its blocks reserved; return False where they do not fit.

        Args:
            is_cached: whether the prefix cache is likely to have much of the sequence. Otherwise
                the cache is only looked up if the sequence does not fit without.
        """
        request_id = sequence.request_id
        reservations = self._reservations
        num_blocks = self._costs.charged_blocks(sequence)
        key = sequence.session_key
        is_cached = (bool(key) and reservations.use_session(key)) or is_cached
        if not is_cached and reservations.reserve(request_id, num_blocks, spared):
            return self._give(sequence)
        if not self._limits.shares_prompts:
            return False

        # vLLM looks up its prefix cache by its own request, so it gets the sequence first.
        self._give(sequence)
        if not sequence.is_running or reservations.reserve_with_prefix(
            request_id, num_blocks, spared
        ):
            return True
        self._core.abort(request_id)
        sequence.is_running = False
        return False

    def _give(self, sequence: VllmSequence) -> bool:
        """Give a sequence to vLLM; return True. A sequence that vLLM refuses has failed and does
        not run.
        """
        request = sequence.request
        if len(sequence.token_ids) > len(request.token_ids):
            request = structs.replace(request, token_ids=list(sequence.token_ids))
        try:
            # None: for a sample of a running one, which uses the adapter that is to give way.
            if (slot := self.slot_for(sequence)) is not None:
                self._adapters.use(request.adapter, slot)
            self._core.add(request, sequence.final_tokens - len(sequence.token_ids))
        except (InvalidRequestError, AdapterError) as error:
            self.remove(sequence)
            failed = RequestFailed(
                request_id=sequence.request_id, message=str(error), field=error.field
            )
            self.failed.append(failed)
            return True

        sequence.is_running = True
        sequence.has_token = False
        sequence.num_computed = 0
        if sequence.charged_tokens < sequence.final_tokens:
            self._growing[sequence.request_id] = sequence
        return True

    def _stop(self, sequence: VllmSequence) -> None:
        """Take a sequence back from vLLM, if it runs, and end its reservation. Samples that waited
        for it wait for blocks now.
        """
        if sequence.is_running:
            self._core.abort(sequence.request_id)
            sequence.is_running = False
            sequence.has_token = False
        if sequence.parent is not None:
            sequence.parent.children.remove(sequence)
            sequence.parent = None

        self._growing.pop(sequence.request_id, None)
        self._shrinking.pop(sequence.request_id, None)
        self._reservations.release(sequence.request_id)

        children = sequence.children
        sequence.children = []
        for child in children:
            child.parent = None
            self._reservations.release(child.request_id)
            self.defer(child)

    def _keep_session(self, sequence: VllmSequence) -> None:
        key = sequence.session_key
        if key:
            self._reservations.keep_session(key, sequence.request_id)

    # blocks of running sequences -----------------------------------------------------------------

    def on_token(self, sequence: VllmSequence) -> None:
        """Record that vLLM has produced tokens of a sequence."""
        if not sequence.has_token:
            sequence.has_token = True
            if self._has_windows:
                self._shrinking[sequence.request_id] = sequence

    def adjust_reservations(self) -> None:
        """Shrink the reservations of sequences that decode now, and extend those that come near
        their end.
        """
        self._shrink_reservations()
        self._extend_reservations()

    def _shrink_reservations(self) -> None:
        """Reserve only the blocks that decodes need, once windows have slid past the prompts."""
        for request_id, sequence in list(self._shrinking.items()):
            num_blocks = self._costs.charged_blocks(sequence)
            if self._reservations.shrink(request_id, num_blocks):
                del self._shrinking[request_id]

    def _extend_reservations(self) -> None:
        """Reserve one more block for each sequence that comes near the end of its reservation."""
        for sequence in list(self._growing.values()):
            if not sequence.is_running or sequence.num_left > _MARGIN_TOKENS:
                continue
            charged = sequence.charged_tokens + self._block_tokens
            sequence.charged_tokens = min(charged, sequence.final_tokens)
            self._make_room(sequence)
            if sequence.charged_tokens == sequence.final_tokens:
                self._growing.pop(sequence.request_id, None)

    def _make_room(self, sequence: VllmSequence) -> None:
        """Reserve the charged blocks of a sequence, preempting the least important sequences, which
        may be this one.
        """
        num_blocks = self._costs.charged_blocks(sequence)
        while not self._reservations.extend(sequence.request_id, num_blocks):
            holders = (each for each in self.by_id.values() if each.is_running or each.parent)
            victim = max(holders, key=rank_of)
            self._preempt(victim)
            if victim is sequence:
                return

    def _preempt(self, sequence: VllmSequence) -> None:
        """Take a sequence's blocks. It goes on when it can have them again."""
        if sequence.is_running:
            sequence.num_preemptions += 1
            self._events.on_preempted(sequence.request, sequence.num_preemptions, False)
            self.num_preemptions += 1
        self._stop(sequence)
        self.defer(sequence)
