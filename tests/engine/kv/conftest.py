"""A scheduler over a device of blocks whose tokens tell what was really in them."""

from collections import Counter
from collections.abc import Callable

import pytest

from ullage_engine.core.pace import Pace
from ullage_engine.core.plan import Chunk, Moves, SampledToken, StepPlan
from ullage_engine.core.request import EngineRequest, SamplingParams
from ullage_engine.core.scheduler import KvPolicy, Scheduler, SchedulerLimits
from ullage_engine.memory.expected import ExpectedOutput
from ullage_engine.messages import CacheGroupSpec, Profile, Rejected, TokenOutput

BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * 1000
VOCAB = range(10, 100)


def entry(before: int, token: int, position: int) -> int:
    """What a device stores for a token: it depends on all tokens before."""
    return hash((before, token, position))


def choose(entries: list[int], seed: int) -> int:
    """The next token after a context: it depends on every stored entry."""
    return VOCAB[hash((seed, *entries)) % len(VOCAB)]


class Device:
    """Runs plans on blocks of entries; refuses what a real device could not do right."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.blocks = [[0] * BLOCK_TOKENS for _ in range(num_blocks)]
        self.slots = [[0] * BLOCK_TOKENS for _ in range(num_slots)]
        self.num_copies = 0

    def move(self, moves: Moves) -> None:
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

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        self._check_writes(plan)
        for chunk in plan.chunks:
            self._store(chunk)
        return [
            SampledToken(chunk.request_id, self._sample(chunk), -0.5, [], [])
            for chunk in plan.chunks
            if chunk.sampling is not None
        ]

    def _check_writes(self, plan: StepPlan) -> None:
        """No chunk writes into a block that another chunk reads or writes."""
        users = Counter(block for chunk in plan.chunks for block in chunk.block_ids)
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.token_ids)
            assert len(chunk.block_ids) == -(-end // BLOCK_TOKENS), "table of the wrong length"
            for block in chunk.block_ids[chunk.start // BLOCK_TOKENS :]:
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
        return choose([self._read(chunk, each) for each in range(end)], chunk.sampling.seed)


def undisturbed(token_ids: list[int], seed: int, count: int) -> list[int]:
    """The next tokens of a context that nobody disturbs."""
    entries: list[int] = []
    chosen: list[int] = []
    for position in range(len(token_ids) + count):
        if position >= len(token_ids):
            chosen.append(choose(entries, seed))
        token = [*token_ids, *chosen][position]
        entries.append(entry(entries[-1] if entries else 0, token, position))
    return chosen


class Rig:
    """Scheduler and device together; the clock is a number."""

    undisturbed = staticmethod(undisturbed)
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
    ) -> None:
        profile = Profile(
            block_tokens=BLOCK_TOKENS,
            groups=[CacheGroupSpec(bytes_per_token=BLOCK_BYTES // BLOCK_TOKENS)],
            state_bytes_per_sequence=0,
            activation_bytes_per_token=1,
            sampler_bytes_per_sequence=1,
            prefill_chunk_tokens=prompt_tokens,
            kv_pool_bytes=blocks * BLOCK_BYTES,
        )
        limits = SchedulerLimits(max_model_len, max_sequences, prompt_tokens, True, decode_tokens)
        pace = Pace()
        pace.prefill_tokens_per_second = prefill_rate
        self.estimate = ExpectedOutput(max_model_len, start=expected)
        self.now = 0.0
        self.num_blocks = blocks
        self.device = Device(blocks, policy.host_slots)
        self.scheduler = Scheduler(profile, limits, pace, self.estimate, policy, lambda: self.now)
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.heard: list[TokenOutput] = []
        """New outputs, in their order; a reader takes them away."""

    def request(
        self,
        name: str,
        token_ids: list[int],
        max_tokens: int = 8,
        *,
        num_prompt_tokens: int | None = None,
        seed: int = 0,
        session: str = "",
        priority: int = 0,
        stop: list[int] | None = None,
    ) -> EngineRequest:
        return EngineRequest(
            request_id=name,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens or len(token_ids),
            max_tokens=max_tokens,
            sampling=SamplingParams(seed=seed),
            stop_token_ids=stop or [],
            session_id=session,
            priority=priority,
        )

    def submit(self, *requests: EngineRequest, resumed: bool = False) -> Rejected | None:
        answer = self.scheduler.submit_group(list(requests), resumed=resumed)
        self.scheduler.check_integrity()
        if isinstance(answer, Rejected):
            return answer
        self._keep(answer)
        return None

    def step(self) -> list[TokenOutput]:
        return self.finish(self.scheduler.schedule())

    def finish(self, plan: StepPlan) -> list[TokenOutput]:
        """Computes a plan and commits it."""
        self.device.move(plan.moves)
        outputs = self.scheduler.commit(self.device.execute(plan))
        self.scheduler.check_integrity()
        self._keep(outputs)
        return outputs

    def invent(self, plan: StepPlan) -> list[SampledToken]:
        """Tokens for a plan that is not computed."""
        sampled = [chunk for chunk in plan.chunks if chunk.sampling is not None]
        return [SampledToken(chunk.request_id, self.invented, -0.5, [], []) for chunk in sampled]

    def run(self, max_steps: int = 20_000) -> dict[str, list[int]]:
        """Steps until nothing is left; the tokens of every request so far."""
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
        kept = self.scheduler.free_bytes + self.scheduler.reclaimable_bytes
        return self.num_blocks - kept // BLOCK_BYTES

    def _keep(self, outputs: list[TokenOutput]) -> None:
        self.heard += outputs
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    return Rig
