"""The step loop: what a step that runs out of memory costs, and whom."""

import time
from collections.abc import Callable

import msgspec
import pytest
import torch

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.errors import MemoryShortError
from ullage_engine.protocol.requests import (
    EngineRequest,
    PromptLogprobs,
    SamplingParams,
    TokenOutput,
)
from ullage_engine.protocol.step_plan import (
    NO_TOKEN,
    NOTHING_ALLOWED,
    Chunk,
    Moves,
    SampledToken,
    StepPlan,
)
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import KvPolicy, Scheduler, SchedulerLimits
from ullage_engine.worker.engine import EngineCore


class FakeRunner:
    """Invents tokens; fails where `fails` says so."""

    def __init__(self, fails: Callable[[StepPlan], bool]) -> None:
        self.plans: list[list[tuple[str, int]]] = []
        self.moves: list[Moves] = []
        self._fails = fails
        self.damaged = ""
        """The request whose logits are NaN."""

    def move(self, moves: Moves) -> None:
        self.moves.append(moves)

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        return []

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        self.plans.append([(chunk.request_id, len(chunk.token_ids)) for chunk in plan.chunks])
        if self._fails(plan):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB\nmore")
        # The token is the position, so that a lost or doubled one is seen.
        return [
            SampledToken(part.request_id, self.token_after(part), 0.0, [], [])
            for part in plan.sampled_parts()
        ]

    def token_after(self, chunk: Chunk) -> int:
        return NO_TOKEN if chunk.request_id == self.damaged else chunk.end


class Neighbour:
    """Another process that takes memory of the device for some time, by a clock that each look
    moves on by a tenth of a second."""

    def __init__(self, begins_at: float, ends_at: float) -> None:
        self.begins_at = begins_at
        self.ends_at = ends_at
        self.now = 0.0
        self.num_restores = 0

    @property
    def holds_memory(self) -> bool:
        return self.begins_at <= self.now < self.ends_at

    def clock(self) -> float:
        self.now += 0.1
        return self.now

    def restore(self) -> bool:
        self.num_restores += 1
        return not self.holds_memory


def make_engine(
    fails: Callable[[StepPlan], bool],
    host_slots: int = 0,
    speculative: int = 0,
    neighbour: Neighbour | None = None,
) -> tuple[EngineCore, FakeRunner]:
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
    runner = FakeRunner(fails)
    limits = SchedulerLimits(512, 8, 64, True, 8192, num_speculative_tokens=speculative)
    policy = KvPolicy(host_slots=host_slots)
    scheduler = Scheduler(profile, limits, throughput, OutputLengthEstimator(512, start=32), policy)
    if neighbour is None:
        return EngineCore(scheduler, runner, throughput), runner
    shared = {"restore_workspace": neighbour.restore, "clock": neighbour.clock}
    return EngineCore(scheduler, runner, throughput, None, **shared), runner


def make_request(name: str, prompt: int, max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=[1] * prompt,
        num_prompt_tokens=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(),
    )


def submit(engine: EngineCore, name: str, prompt: int, max_tokens: int = 4) -> None:
    assert engine.submit(make_request(name, prompt, max_tokens)) is None


def run(engine: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(500):
        if not engine.has_work:
            return tokens
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.scheduler.check_integrity()
    raise AssertionError("it never ends")


def test_steps_are_tallied_as_they_were_computed() -> None:
    engine, runner = make_engine(lambda plan: False)
    requests = [make_request(name, 100, max_tokens=2) for name in ("a", "b")]
    accepted = msgspec.structs.replace(requests[0], accepted_at=time.monotonic())
    assert engine.submit(accepted) is None
    engine.step()
    assert engine.submit(requests[1]) is None
    run(engine)
    figures = engine.scheduler.stats().figures
    assert sum(figures.step_seconds.counts) == len(runner.plans)
    assert figures.step_tokens.total == sum(size for plan in runner.plans for _, size in plan)
    assert figures.step_sequences.total == sum(map(len, runner.plans))
    assert (figures.num_grown, figures.num_shrunk) == (2, 1)
    assert sum(figures.queue_seconds.counts) == 1
    assert figures.queue_seconds.total < 60


def test_a_large_prompt_chunk_is_halved_for_that_step() -> None:
    engine, runner = make_engine(lambda plan: plan.num_tokens > 40)
    submit(engine, "a", 100)
    assert run(engine) == {"a": [100, 101, 102, 103]}
    assert runner.plans[:4] == [[("a", 64)], [("a", 32)], [("a", 64)], [("a", 32)]]
    assert engine.num_oom_events == 2
    assert engine.take_failed() == []


def test_the_newest_is_preempted_when_decodes_do_not_fit_and_nobody_fails() -> None:
    engine, runner = make_engine(lambda plan: len(plan.chunks) > 2)
    for name in "abc":
        submit(engine, name, 4)
    assert run(engine) == {name: [4, 5, 6, 7] for name in "abc"}
    assert runner.plans[0] == [("a", 4), ("b", 4), ("c", 4)]
    assert engine.scheduler.stats().num_preemptions > 0
    assert engine.take_failed() == []


def test_only_the_request_that_cannot_run_even_alone_fails() -> None:
    engine, _ = make_engine(lambda plan: any(chunk.request_id == "bad" for chunk in plan.chunks))
    submit(engine, "good", 8)
    submit(engine, "bad", 8)
    assert run(engine) == {"good": [8, 9, 10, 11]}
    (failed,) = engine.take_failed()
    assert failed.request_id == "bad"
    assert failed.message.endswith("CUDA out of memory. Tried to allocate 20 MiB")
    assert engine.take_failed() == []


@pytest.mark.parametrize("speculative", [0, 3])
def test_requests_wait_while_others_hold_memory_and_lose_nothing(speculative: int) -> None:
    neighbour = Neighbour(0.5, 3.0)

    def fails(plan: StepPlan) -> bool:
        neighbour.now += 0.1
        return neighbour.holds_memory

    engine, _ = make_engine(fails, neighbour=neighbour, speculative=speculative)
    names = {"a": 100, "b": 8, "c": 30}
    for name, prompt in names.items():
        submit(engine, name, prompt, max_tokens=9)
    expected = {name: list(range(prompt, prompt + 9)) for name, prompt in names.items()}
    assert run(engine) == expected
    assert neighbour.num_restores > 2
    assert engine.take_failed() == []
    # They kept what they had: nothing was computed twice.
    assert engine.scheduler.stats().num_preemptions == 0


def test_a_shortage_that_does_not_end_is_another_workers_and_no_requests() -> None:
    neighbour = Neighbour(1.0, float("inf"))

    def fails(plan: StepPlan) -> bool:
        neighbour.now += 0.1
        return neighbour.holds_memory

    engine, _ = make_engine(fails, neighbour=neighbour)
    for name in "abc":
        submit(engine, name, 8, max_tokens=40)
    with pytest.raises(
        MemoryShortError, match=r"^others have held memory .* for 5 s \(CUDA out of"
    ):
        run(engine)
    assert 6.0 <= neighbour.now < 7.0
    assert engine.take_failed() == []
    # It is tried now and then, not as fast as it fails.
    assert engine.num_oom_events == neighbour.num_restores <= 2 * 5 / 0.25


def test_a_request_may_be_cancelled_while_others_hold_memory() -> None:
    neighbour = Neighbour(0.0, 2.0)
    engine, _ = make_engine(lambda plan: neighbour.holds_memory, neighbour=neighbour)
    submit(engine, "a", 8)
    submit(engine, "b", 8)
    engine.step()
    engine.cancel("a")
    assert run(engine) == {"b": [8, 9, 10, 11]}


def test_a_step_that_is_too_large_for_the_whole_workspace_is_not_waited_for() -> None:
    neighbour = Neighbour(0.0, 0.0)
    engine, _ = make_engine(lambda plan: len(plan.chunks) > 2, neighbour=neighbour)
    for name in "abc":
        submit(engine, name, 4)
    assert run(engine) == {name: [4, 5, 6, 7] for name in "abc"}
    assert engine.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.AcceleratorError("CUDA error: out of memory"),
    ],
)
def test_a_library_that_runs_out_of_memory_costs_a_step_and_not_the_worker(
    error: Exception,
) -> None:
    engine, runner = make_engine(lambda plan: False)
    errors = [error]

    def fails(plan: StepPlan) -> bool:
        if errors:
            raise errors.pop()
        return False

    runner._fails = fails
    submit(engine, "a", 8)
    assert run(engine) == {"a": [8, 9, 10, 11]}
    assert engine.num_oom_events == 1


def test_an_injected_fault_changes_no_output() -> None:
    engine, _ = make_engine(lambda plan: False)
    for after_steps in (0, 2, 2):
        engine.inject_out_of_memory(after_steps)
    submit(engine, "a", 80, max_tokens=6)
    submit(engine, "b", 8, max_tokens=6)
    assert run(engine) == {"a": list(range(80, 86)), "b": list(range(8, 14))}
    assert engine.num_oom_events == 3


def test_the_moves_of_a_step_are_done_once_however_often_it_is_computed() -> None:
    failures = iter([False, True, True, True])
    engine, runner = make_engine(lambda plan: next(failures, False))
    requests = [make_request(name, 40) for name in "abc"]
    assert engine.submit_group(requests) == []
    assert run(engine) == {name: [40, 41, 42, 43] for name in "abc"}
    copies = [copy for moves in runner.moves for copy in moves.copy]
    # Of three that share a block and write to it two copy, and nobody copies again after failures.
    assert engine.num_oom_events == 3
    assert len(copies) == len({destination for _, destination in copies}) == 2
    assert all(runner.moves), "asked to move nothing"


def test_a_sequence_preempted_for_memory_moves_to_the_host_before_the_retry() -> None:
    def fails(plan: StepPlan) -> bool:
        return len(plan.chunks) > 1 and plan.chunks[0].start > 21

    engine, runner = make_engine(fails, host_slots=64)
    submit(engine, "a", 20)
    submit(engine, "b", 8)
    assert run(engine) == {"a": [20, 21, 22, 23], "b": [8, 9, 10, 11]}
    assert engine.scheduler.stats().num_swaps == engine.scheduler.stats().num_preemptions == 1
    (out,) = [move for moves in runner.moves for move in moves.swap_out]
    (back,) = [move for moves in runner.moves for move in moves.swap_in]
    assert back[0] == out[1]
    assert engine.take_failed() == []


def test_the_cpu_allocators_error_counts_as_out_of_memory() -> None:
    engine, runner = make_engine(lambda plan: False)
    tripped: list[bool] = []

    def fails(plan: StepPlan) -> bool:
        if not tripped:
            tripped.append(True)
            torch.empty(1 << 60, dtype=torch.uint8)
        return False

    runner._fails = fails
    submit(engine, "a", 8)
    assert run(engine) == {"a": [8, 9, 10, 11]}
    assert engine.num_oom_events == 1


def test_other_errors_are_not_swallowed() -> None:
    engine, runner = make_engine(lambda plan: False)

    def fails(plan: StepPlan) -> bool:
        raise RuntimeError("shapes differ")

    runner._fails = fails
    submit(engine, "a", 8)
    with pytest.raises(RuntimeError, match="shapes differ"):
        engine.step()


def test_an_error_costs_only_the_request_it_belongs_to() -> None:
    engine, runner = make_engine(lambda plan: False)

    def fails(plan: StepPlan) -> bool:
        if any(chunk.request_id == "bad" and chunk.start for chunk in plan.chunks):
            raise IndexError("index 7 is out of bounds\nmore")
        return False

    runner._fails = fails
    for name in ("a", "bad", "b"):
        submit(engine, name, 8)
    tokens = run(engine)
    assert {name: tokens[name] for name in "ab"} == {name: [8, 9, 10, 11] for name in "ab"}
    assert tokens["bad"] == [8]
    (failed,) = engine.take_failed()
    assert failed.request_id == "bad"
    assert failed.message == "its step cannot be computed: index 7 is out of bounds"


@pytest.mark.parametrize("message", ["shapes differ", "CUDA error: illegal memory access"])
def test_an_error_of_the_device_or_of_every_request_is_the_workers(message: str) -> None:
    engine, runner = make_engine(lambda plan: False)

    def fails(plan: StepPlan) -> bool:
        if message == "shapes differ" or len(plan.chunks) > 1:
            raise RuntimeError(message)
        return False

    runner._fails = fails
    submit(engine, "a", 8)
    submit(engine, "b", 8)
    with pytest.raises(RuntimeError, match=message):
        engine.step()
    assert engine.take_failed() == []


def test_speed_is_measured() -> None:
    engine, _ = make_engine(lambda plan: False)
    submit(engine, "a", 8)
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert engine._throughput.decode_tokens_per_second > 0
    assert engine._throughput.prefill_tokens_per_second > 0


def test_a_request_without_finite_logits_fails_alone_and_its_kv_is_forgotten() -> None:
    engine, runner = make_engine(lambda plan: False)
    runner.damaged = "bad"
    submit(engine, "good", 20)
    # Two steps of prompt: the blocks of the first are cached before any logits are seen.
    submit(engine, "bad", 100)
    assert run(engine) == {"good": [20, 21, 22, 23]}
    (failed,) = engine.take_failed()
    assert failed.request_id == "bad"
    assert "NaN or infinite" in failed.message
    assert engine.num_nonfinite_logits == 1
    runner.damaged = ""
    submit(engine, "again", 100, max_tokens=1)
    runner.plans.clear()
    assert run(engine) == {"again": [100]}
    # The block that `good` held when the other one failed is found no more either.
    assert sum(count for plan in runner.plans for _, count in plan) == 100


class Observed(ThroughputEstimator):
    """An estimator that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, int]] = []

    def observe(self, seconds: float, **counts: int) -> None:
        self.steps.append(counts)
        super().observe(seconds, **counts)


def test_draft_tokens_are_no_sequences_and_count_as_far_as_they_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = make_engine(lambda plan: False, speculative=3)
    engine._throughput = observed = Observed()
    monkeypatch.setattr(runner, "token_after", lambda part: part.end % 30 and 1)
    for token, name in enumerate(("a", "b")):
        request = make_request(name, 20, max_tokens=40)
        assert engine.submit(msgspec.structs.replace(request, token_ids=[token] * 20)) is None
    answers = run(engine)
    prompts, *decodes = observed.steps
    assert prompts == {"num_decodes": 0, "num_prompt_tokens": 40, "num_accepted": 0}
    assert all(each["num_decodes"] <= 2 and not each["num_prompt_tokens"] for each in decodes)
    num_tokens = sum(each["num_decodes"] + each["num_accepted"] for each in decodes)
    assert num_tokens == sum(len(tokens) - 1 for tokens in answers.values()) == 78
    assert max(each["num_accepted"] for each in decodes) == 6


def test_a_request_without_finite_logits_in_several_rows_fails_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = make_engine(lambda plan: False, speculative=3)
    monkeypatch.setattr(runner, "token_after", lambda part: 1 if part.end < 30 else NO_TOKEN)
    submit(engine, "bad", 20, max_tokens=60)
    assert run(engine) == {"bad": [1] * 9}
    assert [each.request_id for each in engine.take_failed()] == ["bad"]
    assert engine.num_nonfinite_logits == 1


def test_a_request_that_rules_out_every_token_fails_by_name_and_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = make_engine(lambda plan: False)

    def token_after(part: Chunk) -> int:
        return NOTHING_ALLOWED if part.request_id == "bad" and part.end == 25 else part.end

    monkeypatch.setattr(runner, "token_after", token_after)
    for name in ("good", "bad"):
        submit(engine, name, 20, max_tokens=10)
    answers = run(engine)
    assert answers == {"good": list(range(20, 30)), "bad": list(range(20, 25))}
    [failed] = engine.take_failed()
    assert failed.request_id == "bad"
    assert all(word in failed.message for word in ("grammar", "logit_bias", "min_tokens"))
    assert engine.num_nonfinite_logits == 0


def test_only_repeated_damage_costs_the_others_their_cache() -> None:
    engine, runner = make_engine(lambda plan: False)

    def computed(name: str, first: int) -> int:
        """Tokens that are computed for a prompt of 100."""
        runner.plans.clear()
        request = make_request(name, 100, max_tokens=1)
        tokens = [first, *request.token_ids[1:]]
        assert engine.submit(msgspec.structs.replace(request, token_ids=tokens)) is None
        run(engine)
        return sum(count for plan in runner.plans for _, count in plan)

    assert (computed("a", 2), computed("b", 2), computed("c", 3)) == (100, 4, 100)
    for name, expected in (("bad", 4), ("worse", 100)):
        runner.damaged = name
        assert computed(name, 3) == (4 if name == "bad" else 100)
        assert [each.request_id for each in engine.take_failed()] == [name]
        assert computed(f"after {name}", 2) == expected


def test_a_step_without_work_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(lambda plan: False)
    submit(engine, "a", 8)
    monkeypatch.setattr(engine.scheduler._planner, "plan", lambda *_, **__: [])
    assert [engine.step() for _ in range(3)] == [[], [], []]
    assert engine.scheduler.stats().num_steps == 0
    monkeypatch.undo()
    assert run(engine) == {"a": [8, 9, 10, 11]}
    assert engine.scheduler.stats().num_steps == 4
