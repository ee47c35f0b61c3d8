"""Queue of admitted sequences, which are running or waiting for KV blocks or an adapter.

Blocks are reserved for a sequence before it is passed to vLLM, and again before it outgrows its
reservation. If no blocks are left, the least important sequence is preempted: vLLM aborts it, and
it later resumes with its prompt and all tokens generated so far.
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
"""A sequence's reservation is extended once it has room for at most this many more tokens."""


class RunQueue:
    """Starts, extends, preempts and removes sequences in order of importance."""

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
        """Sequences that are waiting for blocks or for an adapter slot, most important first."""
        self.failed: list[RequestFailed] = []
        """Failed requests that have not been reported to the server yet."""
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
        """Running sequences that may outgrow their reserved blocks."""
        self._shrinking: dict[str, VllmSequence] = {}
        """Running sequences that still reserve blocks that only their prompts needed."""

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences, which are those that hold no blocks in vLLM."""
        num_held = self._core.blocks.num_held
        return sum(
            not (each.is_running and num_held(each.request_id)) for each in self.by_id.values()
        )

    @property
    def num_spared(self) -> int:
        """Number of blocks that new requests must leave unreserved.

        These are the blocks that waiting sequences need, and the blocks withheld because other
        processes have taken the memory. Sequences that must also wait for an adapter slot do not
        count.
        """
        return self.num_spared_for(self._adapters.with_slots(self.by_id.values(), self.deferred))

    def num_spared_for(self, waiting: Iterable[VllmSequence]) -> int:
        """Return how many blocks new requests must leave unreserved while these sequences wait."""
        num_blocks = sum(self._costs.charged_blocks(each) for each in waiting)
        return self._reservations.num_withheld + num_blocks

    def slot_for(self, sequence: VllmSequence) -> str | None:
        """Choose a slot for the sequence's adapter, and return the adapter to unload first.

        See `Adapters.slot_for`.
        """
        return self._adapters.slot_for(sequence, self.by_id.values(), self.deferred)

    # start and end -------------------------------------------------------------------------------

    def reserve_new(self, sequence: VllmSequence, spared: int) -> bool:
        """Start a new sequence, or only reserve its blocks if it must wait for its parent.

        The parent is another sample of the same prompt, whose blocks this sequence will share.

        Returns:
            False if fewer than `spared` blocks would stay unreserved.
        """
        if sequence in self.deferred:  # its parent has just failed
            return True
        if sequence.parent is None:
            return self._start(sequence, spared)
        num_blocks = self._costs.charged_blocks(sequence)
        return self._reservations.reserve(sequence.request_id, num_blocks, spared)

    def defer(self, sequence: VllmSequence) -> None:
        """Queue a sequence until it can start by itself, independently of other samples.

        This clears its `parent`, the sample whose prompt it was waiting for, and its `children`,
        the samples that were waiting for its own prompt.
        """
        sequence.parent = None
        sequence.children = []
        bisect.insort(self.deferred, sequence, key=rank_of)

    def start_deferred(self) -> None:
        """Start waiting sequences, most important first.

        No sequence overtakes one that is waiting for blocks, because small sequences would then
        starve a large one. Sequences waiting for an adapter slot are skipped.
        """
        while first := next(self._adapters.with_slots(self.by_id.values(), self.deferred), None):
            self.deferred.remove(first)
            if not self._start(first):
                self.defer(first)
                return

    def start_children(self, parent: VllmSequence) -> None:
        """Start the samples that were waiting for vLLM to compute their common prompt."""
        children = parent.children
        parent.children = []
        for child in children:
            child.parent = None
            self._reservations.release(child.request_id)
            if not self._start(child, is_cached=True):
                self.defer(child)

    def abort(self, sequence: VllmSequence) -> None:
        """Abort a sequence in vLLM and remove it, but keep its session's blocks."""
        if sequence.is_running:
            # Keep the blocks first: the sequence holds them only until it is removed.
            self._keep_session(sequence)
            self._core.abort(sequence.request_id)
        self.remove(sequence)

    def finish(self, sequence: VllmSequence, *, keeps_session: bool = False) -> None:
        """Remove a sequence that vLLM has finished."""
        if keeps_session:
            self._keep_session(sequence)
        self._core.forget(sequence.request_id)
        self.remove(sequence)

    def remove(self, sequence: VllmSequence) -> None:
        """Remove a sequence and its reservation."""
        self._stop(sequence)
        if sequence in self.deferred:
            self.deferred.remove(sequence)
        self.by_id.pop(sequence.request_id, None)

    def _start(self, sequence: VllmSequence, spared: int = 0, *, is_cached: bool = False) -> bool:
        """Reserve a sequence's blocks and pass it to vLLM. Return False if the blocks do not fit.

        Args:
            sequence: the sequence.
            spared: number of blocks that must stay unreserved.
            is_cached: whether the prefix cache is likely to hold much of the sequence. If not, the
                cache is consulted only if the sequence would not fit otherwise.
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

        # vLLM looks up its prefix cache by its own request object, so pass it the sequence first.
        self._give(sequence)
        if not sequence.is_running or reservations.reserve_with_prefix(
            request_id, num_blocks, spared
        ):
            return True
        self._core.abort(request_id)
        sequence.is_running = False
        return False

    def _give(self, sequence: VllmSequence) -> bool:
        """Pass a sequence to vLLM, or fail it if vLLM rejects it. Always return True.

        The result tells `_start` that the sequence does not have to wait.
        """
        request = sequence.request
        if len(sequence.token_ids) > len(request.token_ids):
            request = structs.replace(request, token_ids=list(sequence.token_ids))
        try:
            # None occurs for a sample of a running sequence whose adapter is to be unloaded.
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
        """Abort a sequence in vLLM if it is running, and end its reservation.

        Samples that were waiting for this sequence now wait for blocks instead.
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
        """Record that vLLM has generated tokens for a sequence."""
        if not sequence.has_token:
            sequence.has_token = True
            if self._has_windows:
                self._shrinking[sequence.request_id] = sequence

    def adjust_reservations(self) -> None:
        """Shrink reservations of decoding sequences, and extend those that are nearly exhausted."""
        self._shrink_reservations()
        self._extend_reservations()

    def _shrink_reservations(self) -> None:
        """Shrink the reservations of sequences whose sliding windows have moved past the prompt.

        From then on, a sequence needs only enough blocks for decoding.
        """
        for request_id, sequence in list(self._shrinking.items()):
            num_blocks = self._costs.charged_blocks(sequence)
            if self._reservations.shrink(request_id, num_blocks):
                del self._shrinking[request_id]

    def _extend_reservations(self) -> None:
        """Add one block to the reservation of each sequence that has nearly exhausted it."""
        for sequence in list(self._growing.values()):
            if not sequence.is_running or sequence.num_left > _MARGIN_TOKENS:
                continue
            charged = sequence.charged_tokens + self._block_tokens
            sequence.charged_tokens = min(charged, sequence.final_tokens)
            self._make_room(sequence)
            if sequence.charged_tokens == sequence.final_tokens:
                self._growing.pop(sequence.request_id, None)

    def _make_room(self, sequence: VllmSequence) -> None:
        """Reserve blocks for a sequence's `charged_tokens`, preempting sequences if necessary.

        The least important sequences are preempted first, possibly including this one.
        """
        num_blocks = self._costs.charged_blocks(sequence)
        while not self._reservations.extend(sequence.request_id, num_blocks):
            holders = (each for each in self.by_id.values() if each.is_running or each.parent)
            victim = max(holders, key=rank_of)
            self._preempt(victim)
            if victim is sequence:
                return

    def _preempt(self, sequence: VllmSequence) -> None:
        """Stop a sequence, release its blocks, and queue it until enough blocks are available."""
        if sequence.is_running:
            sequence.num_preemptions += 1
            self._events.on_preempted(sequence.request, sequence.num_preemptions, False)
            self.num_preemptions += 1
        self._stop(sequence)
        self.defer(sequence)
