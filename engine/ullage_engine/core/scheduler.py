"""Decides which tokens are computed next and who holds memory; knows neither device nor model."""

import time
from collections.abc import Callable

from ullage_engine.core.admission import soonest
from ullage_engine.core.chunks import (
    Finish,
    common_prefix,
    finish_of,
    logprobs_of,
    stored_tokens,
)
from ullage_engine.core.groups import Groups
from ullage_engine.core.intake import Intake
from ullage_engine.core.limits import Counters, SchedulerLimits
from ullage_engine.core.pace import Pace
from ullage_engine.core.plan import SampledToken, StepPlan
from ullage_engine.core.planning import Planner
from ullage_engine.core.preemption import Mover
from ullage_engine.core.request import EngineRequest
from ullage_engine.core.roster import Roster
from ullage_engine.core.sequence import Sequence
from ullage_engine.core.states import States
from ullage_engine.kv.blocks import PoolUsage
from ullage_engine.kv.store import KvPolicy, KvStore
from ullage_engine.memory.expected import ExpectedOutput
from ullage_engine.memory.predictor import block_bytes
from ullage_engine.memory.promises import Promises
from ullage_engine.messages import Profile, Rejected, ReleaseState, TokenOutput

__all__ = ["KvPolicy", "Scheduler", "SchedulerLimits"]

_PLAIN_POLICY = KvPolicy()


class Scheduler:
    """Continuous batching over a store of KV blocks.

    Use: `submit`, `submit_group`, `fork` and `cancel` at any time between steps; then for
    each step `schedule`, do the plan's moves, compute it, `commit`. Nothing is dropped: an admitted
    request ends by a token with a finish, by `cancel` or by `fail_newest`.
    """

    def __init__(
        self,
        profile: Profile,
        limits: SchedulerLimits,
        pace: Pace,
        expected: ExpectedOutput,
        policy: KvPolicy = _PLAIN_POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_blocks = profile.kv_pool_bytes // block_bytes(profile)
        self.counters = Counters()
        self._block_bytes = block_bytes(profile)
        self._limits = limits
        self._expected = expected
        self._roster, self._groups = Roster(), Groups()
        self._store = KvStore(num_blocks, profile.block_tokens, policy, clock)
        self._promises = Promises(self._store)
        self._mover = Mover(self._store, self._block_bytes, policy.host_slots, pace)
        parts = self._store, self._promises
        self._states = States(limits.replay_tokens, limits.max_sequences, self._roster)
        self._intake = Intake(profile, limits, pace, expected, *parts, self._roster, self._groups)
        self._planner = Planner(
            limits,
            expected,
            *parts,
            self._mover,
            self._roster,
            self._groups,
            self._states,
            self.counters,
        )

    # what it holds -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return len(self._roster) > 0

    @property
    def num_running(self) -> int:
        return self._roster.num_running

    @property
    def num_waiting(self) -> int:
        return self._roster.num_waiting

    @property
    def num_steps(self) -> int:
        return self.counters.num_steps

    @property
    def num_preemptions(self) -> int:
        return self.counters.num_preemptions

    @property
    def num_swaps(self) -> int:
        """Preemptions whose KV went to the host."""
        return self._mover.num_swaps

    @property
    def num_sessions(self) -> int:
        return self._store.num_sessions

    @property
    def session_bytes(self) -> int:
        return self._store.num_session_blocks * self._block_bytes

    @property
    def expected_output_tokens(self) -> int:
        return self._expected.tokens

    @property
    def prefill_backlog_tokens(self) -> int:
        """Prompt tokens admitted and not computed."""
        return sum(each.num_remaining for each in self._roster if not each.is_decoding)

    @property
    def free_bytes(self) -> int:
        """KV memory that holds nothing."""
        return self._store.num_free * self._block_bytes

    @property
    def reclaimable_bytes(self) -> int:
        """KV memory that is kept for reuse and given up as soon as it is needed."""
        return self._store.num_reclaimable * self._block_bytes

    @property
    def available_bytes(self) -> int:
        """What a new request may be promised."""
        return self._promises.num_available * self._block_bytes

    @property
    def usage(self) -> PoolUsage:
        """How full the blocks are that sequences hold, each block counted once."""
        size, cached = self._store.block_tokens, self._store.num_cached_used
        used = cached * size + stored_tokens(self._roster, size, self._store.is_cached)
        return PoolUsage(self._store.num_used * size, used)

    def releases(self) -> list[ReleaseState]:
        """Memory predicted to come back, soonest first; the last entry holds all the rest."""
        return soonest(self._intake.releases())

    def check_integrity(self) -> None:
        """Asserts that no block or slot is lost and no promise exceeds what there is."""
        self._promises.check_integrity(self._roster)
        self._mover.check_integrity(list(self._roster))
        self._roster.check_integrity()
        self._states.check_integrity()
        assert self.num_running <= self._limits.max_sequences, "batch too large"
        for each in self._roster:
            held = len(each.block_ids) * self._store.block_tokens
            assert each.num_computed <= held, f"{each.request_id}: tokens outside its blocks"
            assert each.leader is None or not each.is_running, "runs before its leader"

    # requests in and out -------------------------------------------------------------------------

    def submit(
        self, request: EngineRequest, *, resumed: bool = False
    ) -> Rejected | TokenOutput | None:
        """Admits a request and promises it memory, or refuses it and keeps nothing.

        A resumed request was admitted before: it may have to wait for its promise but is not
        refused one. It is answered at once if nothing is left of it to produce.
        """
        answer = self.submit_group([request], resumed=resumed)
        if isinstance(answer, Rejected):
            return answer
        return answer[0] if answer else None

    def submit_group(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Admits samples of one prompt together, or refuses all of them and names the first.

        They share the KV of what their tokens have in common and are charged for it once. The
        answer has an output for each sample of which nothing is left to produce.
        """
        used = self._intake.refuse_used(requests)
        if used:
            return used
        done = [request for request in requests if self._is_complete(request, resumed)]
        left = [request for request in requests if request not in done]
        is_resumed = resumed or any(len(e.token_ids) > e.num_prompt_tokens for e in requests)
        refusal = self._intake.submit(left, is_resumed) if left else None
        if refusal:
            return refusal
        return [
            TokenOutput(request_id=request.request_id, token_ids=[], finish="length")
            for request in done
        ]

    def fork(self, parent_id: str, child_request: EngineRequest) -> None:
        """Admits a request that shares the KV its tokens have in common with those of a parent.

        For searches that branch. The child ranks right behind its parent and is never refused: if
        memory is short it waits like a preempted sequence. The parent goes on unchanged; `cancel`
        it when it is not wanted, and before others fork, so that its promise is free for them. Of
        a parent that has ended the child has what the prefix cache still knows.
        """
        assert child_request.request_id not in self._roster, "the child's id is in use"
        parent = self._roster.get(parent_id)
        if parent is None:
            self._intake.submit([child_request], resumed=True)
            return
        child = self._intake.sequence(child_request, parent.priority, parent.arrival)
        child.cached_prompt_tokens = parent.cached_prompt_tokens
        self._roster.add(child)
        computed = parent.token_ids[: parent.num_computed]
        shared = common_prefix(child_request.token_ids[:-1], computed)
        if shared:
            self._fork(parent, child, shared)
        else:
            self._promises.owe(child)

    def cancel(self, request_id: str, *, is_answered: bool = False) -> None:
        """Forgets a request and frees its memory; one that is gone already is no error.

        The length of an answer that a stop string ended tells as much as any other.
        """
        sequence = self._roster.get(request_id)
        if sequence:
            if is_answered:
                self._observe_output(sequence, "stop")
            self._remove(sequence)

    def fail_newest(self) -> str | None:
        """Gives up on the least important running sequence; its request id."""
        victim = self._roster.newest_running
        if victim:
            self._remove(victim)
        return victim.request_id if victim else None

    def preempt_newest(self) -> bool:
        """Frees the memory of the least important running sequence; it waits to go on."""
        victim = self._roster.newest_running
        if victim:
            self._planner.preempt(victim)
        return victim is not None

    def set_batch_share(self, share: float) -> None:
        """Lets this share of `max_sequences`, at least one, run at once.

        Those that run already go on; none starts until fewer do.
        """
        self._planner.max_running = max(1, int(self._limits.max_sequences * min(1.0, share)))

    def end_idle_sessions(self) -> None:
        """Ends sessions that were not used for their idle time."""
        self._store.end_idle_sessions()

    def evict_all(self) -> None:
        """Forgets all KV that no sequence uses."""
        self._store.evict_all()

    # a step --------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step: running sequences first, then those that wait, as memory allows."""
        self._store.end_idle_sessions()
        return self._planner.plan(self._limits.prompt_tokens, self._limits.is_chunked)

    def replan(self, prompt_tokens: int) -> StepPlan:
        """Plans the same step anew with smaller prompt chunks; no waiting sequence starts.

        The moves of the plan before were done; the new plan has only those that came up since.
        """
        return self._planner.replan(prompt_tokens)

    def commit(self, sampled: list[SampledToken]) -> list[TokenOutput]:
        """Takes over the result of the planned step.

        A token that ends its sequence is part of the output, stop tokens included.
        """
        for sequence, chunk in self._planner.planned:
            sequence.num_computed = max(sequence.num_computed, chunk.end)
            self._states.commit(sequence, chunk)
            sequence.last_step = self.counters.num_steps
            self._remember(sequence)
        for sequence, _ in self._planner.planned:
            for follower in self._groups.take_ready(sequence):
                self._fork_follower(sequence, follower)
        self._planner.planned = []
        self.counters.num_steps += 1
        return [self._append(token) for token in sampled if token.request_id in self._roster]

    # results -------------------------------------------------------------------------------------

    def _remember(self, sequence: Sequence) -> None:
        full = sequence.num_computed // self._store.block_tokens
        first = sequence.num_cached_blocks
        if not self._store.has_cache or full <= first:
            return
        table = list(sequence.block_ids)
        num_merged = self._store.remember(sequence.token_ids, table, first, full)
        self.counters.prefix_merged_tokens += num_merged * self._store.block_tokens
        sequence.block_ids, sequence.num_cached_blocks = table, full

    def _fork_follower(self, leader: Sequence, follower: Sequence) -> None:
        follower.cached_prompt_tokens = leader.cached_prompt_tokens
        self._fork(leader, follower, follower.num_shared)

    def _fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        if self._promises.fork(parent, child, num_tokens, self._roster):
            self._states.share(parent, child)

    def _is_complete(self, request: EngineRequest, resumed: bool) -> bool:
        """Nothing is left to produce of a request that was admitted before."""
        produced = len(request.token_ids) - request.num_prompt_tokens
        was_admitted = resumed or produced > 0
        is_full = len(request.token_ids) >= self._intake.longest
        return was_admitted and (produced >= request.max_tokens or is_full)

    def _append(self, sampled: SampledToken) -> TokenOutput:
        sequence = self._roster[sampled.request_id]
        sequence.token_ids.append(sampled.token_id)
        finish = finish_of(sequence, sampled.token_id)
        if finish:
            self._observe_output(sequence, finish)
            self._remove(sequence)
        return TokenOutput(
            request_id=sampled.request_id,
            token_ids=[sampled.token_id],
            finish=finish,
            logprobs=logprobs_of(sequence, sampled),
            num_preemptions=sequence.num_preemptions,
            num_cached_tokens=sequence.cached_prompt_tokens or 0,
        )

    def _observe_output(self, sequence: Sequence, finish: Finish) -> None:
        # Output cut below the estimate by its own limit does not tell how long outputs are.
        if finish == "stop" or sequence.num_output >= self._expected.tokens:
            self._expected.observe(sequence.num_output)

    def _remove(self, sequence: Sequence) -> None:
        session, path = sequence.request.session_id, sequence.block_ids
        if session and sequence.num_cached_blocks:
            self._store.keep_session(session, path[: sequence.num_cached_blocks])
        left = self._groups.remove(sequence)
        self._mover.forget(sequence)
        self._promises.release(sequence)
        self._states.release(sequence)
        sequence.is_running = False
        self._roster.remove(sequence)
        self._planner.planned = [
            entry for entry in self._planner.planned if entry[0] is not sequence
        ]
        for follower in left:
            self._promises.owe(follower)
