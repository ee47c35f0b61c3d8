"""Beam searches among other requests: the same hypotheses whatever happens around them."""

import msgspec
import numpy as np
import pytest
import torch

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.messages import Rejected
from ullage_engine.protocol.requests import (
    BeamParams,
    EngineRequest,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from ullage_engine.protocol.step_plan import Moves, SampledToken, StepPlan
from ullage_engine.scheduler.beam_search import BeamRules, Candidate, Search, advance
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler, SchedulerLimits
from ullage_engine.worker.engine import EngineCore

VOCAB = 30
STOP = 7


def logprobs(text: list[int]) -> list[float]:
    """A model: any text has its distribution."""
    return np.log(np.random.default_rng(text).dirichlet(np.full(VOCAB, 0.4))).tolist()


def likeliest(text: list[int], count: int) -> tuple[list[int], list[float]]:
    values = logprobs(text)
    ids = sorted(range(VOCAB), key=lambda token: -values[token])[:count]
    return ids, [values[token] for token in ids]


class TableRunner:
    """Greedy tokens of the model above; runs out of memory where it is told to."""

    def __init__(self) -> None:
        self.steps_to_fail: set[int] = set()
        self.bad_text: list[int] | None = None
        self.num_steps = 0

    def move(self, moves: Moves) -> None:
        """The model reads texts, not memory."""

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        return []

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        self.num_steps += 1
        if self.num_steps in self.steps_to_fail:
            raise torch.OutOfMemoryError("injected")
        if self.bad_text and any(chunk.history == self.bad_text for chunk in plan.chunks):
            raise IndexError("bad text")
        sampled = [chunk for chunk in plan.chunks if chunk.sampling is not None]
        found = []
        for chunk in sampled:
            assert chunk.sampling is not None
            ids, values = likeliest(chunk.history, chunk.sampling.top_logprobs or 1)
            found.append(SampledToken(chunk.request_id, ids[0], values[0], ids, values))
        return found


def make_engine(pool_blocks: int = 200, max_sequences: int = 8) -> tuple[EngineCore, TableRunner]:
    profile = MemoryProfile(
        block_tokens=16,
        groups=(CacheGroup(bytes_per_token=10),),
        state_bytes_per_sequence=0,
        activation_bytes_per_token=1,
        sampler_bytes_per_sequence=1,
        prefill_chunk_tokens=64,
        kv_pool_bytes=pool_blocks * 160,
    )
    throughput = ThroughputEstimator()
    runner = TableRunner()
    limits = SchedulerLimits(512, max_sequences, 64, True, 8192)
    scheduler = Scheduler(profile, limits, throughput, OutputLengthEstimator(512, start=8))
    return EngineCore(scheduler, runner, throughput), runner


def beam_requests(
    name: str = "s", n: int = 3, width: int = 4, penalty: float = 1.0, **fields: object
) -> list[EngineRequest]:
    request = EngineRequest(
        request_id=name,
        token_ids=[3] * 20,
        num_prompt_tokens=20,
        max_tokens=12,
        sampling=SamplingParams(),
        stop_token_ids=[STOP],
        beam=BeamParams(width=width, length_penalty=penalty),
    )
    ids = [name, *(f"{name}#{i}" for i in range(1, n))]
    return [msgspec.structs.replace(request, request_id=each, **fields) for each in ids]


def expected(request: EngineRequest) -> list[tuple[list[int], str]]:
    """The search without an engine."""
    assert request.beam is not None
    rules = BeamRules(
        request.beam.width,
        request.beam.length_penalty,
        frozenset(request.stop_token_ids),
        request.max_tokens,
    )
    state = Search()
    while not state.is_over:
        step = [likeliest(request.token_ids + beam.token_ids, VOCAB) for beam in state.beams]
        some = [
            [
                Candidate(token, TokenLogprobs(v, [], []))
                for token, v in zip(ids, values, strict=True)
            ]
            for ids, values in step
        ]
        state = advance(state, some, rules)
    return [(each.token_ids, each.finish) for each in state.finished]


def plain(name: str, prompt: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=[5] * prompt,
        num_prompt_tokens=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0),
    )


def run(engine: EngineCore) -> dict[str, list[TokenOutput]]:
    """Return the outputs with tokens, or with the end, of each request."""
    said: dict[str, list[TokenOutput]] = {}
    for _ in range(2000):
        if not engine.has_work:
            return said
        for output in engine.step():
            if output.token_ids or output.finish:
                said.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_integrity()
    raise AssertionError("it never ends")


def check(said: dict[str, list[TokenOutput]], requests: list[EngineRequest]) -> None:
    wanted = expected(requests[0])[: len(requests)]
    got = [said[request.request_id] for request in requests]
    assert [[(each.token_ids, each.finish) for each in outputs] for outputs in got] == [
        [pair] for pair in wanted
    ]


def check_empty(engine: EngineCore, pool_blocks: int = 200) -> None:
    """Nobody holds memory or is promised any."""
    assert engine.scheduler.stats().headroom_bytes == pool_blocks * 160
    assert not engine.has_work


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_every_request_gets_its_hypothesis_in_one_piece(width: int, penalty: float) -> None:
    engine, _ = make_engine()
    requests = beam_requests(n=min(3, width), width=width, penalty=penalty)
    assert engine.submit_group(requests) == []
    said = run(engine)
    check(said, requests)
    assert set(said) == {request.request_id for request in requests}
    check_empty(engine)


def test_a_search_reports_once_that_a_decode_step_was_survived() -> None:
    """The server runs a search alone until then, if it may have killed the last worker."""
    engine, _ = make_engine()
    requests = beam_requests(n=2)
    assert engine.submit_group(requests) == []

    outputs = [list(engine.step()) for _ in range(3)]
    reports = [(each.request_id, each.token_ids, each.num_hidden) for each in outputs[1]]
    assert reports == [(request.request_id, [], 2) for request in requests]
    assert outputs[0] == outputs[2] == []


def test_searches_run_beside_each_other_and_beside_others() -> None:
    engine, _ = make_engine(max_sequences=24)
    searches = [beam_requests("a", width=8), beam_requests("b", width=3, penalty=0.0)]
    others = [plain(f"p{i}", 10 + i, 30) for i in range(3)]
    for requests in searches:
        assert engine.submit_group(requests) == []
    for request in others:
        assert engine.submit(request) is None
    said = run(engine)
    for requests in searches:
        check(said, requests)
    for request in others:
        tokens = [token for output in said[request.request_id] for token in output.token_ids]
        text = list(request.token_ids)
        for token in tokens:
            assert token == likeliest(text, 1)[0][0]
            text.append(token)
        assert len(tokens) == 30
    check_empty(engine)


@pytest.mark.parametrize("pool_blocks", [4, 7, 12])
def test_beams_that_do_not_fit_together_wait_for_one_another(pool_blocks: int) -> None:
    engine, _ = make_engine(pool_blocks, max_sequences=3)
    searches = [beam_requests("a", width=8), beam_requests("b", width=5)]
    for requests in searches:
        assert engine.submit_group(requests, resumed=True) == []
    said = run(engine)
    for requests in searches:
        check(said, requests)
    check_empty(engine, pool_blocks)


def test_a_step_that_runs_out_of_memory_changes_nothing() -> None:
    engine, runner = make_engine()
    runner.steps_to_fail = {1, 4, 5, 9, 10, 11}
    requests = beam_requests(width=6)
    assert engine.submit_group(requests) == []
    check(run(engine), requests)
    assert engine.num_oom_events == 6
    check_empty(engine)


def test_the_longest_sequence_of_the_pool_ends_a_search() -> None:
    engine, _ = make_engine(pool_blocks=2)  # 32 tokens, 20 of them prompt
    requests = beam_requests(n=1, width=2, max_tokens=100, stop_token_ids=[])
    assert engine.submit_group(requests, resumed=True) == []
    ((output,),) = run(engine).values()
    assert len(output.token_ids) == 12
    assert output.finish == "length"
    check_empty(engine, 2)


def test_a_failed_beam_fails_every_request_of_its_search_and_no_other() -> None:
    engine, runner = make_engine(max_sequences=16)
    requests = beam_requests("a")
    other = beam_requests("b", token_ids=[4] * 20)
    runner.bad_text = [3] * 20 + expected(requests[0])[0][0][:2]
    for each in (requests, other):
        assert engine.submit_group(each) == []
    said = run(engine)
    check(said, other)
    assert set(said) == {request.request_id for request in other}
    failed = engine.take_failed()
    assert [each.request_id for each in failed] == ["a", "a#1", "a#2"]
    assert "bad text" in failed[0].message
    check_empty(engine)


def test_a_search_ends_when_nobody_waits_for_it() -> None:
    engine, _ = make_engine()
    requests = beam_requests()
    assert engine.submit_group(requests) == []
    for _ in range(4):
        assert not any(output.finish for output in engine.step())
    engine.cancel("s")
    engine.cancel("s#2")
    assert engine.has_work
    engine.cancel("s#1")
    assert not engine.has_work
    check_empty(engine)


def test_a_search_that_is_refused_leaves_nothing() -> None:
    engine, _ = make_engine(pool_blocks=1)
    answer = engine.submit_group(beam_requests())
    assert isinstance(answer, Rejected)
    assert (answer.request_id, answer.never) == ("s", True)
    assert not engine.has_work
    check_empty(engine, 1)


def test_a_search_is_charged_for_all_its_beams() -> None:
    """One beam would fit into 6 blocks, 8 do not."""
    engine, _ = make_engine(pool_blocks=6)
    assert isinstance(engine.submit_group(beam_requests(width=8)), Rejected)
    assert engine.submit_group(beam_requests(n=1, width=2)) == []
    engine.cancel("s")
    check_empty(engine, 6)


def test_a_prompt_without_room_is_answered_at_once() -> None:
    engine, _ = make_engine()
    long = [3] * 512
    requests = beam_requests(n=2, token_ids=long, num_prompt_tokens=512)
    answer = engine.submit_group(requests, resumed=True)
    assert answer == [
        TokenOutput(request_id=name, token_ids=[], finish="length") for name in ("s", "s#1")
    ]
    assert not engine.has_work


def test_log_probabilities_are_told_as_the_client_asked() -> None:
    engine, _ = make_engine()
    requests = beam_requests(n=1, sampling=SamplingParams(top_logprobs=2))
    assert engine.submit_group(requests) == []
    ((output,),) = run(engine).values()
    assert output.logprobs is not None
    text = list(requests[0].token_ids)
    for token, found in zip(output.token_ids, output.logprobs, strict=True):
        assert found.logprob == logprobs(text)[token]
        assert (found.top_ids, found.top_logprobs) == likeliest(text, 2)
        text.append(token)


def test_samples_are_admitted_together_or_not_at_all() -> None:
    engine, _ = make_engine(pool_blocks=6)
    samples = [plain(f"p{i}", 40, 10) for i in range(9)]
    answer = engine.submit_group(samples)
    assert isinstance(answer, Rejected)
    assert answer.request_id == "p0"
    assert not engine.has_work
    check_empty(engine, 6)
    assert engine.submit_group(samples[:1]) == []
    assert [len(outputs) for outputs in run(engine).values()] == [10]
