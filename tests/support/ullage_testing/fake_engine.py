"""A scriptable engine behind a real gRPC server, with a tiny tokenizer."""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.process.addresses import joined
from ullage_common.wire.errors import ServiceError, abort
from ullage_common.wire.fingerprint import fingerprint_of
from ullage_common.wire.multiplex import serve_multiplex
from ullage_common.wire.request_fields import known_fields
from ullage_common.wire.servers import bind, new_server

MODEL = "tiny"
BYTES_PER_TOKEN = 1000
BLOCK = 16
BLOCK_BYTES = BYTES_PER_TOKEN * BLOCK
EXPECTED_OUTPUT = 32
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer() -> bytes:
    """One token a byte: token counts in tests can be read off the text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return bytes(tokenizer.to_str(), "utf-8")


TOKENIZER = tiny_tokenizer()


@dataclass
class Script:
    """The behaviour of a fake engine. Tests change it while the engine runs."""

    words: tuple[str, ...] = ("Hello", " big", " world")
    """Texts of the tokens. A token that ends the answer has an empty text."""
    spellings: tuple[bytes, ...] = ()
    """Bytes of the tokens, where they are others than those of the texts."""
    refuse: ServiceError | None = None
    """Answered instead of Accepted."""
    fail_after: int | None = None
    """Words after which the call breaks off."""
    failure: ServiceError = field(
        default_factory=lambda: ServiceError(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST", "lost")
    )
    hold: asyncio.Event | None = None
    """Waited for before the first word."""
    pause: asyncio.Event | None = None
    """Waited for after the first word."""
    reason: int = inference_pb2.FINISH_REASON_STOP
    degraded: tuple[str, ...] = ()
    """What Accepted says was lowered."""
    logprob: float = -0.5
    """Of every token."""
    max_tokens: int = 0
    """Output limit that Accepted names, or 0 for none."""
    preemptions: int = 0
    """Preemptions of each answer that its end states."""
    scored_at_once: int = 4
    """Prompt tokens whose log-probabilities one message has."""
    fail_after_scored: int | None = None
    """Prompt tokens after whose log-probabilities the call breaks off."""
    on_failure: Callable[[], None] = lambda: None
    """Called before such a call breaks off."""
    dims: int = 3
    """Numbers of an embedding, at least 3."""
    cached: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)
    """Prompt tokens that it has the KV of, as far as this says so."""


class FakeEngine(
    inference_pb2_grpc.InferenceServiceServicer, headroom_pb2_grpc.HeadroomServiceServicer
):
    """Keeps the wire's promises and no model."""

    def __init__(self, name: str, pool: str, pool_blocks: int, max_model_len: int) -> None:
        self.script = Script()
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.cancelled: list[str] = []
        self.active = 0
        self.has_multiplex = True
        self.multiplex_hold: asyncio.Event | None = None
        """Waited for before a Multiplex stream opens."""
        self.num_opening = 0
        """Multiplex streams that wait to open."""
        self.knows_continuations = True
        self.streams = 0
        self.max_model_len = max_model_len
        self.grid = (2, 2) if pool == "large" else (1, 1)
        """Tensor ranks and pipeline stages."""
        self.tokenizer = TOKENIZER
        self.vocab_size = 256
        self.template = TEMPLATE
        self.tool_template = ""
        self.special_tokens: dict[str, str] = {}
        self.sampling_defaults = inference_pb2.SamplingParams()
        self.task = inference_pb2.TASK_GENERATE
        self.has_kv = True
        """Whether the model has KV, as an encoder has not."""
        self.adapters: tuple[str, ...] = ()
        """Names of the model's adapters."""
        self.request_fields: Collection[str] = sorted(known_fields())
        """Fields that it announces; none, as an engine of 0.2.0."""
        self.heartbeat_s = 0.2
        self.is_mute = False
        self.lost_reports = 0
        """Sequence numbers that its streams skip. Negative: repeat."""
        self.headroom = headroom_pb2.Headroom(
            engine=name,
            epoch=1,
            model=MODEL,
            pool=pool,
            ready=True,
            health=1.0,
            total_bytes=1 << 30,
            threshold=0.85,
            kv_pool_bytes=pool_blocks * BLOCK_BYTES,
            kv_free_bytes=pool_blocks * BLOCK_BYTES,
            headroom_bytes=pool_blocks * BLOCK_BYTES,
            expected_output_tokens=EXPECTED_OUTPUT,
            decode_tokens_per_second=50.0,
            ledger=[headroom_pb2.Reservation(name="kv_pool", reserved_bytes=1, allocated_bytes=1)],
            tiers=[headroom_pb2.KvTier(name="host", backend="shared memory", hits=3)],
        )
        self.host = "127.0.0.1"
        self.address = ""
        self.credentials: grpc.ServerCredentials | None = None
        """None: plaintext."""
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = new_server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        headroom_pb2_grpc.add_HeadroomServiceServicer_to_server(self, self._server)
        port = bind(self._server, joined(self.host, port), self.credentials)
        self.address = joined(self.host, port)
        await self._server.start()

    async def stop(self) -> None:
        if self._server:
            server = self._server
            self._server = None
            await server.stop(None)

    async def restart(self) -> None:
        port = int(self.address.rpartition(":")[2])
        await self.stop()
        self.headroom.epoch += 1
        await self.start(port)

    def set_facts(self, **facts: str) -> None:
        """Change the facts of the numerics, and report them. Without any, report no fingerprint."""
        self.headroom.fingerprint = fingerprint_of(facts).digest if facts else ""
        self.headroom.fingerprint_facts.clear()
        self.headroom.fingerprint_facts.update(facts)
        self.push()

    def push(self, **changes: Any) -> None:
        """Changes the headroom and reports it."""
        for name, value in changes.items():
            if name in {"releases", "step_seconds", "adapters"}:
                self.headroom.ClearField(name)
                getattr(self.headroom, name).extend(value)
            else:
                setattr(self.headroom, name, value)
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    async def WatchHeadroom(
        self, request: headroom_pb2.WatchHeadroomRequest, context: Any
    ) -> AsyncIterator[headroom_pb2.WatchHeadroomResponse]:
        for sequence in itertools.count(1):
            changed = self._changed
            if not self.is_mute:
                self.headroom.sequence = sequence + self.lost_reports
                yield headroom_pb2.WatchHeadroomResponse(headroom=self.headroom)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.heartbeat_s):
                    await changed.wait()

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Any
    ) -> inference_pb2.GetModelResponse:
        if not self.headroom.ready:
            await abort(context, ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_ENGINE", "loading"))
        return inference_pb2.GetModelResponse(
            model=self.headroom.model,
            tokenizer_json=self.tokenizer,
            chat_template=self.template,
            tool_chat_template=self.tool_template,
            special_tokens=self.special_tokens,
            sampling_defaults=self.sampling_defaults,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            created=1_700_000_000,
            task=self.task,
            adapters=[inference_pb2.Adapter(name=name, rank=8) for name in self.adapters],
            fingerprint=self.headroom.fingerprint,
            fingerprint_facts=self.headroom.fingerprint_facts,
            request_fields=self.request_fields,
            profile=inference_pb2.MemoryProfile(
                block_tokens=BLOCK,
                groups=[inference_pb2.CacheGroup(bytes_per_token=BYTES_PER_TOKEN)]
                if self.has_kv
                else [],
                kv_pool_bytes=self.headroom.kv_pool_bytes,
            ),
            ranks=[
                inference_pb2.RankPlacement(rank=rank, stage=stage, tensor_rank=tensor_rank)
                for rank, (stage, tensor_rank) in enumerate(
                    itertools.product(range(self.grid[1]), range(self.grid[0]))
                )
            ],
        )

    def forget_requests(self) -> None:
        """Drop the record of received requests, so that a test can measure the router's memory."""
        self.requests.clear()
        self.metadata.clear()
        self.cancelled.clear()

    async def Multiplex(self, requests: object, context: Any) -> None:
        if not self.has_multiplex:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        if self.multiplex_hold:
            self.num_opening += 1
            await self.multiplex_hold.wait()
            self.num_opening -= 1
        self.streams += 1
        try:
            await serve_multiplex(self.Generate, context)
        finally:
            self.streams -= 1

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append({k: str(v) for k, v in context.invocation_metadata()})
        if self.script.refuse:
            await abort(context, self.script.refuse)
        self.active += 1
        try:
            yield inference_pb2.GenerateResponse(
                accepted=inference_pb2.Accepted(
                    request_id=request.request_id,
                    engine=self.headroom.engine,
                    prompt_tokens=len(request.token_ids.ids),
                    cached_tokens=self.script.cached.cached_tokens,
                    cached_by_tier=self.script.cached.cached_by_tier,
                    seed=7,
                    degraded=self.script.degraded,
                    max_tokens=self.script.max_tokens,
                    continued_tokens=sum(self._received(request)),
                    fingerprint=self.headroom.fingerprint,
                )
            )
            async for response in self._tell(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            # The latter where the call ends while a response is being sent.
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.active -= 1

    async def _embed(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if self.script.fail_after == 0:
            await abort(context, self.script.failure)
        ids = request.token_ids.ids
        vector = struct.pack("<3f", *vector_of(ids))
        vector += struct.pack("<f", 0.1) * (self.script.dims - 3)
        yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(embedding=vector))
        if self.script.fail_after == 1:
            await abort(context, self.script.failure)
        yield inference_pb2.GenerateResponse(
            finished=inference_pb2.Finished(
                reason=inference_pb2.FINISH_REASON_STOP,
                usage=self._usage(prompt_tokens=len(ids)),
            )
        )

    def _usage(self, **fields: int) -> inference_pb2.Usage:
        usage = inference_pb2.Usage(**fields)
        usage.MergeFrom(self.script.cached)
        return usage

    def _received(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Words of each sample that the client has from another engine."""
        if not (self.knows_continuations and request.HasField("continuation")):
            return [0] * _num_samples(request)
        counts = []
        for sample, answer in enumerate(request.continuation.answers):
            counts.append(len(answer.token_ids))
            assert list(answer.token_ids) == list(range(counts[-1])), "the tokens that were sent"
            text = "".join(f"{word}{sample or ''}" for word in self.script.words[: counts[-1]])
            assert answer.text_length == len(text), "the text that was sent"
        return counts

    async def _wait_to_prefill(self, hold: asyncio.Event, tokens: int) -> None:
        self.headroom.prefill_backlog_tokens += tokens
        try:
            await hold.wait()
        finally:
            self.headroom.prefill_backlog_tokens -= tokens

    async def _tell(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        script = self.script
        if script.hold:
            await self._wait_to_prefill(script.hold, len(request.token_ids.ids))
        if request.embed:
            async for response in self._embed(request, context):
                yield response
            return
        if request.output.HasField("prompt_logprobs") and not request.HasField("continuation"):
            for scored in prompt_logprobs(request, script.scored_at_once):
                if script.fail_after_scored == scored.start:
                    script.on_failure()
                    await abort(context, script.failure)
                yield inference_pb2.GenerateResponse(
                    delta=inference_pb2.Delta(prompt_logprobs=scored)
                )
        words = script.words[: request.stop.max_tokens]
        received = self._received(request)
        for i, word in enumerate(words):
            if script.fail_after == i >= min(received):
                await abort(context, script.failure)
            for sample in range(_num_samples(request)):
                if i < received[sample]:
                    continue
                spelling = script.spellings[i] if script.spellings else b""
                message = delta(
                    i, f"{word}{sample or ''}", request.output, script.logprob, spelling
                )
                message.sample = sample
                yield inference_pb2.GenerateResponse(delta=message)
            if i == 0 and script.pause:
                await script.pause.wait()
        if script.fail_after == len(words):
            await abort(context, script.failure)
        usage = self._usage(
            prompt_tokens=len(request.token_ids.ids),
            completion_tokens=len(words) * _num_samples(request),
        )
        for sample in range(_num_samples(request)) if _num_samples(request) > 1 else ():
            if request.HasField("continuation") and request.continuation.answers[sample].reason:
                continue
            end = inference_pb2.SampleFinished(sample=sample, reason=script.reason)  # type: ignore[arg-type]
            yield inference_pb2.GenerateResponse(sample_finished=end)
        finished = inference_pb2.Finished(
            reason=script.reason,  # type: ignore[arg-type]
            usage=usage,
            preemptions=script.preemptions,
        )
        yield inference_pb2.GenerateResponse(finished=finished)


def prompt_logprobs(
    request: inference_pb2.GenerateRequest, at_once: int
) -> Iterator[inference_pb2.PromptLogprobs]:
    """Log-probabilities that tell position and token, with alternatives whose ids follow."""
    ids = list(request.token_ids.ids)
    for start in range(0, len(ids), at_once):
        message = inference_pb2.PromptLogprobs(start=start)
        for position, token in enumerate(ids[start : start + at_once], start):
            entry = message.tokens.add(token_id=token, token=f"<{token}>")
            if position == 0:
                continue
            entry.logprob = -(position + token / 256)
            entry.rank = position
            for rank in range(request.output.prompt_logprobs):
                entry.top.add(token_id=rank, token=f"<{rank}>", logprob=-0.25 * (1 + rank))
        yield message


def vector_of(token_ids: Sequence[int]) -> tuple[float, ...]:
    """The embedding of an input."""
    return (float(len(token_ids)), sum(token_ids) / 8, token_ids[-1] / 4)


def _num_samples(request: inference_pb2.GenerateRequest) -> int:
    return max(1, request.samples.n)


def delta(
    i: int,
    word: str,
    output: inference_pb2.OutputOptions,
    logprob: float = -0.5,
    spelling: bytes = b"",
) -> inference_pb2.Delta:
    message = inference_pb2.Delta(text=word, num_tokens=1)
    if output.return_token_ids or output.delta_token_ids:
        message.token_ids.append(i)
    if output.HasField("top_logprobs"):
        top = [
            inference_pb2.Alternative(token_id=n, token=f"t{n}", logprob=-1.0 - n)
            for n in range(output.top_logprobs)
        ]
        token = spelling.decode("utf-8", "replace") or word or "<|end|>"
        entry = inference_pb2.TokenLogprob(
            token_id=i,
            token=token,
            logprob=logprob,
            top=top,
            token_bytes=spelling or token.encode(),
            is_end=not (word or spelling),
        )
        message.logprobs.append(entry)
    return message
