"""Log-probabilities of a prompt's tokens, from the worker's chunks to the client."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import from_rpc_error
from ullage_common.wire.limits import MAX_PROMPT_LOGPROBS
from ullage_engine.server.restart_policy import RestartPolicy

Serve = Callable[..., AbstractAsyncContextManager[Any]]

PROMPT = list(range(100, 600))
KILL = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)
EAGER = RestartPolicy(first_backoff_s=0.05)


def ask(prompt: list[int], top: int = 1, **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(seed=9),
        stop=pb.StopConditions(max_tokens=2),
        output=pb.OutputOptions(prompt_logprobs=top, return_token_ids=True),
        **more,
    )


def scored(answer: Any) -> list[pb.TokenLogprob]:
    """The entries of all messages, which follow one another and precede every token."""
    entries: list[pb.TokenLogprob] = []
    for delta in answer.deltas:
        if delta.HasField("prompt_logprobs"):
            assert delta.prompt_logprobs.start == len(entries)
            assert not delta.num_tokens
            entries.extend(delta.prompt_logprobs.tokens)
    is_prompt = [delta.HasField("prompt_logprobs") for delta in answer.deltas]
    assert is_prompt == sorted(is_prompt, reverse=True), "a prompt's token behind the output"
    return entries


def assert_whole(answer: Any, prompt: list[int], top: int) -> None:
    entries = scored(answer)
    assert [entry.token_id for entry in entries] == prompt
    assert (entries[0].logprob, entries[0].rank, len(entries[0].top)) == (0.0, 0, 0)
    for position, entry in enumerate(entries[1:], start=1):
        assert entry.logprob == -(prompt[position] % 97) / 8
        assert entry.rank == position
        assert [other.token_id for other in entry.top] == list(range(400, 400 + top))
    assert entries[0].token or entries[0].token_bytes


@pytest.mark.parametrize("length", [1, 2, 257, 500])
@pytest.mark.parametrize("top", [0, 2])
def test_every_token_has_its_entry(serve: Serve, length: int, top: int) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.0) as engine:
            answer = await engine.generate(ask(PROMPT[:length], top))
            assert_whole(answer, PROMPT[:length], top)
            assert len(answer.token_ids) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "samples", [pb.Samples(n=3), pb.Samples(n=1, best_of=3)], ids=["n", "best_of"]
)
@pytest.mark.parametrize("step_s", [0.0, 0.02])
def test_once_for_all_answers(serve: Serve, samples: pb.Samples, step_s: float) -> None:
    """The other answers are over long before the worker has scored the last token."""

    async def scenario() -> None:
        async with serve(step_s=step_s) as engine:
            answer = await engine.generate(ask(PROMPT[:20], samples=samples))
            assert_whole(answer, PROMPT[:20], 1)
            assert len(answer.token_ids) == 2 * samples.n

    asyncio.run(scenario())


def test_a_prompt_that_is_not_scored_in_time(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.05) as engine:
            request = ask(PROMPT, samples=pb.Samples(n=3))
            with pytest.raises(grpc.aio.AioRpcError, match="within the time limit"):
                await engine.generate(request, timeout=1.5)

    asyncio.run(scenario())


@pytest.mark.parametrize("n", [1, 3])
def test_an_engine_that_stops_sends_no_part_of_them(serve: Serve, n: int) -> None:
    """A router asks another engine from the beginning, even if other answers had tokens."""

    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            request = ask(PROMPT, samples=pb.Samples(n=n))
            request.stop.max_tokens = 100
            answer = asyncio.create_task(engine.generate(request))
            await engine.until(lambda state: state.requests_running == n)
            engine.stop.set()
            engine.hurry.set()
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await answer
            error = from_rpc_error(refusal.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")

    asyncio.run(scenario())


def test_the_next_worker_scores_the_rest(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.01, policy=EAGER) as engine:
            answer = asyncio.create_task(engine.generate(ask(PROMPT)))
            await engine.until(lambda state: state.requests_running == 1)
            await engine.admin.InjectFault(KILL)
            whole = await answer
            assert_whole(whole, PROMPT, 1)
            assert whole.finished.resumes == 1

    asyncio.run(scenario())


def test_too_many_are_refused(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.0) as engine:
            length = MAX_PROMPT_LOGPROBS // 20
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await engine.generate(ask([100] * length, top=20))
            error = from_rpc_error(refusal.value)
            assert error.code == grpc.StatusCode.INVALID_ARGUMENT
            assert error.metadata["field"] == "prompt_logprobs"
            assert f"at most 19 with a prompt of {length} tokens" in error.message
            with pytest.raises(grpc.aio.AioRpcError, match=r"at most 9 .* and 2 answers"):
                await engine.generate(ask([100] * length, top=20, samples=pb.Samples(n=2)))
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await engine.generate(ask([100], top=21))
            assert from_rpc_error(refusal.value).metadata["field"] == "prompt_logprobs"

    asyncio.run(scenario())
