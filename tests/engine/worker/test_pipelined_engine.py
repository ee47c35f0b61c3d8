"""The step loop with several plans in flight: their order, and what a fault of one costs."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.errors import GroupLostError
from ullage_engine.protocol.messages import FromKv, KvOffer, KvSlot, KvWritten
from ullage_engine.protocol.requests import EngineRequest, PromptLogprobs, SamplingParams
from ullage_engine.protocol.step_plan import NO_TOKEN, Moves, SampledToken, StepPlan
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import KvPolicy, Scheduler, SchedulerLimits
from ullage_engine.worker import engine as engine_module
from ullage_engine.worker.engine import PipelinedEngine
from ullage_engine.worker.grammar import Grammars, no_vocabulary

STAGES = 2


class FakeStages:
    """Two stages that invent tokens: a token is the position that it is chosen at."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[str]]] = []
        """Plans submitted and collected, by the requests that they compute, and copies of KV."""
        self.damaged = ""
        """The request whose logits are NaN."""
        self.on_collect: Callable[[], None] = lambda: None
        self._submitted: deque[StepPlan] = deque()

    def move(self, moves: Moves) -> None:
        self.events.append(("move", []))

    def sync(self) -> None:
        assert not self._submitted, "the ranks still compute"
        self.events.append(("sync", []))

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        return []

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        self.submit(plan)
        return self.collect()

    def submit(self, plan: StepPlan) -> None:
        assert plan.chunks, "a plan of nothing"
        assert len(self._submitted) < STAGES, "more plans than stages"
        in_flight = {chunk.request_id for each in self._submitted for chunk in each.chunks}
        assert not in_flight & set(names(plan)), "computed by two plans at the same time"
        self.events.append(("submit", names(plan)))
        self._submitted.append(plan)

    def collect(self) -> list[SampledToken]:
        plan = self._submitted.popleft()
        self.events.append(("collect", names(plan)))
        self.on_collect()
        return [
            SampledToken(
                chunk.request_id, self._token_after(chunk.request_id, chunk.end), 0, [], []
            )
            for chunk in plan.chunks
            if chunk.sampling is not None
        ]

    def _token_after(self, request_id: str, position: int) -> int:
        return NO_TOKEN if request_id == self.damaged else position


def names(plan: StepPlan) -> list[str]:
    return [chunk.request_id for chunk in plan.chunks]


def make_engine(
    grammars: Grammars | None = None, kv_space: bytes = b""
) -> tuple[PipelinedEngine, FakeStages]:
    profile = MemoryProfile(
        block_tokens=16,
        groups=(CacheGroup(bytes_per_token=10),),
        state_bytes_per_sequence=0,
        activation_bytes_per_token=1,
        sampler_bytes_per_sequence=1,
        prefill_chunk_tokens=64,
        kv_pool_bytes=64 * 160,
    )
    throughput = ThroughputEstimator()
    stages = FakeStages()
    limits = SchedulerLimits(512, 8, 64, True, 8192, max_in_flight=STAGES)
    lengths = OutputLengthEstimator(512, start=32)
    policy = KvPolicy(kv_space=kv_space, prefetch=False)
    scheduler = Scheduler(profile, limits, throughput, lengths, policy)
    engine = PipelinedEngine(scheduler, stages, throughput, grammars, max_in_flight=STAGES)
    return engine, stages


def submit(
    engine: PipelinedEngine, *requests: str, max_tokens: int = 4, num_prompt_tokens: int = 8
) -> None:
    for name in requests:
        request = EngineRequest(
            request_id=name,
            token_ids=[ord(name)] * num_prompt_tokens,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            sampling=SamplingParams(),
        )
        assert engine.submit(request) is None


def step(engine: PipelinedEngine, tokens: dict[str, list[int]]) -> None:
    for output in engine.step():
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.scheduler.check_integrity()


def run(engine: PipelinedEngine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(500):
        if not engine.has_work:
            return tokens
        step(engine, tokens)
    raise AssertionError("it never ends")


def test_a_plan_is_submitted_before_the_tokens_of_the_one_before_are_taken() -> None:
    engine, stages = make_engine()
    submit(engine, *"abcd")
    assert run(engine) == {name: [8, 9, 10, 11] for name in "abcd"}
    first = ["a", "b"]
    second = ["c", "d"]
    assert stages.events == [
        ("submit", ["a", "b", "c", "d"]),
        ("collect", ["a", "b", "c", "d"]),
        *[("submit", first), ("submit", second), ("collect", first)],
        *[("submit", first), ("collect", second), ("submit", second), ("collect", first)] * 2,
        ("collect", second),
    ]
    assert engine.num_overlapped_steps == 5


def test_a_sequence_that_is_alone_is_computed_step_by_step() -> None:
    engine, stages = make_engine()
    submit(engine, "a")
    assert run(engine) == {"a": [8, 9, 10, 11]}
    assert stages.events == [("submit", ["a"]), ("collect", ["a"])] * 4
    assert engine.num_overlapped_steps == 0


def test_what_is_cancelled_in_flight_is_collected_and_dropped() -> None:
    engine, stages = make_engine()
    submit(engine, *"abcd")
    tokens: dict[str, list[int]] = {}
    for _ in range(3):
        step(engine, tokens)
    assert stages.events[-1][0] == "collect"
    (in_flight,) = [each.plan for each in engine._in_flight]
    for name in "abcd":
        engine.cancel(name)
    assert engine.has_work
    assert not engine.scheduler.has_work
    stages.damaged = names(in_flight)[0]
    assert run(engine) == {}
    assert stages.events[-1] == ("collect", names(in_flight))
    # Nobody is told of a fault in what nobody waits for, but it counts.
    assert engine.take_failed() == []
    assert engine.num_nonfinite_logits == 1
    stages.damaged = ""
    submit(engine, "a")
    assert run(engine) == {"a": [8, 9, 10, 11]}


def test_what_is_damaged_and_cancelled_in_flight_leaves_no_kv_to_others() -> None:
    """Nor does it take a request of its id with it that came meanwhile."""
    engine, stages = make_engine()
    submit(engine, "a", num_prompt_tokens=40)
    step(engine, {})
    assert engine._submit_next()
    engine.cancel("a")
    submit(engine, "a")
    stages.damaged = "a"
    assert engine._collect_oldest() == []
    stages.damaged = ""
    assert run(engine) == {"a": [8, 9, 10, 11]}
    submit(engine, "a", num_prompt_tokens=40)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.scheduler.check_integrity()
    assert [each.num_cached_tokens for each in outputs] == [0] * 4
    assert engine.num_nonfinite_logits == 1
    assert engine.take_failed() == []


def test_a_damaged_request_fails_alone_and_the_other_plan_goes_on() -> None:
    engine, stages = make_engine()
    submit(engine, *"abcd")
    tokens: dict[str, list[int]] = {}
    for _ in range(2):
        step(engine, tokens)
    stages.damaged = "c"
    for name, output in run(engine).items():
        tokens[name] += output
    assert tokens == {name: [8, 9, 10, 11] for name in "abd"} | {"c": [8]}
    assert [each.request_id for each in engine.take_failed()] == ["c"]


class FailingGrammars(Grammars):
    """Grammars that fail from some moment on."""

    def __init__(self) -> None:
        super().__init__(no_vocabulary)
        self.failing = ""
        """Names of the requests whose grammars fail."""

    def constrain(self, plan: StepPlan) -> tuple[StepPlan, dict[str, str]]:
        kept = [chunk for chunk in plan.chunks if chunk.request_id not in self.failing]
        failed = {name: "too complex" for name in names(plan) if name in self.failing}
        return StepPlan(kept, plan.moves), failed


def test_a_plan_that_grammars_empty_holds_nobody_up() -> None:
    grammars = FailingGrammars()
    engine, _ = make_engine(grammars)
    submit(engine, *"abcd")
    tokens: dict[str, list[int]] = {}
    for _ in range(2):
        step(engine, tokens)

    grammars.failing = "cd"
    for name, output in run(engine).items():
        tokens[name] += output
    assert {name: tokens[name] for name in "ab"} == {name: [8, 9, 10, 11] for name in "ab"}
    assert sorted(each.request_id for each in engine.take_failed()) == ["c", "d"]


def test_copies_of_a_plan_that_grammars_empty_are_reported_after_a_later_plan() -> None:
    """Only the tokens of a later plan show that all ranks have made the copies."""
    grammars = FailingGrammars()
    engine, stages = make_engine(grammars, kv_space=bytes(32))
    assert engine.tiers is not None
    submit(engine, "z", max_tokens=12)
    run(engine)
    [offer] = engine.tiers.take_messages()
    assert isinstance(offer, KvOffer)

    submit(engine, *"ab", max_tokens=7)
    tokens: dict[str, list[int]] = {}
    for _ in range(2):
        step(engine, tokens)
    [in_flight] = [each.plan for each in engine._in_flight]
    [other] = {"a", "b"} - {*names(in_flight)}
    grammars.failing = other
    slots = [KvSlot(each.key, place, 1) for place, each in enumerate(offer.blocks)]
    engine.tiers.on_granted(slots)

    stages.events.clear()
    reported: list[FromKv] = []
    while not reported:
        step(engine, tokens)
        reported = engine.tiers.take_messages()
    assert reported == [KvWritten(stored=slots)]
    behind = stages.events[stages.events.index(("move", [])) :]
    computed = behind[behind.index(("submit", names(in_flight))) :]
    assert ("collect", names(in_flight)) in computed


def test_an_injected_fault_changes_no_output() -> None:
    engine, _ = make_engine()
    for after_steps in (0, 2, 3):
        engine.inject_out_of_memory(after_steps)
    submit(engine, *"abcd", max_tokens=9)
    assert run(engine) == {name: list(range(8, 17)) for name in "abcd"}
    assert engine.num_oom_events == 3
    assert engine.take_failed() == []
    # Once the faults are over the stages are kept busy again.
    assert engine.num_overlapped_steps > 0


def test_a_step_lost_with_its_group_is_the_workers_error_and_no_requests() -> None:
    engine, stages = make_engine()
    submit(engine, *"abcd")
    tokens: dict[str, list[int]] = {}
    step(engine, tokens)

    def lose() -> None:
        raise GroupLostError("rank 1 ended with status -9")

    stages.on_collect = lose
    with pytest.raises(GroupLostError, match="rank 1"):
        engine.step()
    assert engine.take_failed() == []


def test_a_sequences_speed_is_that_of_its_plan_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stages = make_engine()
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(engine_module, "time", clock)

    def second() -> None:
        clock.now += 1.0

    stages.on_collect = second
    submit(engine, *"abcd", max_tokens=400)
    tokens: dict[str, list[int]] = {}
    for _ in range(100):
        step(engine, tokens)
    # A result each second, so that each of four sequences has a token in two.
    assert engine._throughput.decode_tokens_per_second == pytest.approx(0.5)
    assert engine._throughput.step_seconds[2] == pytest.approx(2.0, rel=0.1)
