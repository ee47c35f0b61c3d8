"""An answer that another engine began goes on here as if it had begun here."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.continuation import Progress
from ullage_common.wire.errors import from_rpc_error
from ullage_engine.server import service
from ullage_engine.server.journal import JournalEntry
from ullage_engine.server.request import PartialAnswer

Serve = Callable[..., AbstractAsyncContextManager[Any]]
MAX_TOKENS = 16


def ask(*prompt: int, **fields: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt or (1, 2, 3)),
        sampling=pb.SamplingParams(seed=9),
        stop=pb.StopConditions(max_tokens=MAX_TOKENS),
        output=pb.OutputOptions(delta_token_ids=True),
    )
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


async def responses(engine: Any, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in engine.inference.Generate(request)]


def text(parts: list[pb.GenerateResponse], sample: int = 0) -> str:
    return "".join(part.delta.text for part in parts if part.delta.sample == sample)


def tokens(parts: list[pb.GenerateResponse], sample: int = 0) -> list[int]:
    return [t for part in parts if part.delta.sample == sample for t in part.delta.token_ids]


def continued(request: pb.GenerateRequest, parts: list[pb.GenerateResponse]) -> pb.GenerateRequest:
    """The request after so much of its answer was received."""
    progress = Progress(request)
    progress.on_accepted(parts[0].accepted, request.stop.max_tokens)
    for part in parts[1:]:
        if part.HasField("sample_finished"):
            progress.on_sample_finished(part.sample_finished)
        else:
            progress.on_delta(part.delta)
    later = pb.GenerateRequest()
    later.CopyFrom(request)
    progress.write(later)
    return later


async def check_every_cut(
    engine: Any, request: pb.GenerateRequest, num_samples: int = 1
) -> list[pb.GenerateResponse]:
    """Cuts the answer before every response and goes on; returns the whole answer."""
    whole = await responses(engine, request)
    for cut in range(2, len(whole)):
        first = whole[:cut]
        later = continued(request, whole[:cut])
        rest = await responses(engine, later)
        assert rest[0].accepted.continued_tokens == sum(p.delta.num_tokens for p in first)
        for sample in range(num_samples):
            assert text(first, sample) + text(rest, sample) == text(whole, sample), cut
            assert tokens(first, sample) + tokens(rest, sample) == tokens(whole, sample), cut
        before = whole[-1].finished
        after = rest[-1].finished
        assert (after.reason, after.stop_string) == (before.reason, before.stop_string)
        assert after.usage.prompt_tokens == before.usage.prompt_tokens
        assert after.usage.completion_tokens == before.usage.completion_tokens
    return whole


def test_an_answer_goes_on_from_any_token(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            whole = await check_every_cut(engine, ask())
            assert tokens(whole) == [fake.token_at(place, 9) for place in range(3, 3 + MAX_TOKENS)]
            assert len(whole) > MAX_TOKENS // 2  # or nothing was cut

    asyncio.run(scenario())


def test_a_truncated_prompt_stays_as_it_was_truncated(serve: Serve, fake: ModuleType) -> None:
    """The prompt had to leave room for more tokens than the engine granted."""
    prompt = [1] * 8192

    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            request = ask(*prompt, truncate_prompt_tokens=-1)
            request.stop.max_tokens = 500
            first = await responses(engine, request)
            assert first[0].accepted.prompt_tokens == 8192 - 500
            assert first[0].accepted.max_tokens == 400
            rest = await responses(engine, continued(request, first[:3]))
            assert rest[0].accepted.prompt_tokens == 8192 - 500
            assert tokens(first[:3]) + tokens(rest) == tokens(first)

    asyncio.run(scenario())


def test_text_that_waits_for_a_stop_string_is_neither_lost_nor_repeated(
    serve: Serve, fake: ModuleType
) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            plain = text(await responses(engine, ask()))
            ends = plain[30:36]
            almost = plain[12:16] + "\0"
            request = ask(stop=pb.StopConditions(stop_strings=[ends, almost]))
            whole = await check_every_cut(engine, request)
            assert whole[-1].finished.stop_string == ends
            unfinished = ask(stop=pb.StopConditions(stop_strings=[plain[-3:] + "\0"]))
            whole = await check_every_cut(engine, unfinished)
            assert whole[-1].finished.reason == pb.FINISH_REASON_LENGTH
            assert text(whole) == plain

    asyncio.run(scenario())


def test_a_stop_string_in_the_text_is_neither_lost_nor_repeated(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            plain = text(await responses(engine, ask()))
            ends = plain[30:36]
            request = ask(
                stop=pb.StopConditions(stop_strings=[ends]),
                output=pb.OutputOptions(delta_token_ids=True, include_stop=True),
            )
            whole = await check_every_cut(engine, request)
            assert whole[-1].finished.stop_string == ends
            assert text(whole) == plain[: plain.index(ends) + len(ends)]

    asyncio.run(scenario())


def test_a_stop_token_can_have_its_text(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            plain = await responses(engine, ask())
            last = tokens(plain)[5]
            stop = pb.StopConditions(stop_token_ids=[last])
            texts = []
            for includes in (False, True):
                output = pb.OutputOptions(delta_token_ids=True, include_stop=includes)
                texts.append(text(await check_every_cut(engine, ask(stop=stop, output=output))))
            assert texts[1].startswith(texts[0])
            assert text(plain).startswith(texts[1])

    asyncio.run(scenario())


def test_a_special_stop_token_has_text_only_where_the_client_wants_it(
    serve: Serve, fake: ModuleType
) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            texts = []
            for omits in (False, True):
                output = pb.OutputOptions(
                    delta_token_ids=True,
                    special_tokens=True,
                    include_stop=True,
                    omit_special_stop=omits,
                )
                request = ask(fake.Script.ENDS_AFTER_FIVE, 2, 3, output=output)
                texts.append(text(await check_every_cut(engine, request)))
            assert texts[0].startswith(texts[1])
            assert texts[0].removeprefix(texts[1]) in ("<|im_end|>", "<|endoftext|>")

            last = tokens(await responses(engine, ask()))[5]
            stop = pb.StopConditions(stop_token_ids=[last])
            with_text = [
                text(await check_every_cut(engine, ask(stop=stop, output=each)))
                for each in (output, pb.OutputOptions(delta_token_ids=True, include_stop=True))
            ]
            assert with_text[0] == with_text[1]

    asyncio.run(scenario())


def test_an_answer_that_had_ended_ends(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            whole = await check_every_cut(engine, ask(fake.Script.ENDS_AFTER_FIVE, 2, 3))
            assert whole[-1].finished.reason == pb.FINISH_REASON_STOP
            assert whole[-1].finished.usage.completion_tokens == 6

    asyncio.run(scenario())


def test_each_of_several_answers_goes_on(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            request = ask(samples=pb.Samples(n=3), stop=pb.StopConditions(max_tokens=6))
            await check_every_cut(engine, request, num_samples=3)

    asyncio.run(scenario())


def test_log_probabilities_are_sent_once(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            request = ask(output=pb.OutputOptions(top_logprobs=2))
            whole = await check_every_cut(engine, request)
            rest = await responses(engine, continued(request, whole[:9]))
            entries = [e.token_id for part in whole[:9] + rest for e in part.delta.logprobs]
            assert entries == tokens(whole)

    asyncio.run(scenario())


def test_a_worker_that_dies_is_no_end_of_a_continued_answer(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            whole = await responses(engine, ask())
            later = continued(ask(), whole[:6])
            rest = []
            async for response in engine.inference.Generate(later):
                rest.append(response)
                if len(rest) == 3:
                    kill = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)
                    await engine.admin.InjectFault(kill)
            assert tokens(whole[:6]) + tokens(rest) == tokens(whole)
            assert text(whole[:6]) + text(rest) == text(whole)
            assert rest[-1].finished.resumes == 1

    asyncio.run(scenario())


def test_what_was_granted_holds(serve: Serve, fake: ModuleType) -> None:
    """Neither lowers this engine's pressure more, nor does it give back what another took."""

    async def scenario() -> None:
        request = ask()
        async with serve(step_s=0.002) as engine:
            whole = await responses(engine, request)
            accepted = pb.Accepted()
            accepted.CopyFrom(whole[0].accepted)
            accepted.degraded.extend(["max_tokens=12", "temperature=0", "top_p=0.7"])
            accepted.max_tokens = 12
            first = [pb.GenerateResponse(accepted=accepted), *whole[1:5]]
            rest = await responses(engine, continued(request, first))
            assert list(rest[0].accepted.degraded) == list(accepted.degraded)
            assert tokens(first) + tokens(rest) == tokens(whole)[:12]
            assert rest[-1].finished.reason == pb.FINISH_REASON_LENGTH

    asyncio.run(scenario())


def test_a_long_answer_is_restored_in_a_thread(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen answers of thousands of tokens would hold up all streams of the engine."""
    monkeypatch.setattr(service, "INLINE_TOKENS", 3)
    threads: list[threading.Thread] = []
    restore = JournalEntry.restore

    def noted(self: JournalEntry, answer: PartialAnswer) -> None:
        threads.append(threading.current_thread())
        restore(self, answer)

    monkeypatch.setattr(JournalEntry, "restore", noted)

    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            request = ask()
            whole = await responses(engine, request)
            expected = []
            for cut in range(2, len(whole)):
                first = whole[:cut]
                rest = await responses(engine, continued(request, first))
                assert text(first) + text(rest) == text(whole)
                expected.append(len(tokens(first)) <= 3)
            assert [each is threading.main_thread() for each in threads] == expected
            assert set(expected) == {True, False}

    asyncio.run(scenario())


def with_answers(*counts: int, **fields: Any) -> pb.GenerateRequest:
    answers = [pb.PartialAnswer(token_ids=[300] * count) for count in counts]
    return ask(continuation=pb.Continuation(answers=answers), **fields)


def without_limit(request: pb.GenerateRequest) -> pb.GenerateRequest:
    request.stop.ClearField("max_tokens")
    return request


WRONG = (
    (with_answers(), "continuation.answers is 0; possible: 1"),
    (with_answers(1, 1), "continuation.answers is 2; possible: 1"),
    (with_answers(0), "continuation is without a token; possible: left out until a token"),
    (with_answers(MAX_TOKENS + 1), "continuation.answers[0].token_ids is 17 tokens"),
    (with_answers(1, samples=pb.Samples(best_of=2)), "best_of above n"),
    (with_answers(1, samples=pb.Samples(beam=pb.BeamSearch(width=2))), "nothing in a search"),
    (without_limit(with_answers(1)), "max_tokens is unset; possible: what Accepted has"),
    (with_answers(1, text="Hi"), "nothing without token_ids"),
    (
        ask(continuation=pb.Continuation(answers=[pb.PartialAnswer(token_ids=[60_000])])),
        "continuation is token 60000",
    ),
    (
        ask(
            continuation=pb.Continuation(
                answers=[pb.PartialAnswer(token_ids=[300])], degraded=["top_p=much"]
            )
        ),
        "continuation.degraded is top_p=much; possible: max_tokens=N",
    ),
)


def test_wrong_continuations_are_refused(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.002) as engine:
            for request, words in WRONG:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await responses(engine, request)
                error = from_rpc_error(raised.value)
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT, words
                assert words in error.message

    asyncio.run(scenario())


def test_a_full_engine_refuses_the_rest_like_anything_new(
    serve: Serve, fake: ModuleType, tmp_path: Path
) -> None:
    """So that whoever goes on with it may ask another engine."""

    async def scenario() -> None:
        trace = tmp_path / "trace"
        async with serve(step_s=0.002, trace=str(trace)) as engine:
            answers = [pb.PartialAnswer(token_ids=[300]), pb.PartialAnswer(token_ids=[301, 302])]
            rest = ask(fake.Script.FITS_NOT_NOW, continuation=pb.Continuation(answers=answers))
            rest.samples.n = 2
            call = engine.inference.Generate(rest)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            error = from_rpc_error(raised.value)
            assert (error.code, error.reason) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "KV_HEADROOM",
            )
            (line,) = [line for line in trace.read_text().splitlines() if "submit" in line]
            assert " False " in line
            assert "#1" in line

    asyncio.run(scenario())
