"""A scheduler over a device of blocks whose tokens tell what was really in them."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.kernels.batch import (
    NO_SLOT,
    ConvPlan,
    StepBatch,
    begun_blocks,
    build_batch,
    prefill_tiles,
)
from ullage_engine.kv_tiers.broker import BlockFormat, KvBroker, TierHits
from ullage_engine.kv_tiers.cost import ComputeSpeed
from ullage_engine.protocol.messages import KvFound, KvGranted, Rejected
from ullage_engine.protocol.requests import (
    EngineRequest,
    PromptLogprobs,
    SamplingParams,
    TokenOutput,
)
from ullage_engine.protocol.step_plan import Chunk, Moves, SampledToken, StepPlan, state_slots
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import KvPolicy, Scheduler, SchedulerLimits
from ullage_kv import Arena, LowerTier, Store

BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * 1000
VOCAB = range(10, 100)


def entry(before: int, token: int, position: int) -> int:
    """What a device stores for a token: it depends on all tokens before."""
    return hash((before, token, position))


def choose(entries: list[int], seed: int) -> int:
    """The next token after a context: it depends on every stored entry."""
    return VOCAB[hash((seed, *entries)) % len(VOCAB)]


def choose_repetitively(entries: list[int], seed: int) -> int:
    """One that goes on with a pattern more often than not, as in text that is worth a guess."""
    is_free = hash((seed, *entries)) % 8 == 0
    return choose(entries, seed) if is_free else VOCAB[20 + len(entries) % 3]


class Device:
    """Runs plans on blocks of entries, and refuses plans that a real device could not run."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.blocks = [[0] * BLOCK_TOKENS for _ in range(num_blocks)]
        self.slots = [[0] * BLOCK_TOKENS for _ in range(num_slots)]
        self.num_copies = 0
        self.scored: list[PromptLogprobs] = []
        """What steps have scored. A rank tells what the row saw: all entries before its token."""
        self.choose = choose
        self._arriving: list[tuple[int, int]] = []

    def move(self, moves: Moves) -> None:
        self._arrive()
        self._arriving = list(moves.prefetch)
        for kind in (moves.swap_out, moves.swap_in, moves.copy):
            written = Counter(destination for _, destination in kind)
            assert not kind or max(written.values()) == 1, "one destination written twice"
        for block, slot in moves.swap_out:
            self.slots[slot] = list(self.blocks[block])
        for slot, block in moves.swap_in:
            self.blocks[block] = list(self.slots[slot])
        for source, destination in moves.copy:
            self.blocks[destination] = list(self.blocks[source])
            self.num_copies += 1

    def forget(self) -> None:
        """Loses what is in blocks."""
        self._arriving = []
        for block in self.blocks:
            block[:] = [0] * BLOCK_TOKENS

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        if not plan.moves.prefetch:
            self._arrive()
        self._check_writes(plan)
        tokens = self.compute(plan)
        self._arrive()
        return tokens

    def compute(self, plan: StepPlan) -> list[SampledToken]:
        for chunk in plan.chunks:
            self._store(chunk)
            if positions := chunk.scored_range():
                self.scored.append(self._scored(chunk, positions))
        return [told(part, self._sample(part), 0.5) for part in plan.sampled_parts()]

    def _scored(self, chunk: Chunk, positions: range) -> PromptLogprobs:
        seen = [self._read(chunk, each) for each in range(positions.stop - 1)]
        ranks = [self.choose(seen[:position], 0) for position in positions]
        return scored(chunk, positions, ranks)

    def _arrive(self) -> None:
        """What is copied in beside a step is there when it ends, and not before."""
        for slot, block in self._arriving:
            self.blocks[block] = list(self.slots[slot])
        self._arriving = []

    def _check_writes(self, plan: StepPlan) -> None:
        """No chunk writes into a block that another chunk reads or writes."""
        users = Counter(
            block
            for chunk in plan.chunks
            for block in chunk.block_ids + sorted(set(chunk.window_block_ids))
        )
        for chunk in plan.chunks:
            assert len(chunk.block_ids) >= -(-chunk.end // BLOCK_TOKENS), "table too short"
            written = {at // BLOCK_TOKENS for at in range(chunk.first_stored, chunk.end)}
            tables = [table for table in (chunk.block_ids, chunk.window_block_ids) if table]
            for block in [table[index] for table in tables for index in written]:
                assert users[block] == 1, f"{chunk.request_id} writes into a shared block"

    def _at(self, chunk: Chunk, position: int) -> tuple[list[int], int]:
        block = chunk.block_ids[position // BLOCK_TOKENS]
        return self.blocks[block], position % BLOCK_TOKENS

    def _read(self, chunk: Chunk, position: int) -> int:
        block, offset = self._at(chunk, position)
        return block[offset]

    def _store(self, chunk: Chunk) -> None:
        before = self._read(chunk, chunk.start - 1) if chunk.start else 0
        for position, token in enumerate(chunk.token_ids, chunk.start):
            block, offset = self._at(chunk, position)
            before = block[offset] = entry(before, token, position)

    def _sample(self, chunk: Chunk) -> int:
        assert chunk.sampling is not None
        end = chunk.start + len(chunk.token_ids)
        return self.choose([self._read(chunk, each) for each in range(end)], chunk.sampling.seed)


def undisturbed(
    token_ids: list[int],
    seed: int,
    count: int,
    choose: Callable[[list[int], int], int] = choose,
) -> list[int]:
    """The next tokens of a context that nobody disturbs."""
    entries: list[int] = []
    chosen: list[int] = []
    for position in range(len(token_ids) + count):
        if position >= len(token_ids):
            chosen.append(choose(entries, seed))
        token = [*token_ids, *chosen][position]
        entries.append(entry(entries[-1] if entries else 0, token, position))
    return chosen


class WindowDevice(Device):
    """A device whose entries depend on a sliding window, which has blocks of its own."""

    def __init__(self, num_blocks: int, num_slots: int, window: int) -> None:
        super().__init__(num_blocks, num_slots)
        self._window = window

    def undisturbed(self, token_ids: list[int], seed: int, count: int) -> list[int]:
        """The next tokens of a context that nobody disturbs."""
        entries: list[int] = []
        windowed: list[int] = []
        chosen: list[int] = []
        for position in range(len(token_ids) + count):
            if position >= len(token_ids):
                chosen.append(choose(entries, seed))
            token = [*token_ids, *chosen][position]
            windowed.append(hash((token, position)))
            before = hash((entries[-1] if entries else 0, *windowed[-self._window :]))
            entries.append(entry(before, token, position))
        return chosen

    def _store(self, chunk: Chunk) -> None:
        assert len(chunk.window_block_ids) == len(chunk.block_ids), "tables of two lengths"
        before = self._read(chunk, chunk.start - 1) if chunk.start else 0
        for position, token in enumerate(chunk.token_ids, chunk.start):
            block, offset = self._window_at(chunk, position)
            block[offset] = hash((token, position))
            seen = [
                self._window_at(chunk, each)
                for each in range(max(0, position - self._window + 1), position + 1)
            ]
            before = hash((before, *(block[offset] for block, offset in seen)))
            block, offset = self._at(chunk, position)
            before = block[offset] = entry(before, token, position)

    def _window_at(self, chunk: Chunk, position: int) -> tuple[list[int], int]:
        block = chunk.window_block_ids[position // BLOCK_TOKENS]
        return self.blocks[block], position % BLOCK_TOKENS


KERNEL = 3
Columns = tuple[int, ...]
"""The last KERNEL - 1 columns of one convolution."""


def embed(token: int, position: int) -> int:
    return hash((token, position))


def column(layer: int, hidden: int) -> int:
    return hash((1, layer, hidden))


def convolve(hidden: int, window: list[int]) -> int:
    return hash((2, hidden, *window))


def key_value(layer: int, hidden: int) -> int:
    return hash((3, layer, hidden))


def attend(hidden: int, context: list[int]) -> int:
    return hash((4, hidden, *context))


class SingleRank:
    """A model of convolutions, each with attention behind it, one token after the other."""

    def __init__(self, num_layers: int) -> None:
        self.columns: list[Columns] = [(0,) * (KERNEL - 1)] * num_layers
        self.contexts: list[list[int]] = [[] for _ in range(num_layers)]
        self.hidden = 0
        self.num_tokens = 0

    def feed(self, token: int) -> None:
        hidden = embed(token, self.num_tokens)
        for layer, context in enumerate(self.contexts):
            window = [*self.columns[layer], column(layer, hidden)]
            self.columns[layer] = tuple(window[1:])
            hidden = convolve(hidden, window)
            context.append(key_value(layer, hidden))
            hidden = attend(hidden, context)
        self.hidden = hidden
        self.num_tokens = self.num_tokens + 1


def told(chunk: Chunk, token: int, step: float) -> SampledToken:
    """The next token and, as a search wants them, others from the likeliest on."""
    assert chunk.sampling is not None
    count = chunk.sampling.top_logprobs or 0
    first = VOCAB.index(token)
    likeliest = [VOCAB[(first + number) % len(VOCAB)] for number in range(count)]
    logprobs = [-step * (number + 1) for number in range(count)]
    return SampledToken(chunk.request_id, token, -step, likeliest, logprobs)


def scored(chunk: Chunk, positions: range, ranks: list[int]) -> PromptLogprobs:
    zeros = np.zeros(len(ranks), "<f4").tobytes()
    ids = np.array(ranks, "<i4").tobytes()
    return PromptLogprobs(chunk.request_id, positions.start, zeros, b"", ids)


class ConvDevice(Device):
    """Computes that model from the index arrays that a real one computes from."""

    def __init__(self, num_blocks: int, num_slots: int, num_layers: int, state_slots: int) -> None:
        super().__init__(num_blocks + 1, num_slots)
        self.states = [[(7,) * (KERNEL - 1)] * state_slots for _ in range(num_layers)]
        self._scratch = num_blocks
        self._known: dict[tuple[int, ...], SingleRank] = {}
        self._num_layers = num_layers
        self._nothing = (0,) * num_layers
        for block in (*self.blocks, *self.slots):
            block[:] = [self._nothing] * BLOCK_TOKENS

    def forget(self) -> None:
        self._arriving = []
        for block in self.blocks:
            block[:] = [self._nothing] * BLOCK_TOKENS

    def compute(self, plan: StepPlan) -> list[SampledToken]:
        for block in begun_blocks(plan, BLOCK_TOKENS):
            self.blocks[block] = [self._nothing] * BLOCK_TOKENS
        batch = build_batch(plan, BLOCK_TOKENS, conv_kernel=KERNEL, scratch_block=self._scratch)
        tokens = zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True)
        hidden = [embed(*row) for row in tokens]
        for layer in range(self._num_layers):
            assert batch.conv is not None
            hidden = self._convolve(layer, hidden, batch.conv)
            hidden = self._attend(layer, hidden, batch)
        for chunk in plan.chunks:
            if positions := chunk.scored_range():
                first = batch.first_rows[chunk.request_id] - chunk.start
                ranks = [choose([hidden[first + each - 1]], 0) for each in positions]
                self.scored.append(scored(chunk, positions, ranks))
        rows = zip(batch.sampled, batch.sampled_rows.tolist(), strict=True)
        return [self._told(chunk, hidden[row]) for chunk, row in rows]

    def undisturbed(self, token_ids: list[int], seed: int, count: int) -> list[int]:
        """The next tokens of a context that nobody disturbs."""
        tokens = list(token_ids)
        for _ in range(count):
            tokens.append(choose([self._after(tuple(tokens)).hidden], seed))
        return tokens[len(token_ids) :]

    def _told(self, chunk: Chunk, hidden: int) -> SampledToken:
        assert chunk.sampling is not None
        return told(chunk, choose([hidden], chunk.sampling.seed), (1 + hidden % 5) / 5)

    def _after(self, tokens: tuple[int, ...]) -> SingleRank:
        model = self._known.pop(tokens, None) or self._known.pop(tokens[:-1], None)
        model = model or SingleRank(self._num_layers)
        for token in tokens[model.num_tokens :]:
            model.feed(token)
        self._known[tokens] = model
        return model

    def _convolve(self, layer: int, hidden: list[int], plan: ConvPlan) -> list[int]:
        states = self.states[layer]
        slots = plan.slots.tolist()
        next_slots = plan.next_slots.tolist()
        assert not set(slots) & set(next_slots), "a state that is read is overwritten"
        assert len(set(next_slots)) == len(next_slots), "two states in one slot"
        source = [column(layer, each) for each in hidden]
        for slot in slots:
            source += [0] * (KERNEL - 1) if slot == NO_SLOT else states[slot]
        for tail, slot in zip(plan.tails.tolist(), next_slots, strict=True):
            states[slot] = tuple(source[row] for row in tail)
        windows = plan.taps.T.tolist()
        return [
            convolve(each, [source[row] for row in window])
            for each, window in zip(hidden, windows, strict=True)
        ]

    def _attend(self, layer: int, hidden: list[int], batch: StepBatch) -> list[int]:
        rows = batch.rows
        for each, slot in zip(hidden, rows.slots.tolist(), strict=True):
            block = self.blocks[slot // BLOCK_TOKENS]
            offset = slot % BLOCK_TOKENS
            stored = block[offset]
            block[offset] = (*stored[:layer], key_value(layer, each), *stored[layer + 1 :])
        out = [0] * len(hidden)
        decodes = zip(rows.decode_tables.tolist(), rows.lengths.tolist(), strict=True)
        for row, (table, length) in enumerate(decodes):
            out[row] = attend(hidden[row], self._gather(layer, table)[:length])
        for tile in prefill_tiles(rows, BLOCK_TOKENS):
            context = self._gather(layer, tile.block_ids.tolist())
            for number, row in enumerate(range(tile.start, tile.end)):
                out[row] = attend(hidden[row], context[: tile.earlier + number + 1])
        return out

    def _gather(self, layer: int, table: list[int]) -> list[int]:
        return [stored[layer] for block in table for stored in self.blocks[block]]


class Rig:
    """Scheduler and device together. The clock is a number.

    `session_blocks`: bound of one session, in blocks, or 0 for none.
    `window`: some layers see so many tokens, and have blocks of their own.
    `conv_layers`: the model has so many convolutions, each with attention behind it.
    `in_flight`: plans that are computed before the first of them is committed.
    `speculative`: most tokens of a sequence that a step tries. Its text repeats itself then.
    `tier_slots`: slots of a host tier, whose answers come when `exchange` is called, as every step
    does. `lower_tiers` are below it.
    """

    block_bytes = BLOCK_BYTES
    invented = 5
    """The token of steps that are not computed."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        policy: KvPolicy = KvPolicy(session_blocks=1000),  # noqa: B008
        max_model_len: int = 4096,
        max_sequences: int = 8,
        prompt_tokens: int = 64,
        decode_tokens: int = 100_000,
        expected: int = 32,
        prefill_rate: float = 0.0,
        session_blocks: int = 0,
        window: int = 0,
        conv_layers: int = 0,
        replay_tokens: int | None = None,
        in_flight: int = 1,
        speculative: int = 0,
        tier_slots: int = 0,
        lower_tiers: Sequence[LowerTier] = (),
    ) -> None:
        if tier_slots:
            policy = replace(policy, kv_space=bytes(32))
        num_slots = policy.host_slots + tier_slots
        profile = MemoryProfile(
            block_tokens=BLOCK_TOKENS,
            groups=tuple(
                CacheGroup(BLOCK_BYTES // BLOCK_TOKENS, each)
                for each in ((0, window) if window else (0,))
            ),
            state_bytes_per_sequence=100 * conv_layers,
            activation_bytes_per_token=1,
            sampler_bytes_per_sequence=1,
            prefill_chunk_tokens=prompt_tokens,
            kv_pool_bytes=blocks * BLOCK_BYTES,
            session_kv_bytes=session_blocks * BLOCK_BYTES,
        )
        replay = conv_layers * (KERNEL - 1) if replay_tokens is None else replay_tokens
        limits = SchedulerLimits(
            max_model_len,
            max_sequences,
            prompt_tokens,
            True,
            decode_tokens,
            replay,
            max_in_flight=in_flight,
            num_speculative_tokens=speculative,
        )
        self.computed: deque[list[SampledToken]] = deque()
        """Tokens of the plans in flight, the oldest first."""
        self._scored: deque[list[PromptLogprobs]] = deque()
        self.scores: dict[str, list[int]] = {}
        """Ranks of the tokens of prompts, from the second token on, by request."""
        self._in_flight = in_flight
        self.max_step_tokens = prompt_tokens + max_sequences
        throughput = ThroughputEstimator()
        throughput.prefill_tokens_per_second = prefill_rate
        self.estimate = OutputLengthEstimator(max_model_len, start=expected)
        self.now = 0.0
        self.num_blocks = blocks
        self.undisturbed: Callable[[list[int], int, int], list[int]] = undisturbed
        self.device = Device(blocks, num_slots)
        if speculative:
            self.device.choose = choose_repetitively
            self.undisturbed = partial(undisturbed, choose=choose_repetitively)
        if window:
            self.device = windowed = WindowDevice(blocks, num_slots, window)
            self.undisturbed = windowed.undisturbed
        if conv_layers:
            slots = state_slots(max_sequences)
            self.device = device = ConvDevice(blocks, num_slots, conv_layers, slots)
            self.undisturbed = device.undisturbed
        self.new_scheduler = lambda: Scheduler(
            profile, limits, throughput, self.estimate, policy, lambda: self.now
        )
        self.scheduler = self.new_scheduler()
        self.answers: deque[KvGranted | KvFound] = deque()
        """What the scheduler has not been told of its tiers, the oldest first."""
        self.tier_hits: list[tuple[str, TierHits]] = []
        self.broker: KvBroker | None = None
        if tier_slots:
            arena = Arena.create(tier_slots * 4096, available_bytes=1 << 30)
            self.store = Store(arena, 4096, lower_tiers)
            self.broker = KvBroker(
                self.store,
                BlockFormat(policy.kv_space, BLOCK_TOKENS, window),
                self.answers.append,
                lambda name, hits: self.tier_hits.extend((name, each) for each in hits),
                lambda call: call(),
                lambda: ComputeSpeed(
                    throughput.prefill_tokens_per_second,
                    self.scheduler.stats().prefill_backlog_tokens,
                ),
                clock=lambda: self.now,
            )
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.heard: list[TokenOutput] = []
        """New outputs, in order. A reader removes them."""

    def request(
        self,
        name: str,
        token_ids: list[int],
        max_tokens: int = 8,
        *,
        num_prompt_tokens: int | None = None,
        seed: int = 0,
        session: str = "",
        salt: str = "",
        priority: int = 0,
        stop: list[int] | None = None,
        prompt_logprobs: int | None = None,
    ) -> EngineRequest:
        return EngineRequest(
            request_id=name,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens or len(token_ids),
            max_tokens=max_tokens,
            sampling=SamplingParams(seed=seed),
            stop_token_ids=stop or [],
            session_id=session,
            cache_salt=salt,
            priority=priority,
            prompt_logprobs=prompt_logprobs,
        )

    def exchange(self, num_answers: int = 1 << 30) -> None:
        """Lets broker and scheduler hear from one another."""
        tiers = self.scheduler.tiers
        if tiers is None or self.broker is None:
            return
        for message in tiers.take_messages():
            self.broker.on_message(message)
        for _ in range(min(num_answers, len(self.answers))):
            match self.answers.popleft():
                case KvGranted(slots=slots):
                    tiers.on_granted(slots)
                case found:
                    tiers.on_found(found)

    def lose_worker(self) -> None:
        """Replace scheduler and device, like a new worker. Slots of the host tier stay."""
        assert self.broker is not None
        self.broker.worker_lost()
        self.answers.clear()
        self.computed.clear()
        self._scored.clear()
        self.device.forget()
        self.scheduler = self.new_scheduler()

    def submit(self, *requests: EngineRequest, resumed: bool = False) -> Rejected | None:
        if self.broker is not None:
            requests = tuple(
                msgspec.structs.replace(each, num_stored_blocks=self.broker.arrived(each))
                for each in requests
            )
        answer = self.scheduler.submit_group(list(requests), resumed=resumed)
        self.scheduler.check_integrity()
        if isinstance(answer, Rejected):
            return answer
        self._keep(answer)
        return None

    def step(self) -> list[TokenOutput]:
        """Begin as many plans as may be in flight, and commit the oldest."""
        self.exchange()
        while len(self.computed) < self._in_flight and self.begin(self.scheduler.schedule()):
            pass
        return self.end()

    def begin(self, plan: StepPlan) -> bool:
        """Compute a plan. Return whether the plan is now in flight, until `end`."""
        assert plan.num_tokens <= self.max_step_tokens, "more rows than the arena has"
        self.device.move(plan.moves)
        tokens = self.device.execute(plan)
        if plan.chunks:
            self._scored.append(self.device.scored)
            self.device.scored = []
            self.computed.append(tokens)
        elif self.scheduler.tiers and not self.computed:
            self.scheduler.tiers.finish(self.scheduler.tiers.take_kept())
        return bool(plan.chunks)

    def finish(self, plan: StepPlan) -> list[TokenOutput]:
        """Computes a plan, the only one in flight, and commits it."""
        assert not self.computed, "not the only plan"
        self.begin(plan)
        return self.end()

    def end(self) -> list[TokenOutput]:
        """Commits the oldest plan in flight."""
        if self._scored:
            scored = self._scored.popleft()
            for each in self.scheduler.score(scored) if self.scheduler.is_scoring else []:
                self.scores.setdefault(each.request_id, []).extend(
                    np.frombuffer(each.ranks, "<i4").tolist()
                )
        outputs = self.scheduler.commit(self.computed.popleft() if self.computed else [])
        self.scheduler.check_integrity()
        self._keep(outputs)
        return outputs

    def invent(self, plan: StepPlan) -> list[SampledToken]:
        """Tokens for a plan that is not computed."""
        sampled = [chunk for chunk in plan.chunks if chunk.sampling is not None]
        return [SampledToken(chunk.request_id, self.invented, -0.5, [], []) for chunk in sampled]

    def run(self, max_steps: int = 20_000) -> dict[str, list[int]]:
        """Step until nothing is left. Return the tokens of every request so far."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return {name: self.tokens(name) for name in self.outputs}
            self.step()
        raise AssertionError("it never ends")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, []) for token in output.token_ids]

    @property
    def held_blocks(self) -> int:
        """Blocks that sequences hold."""
        kept = self.scheduler.stats().kv_free_bytes + self.scheduler.stats().kv_reclaimable_bytes
        return self.num_blocks - kept // BLOCK_BYTES

    def _keep(self, outputs: list[TokenOutput]) -> None:
        self.heard += outputs
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
