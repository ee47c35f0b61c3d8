"""InferenceService: one Generate call from validation to its last message."""

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc as rpc
from ullage_engine.config import EngineConfig
from ullage_engine.detokenizer import TokenBytes
from ullage_engine.memory import predictor
from ullage_engine.server import answers
from ullage_engine.server.board import Board
from ullage_engine.server.degrade import degrade
from ullage_engine.server.gate import Gate
from ullage_engine.server.grammar import GrammarCheck
from ullage_engine.server.job import Job, ModelLimits, build_job, check_model, check_request
from ullage_engine.server.journal import Finish, Journal, Reason, Update
from ullage_engine.server.metrics import EngineMetrics
from ullage_engine.server.samples import SampleGroup
from ullage_engine.server.supervisor import Supervisor
from ullage_engine.tokenizer import ModelTokenizer
from ullage_rpc.chat import ChatTemplate, ChatTemplateError
from ullage_rpc.errors import ServiceError, abort, invalid
from ullage_rpc.multiplex import serve_multiplex
from ullage_rpc.template_arguments import read_arguments
from ullage_rpc.turns import make_turns

Context = grpc.aio.ServicerContext[Any, Any]

# A client's own deadline is met with this much to spare, so that the partial answer arrives.
DEADLINE_MARGIN_S = 0.1
# A client has this long after its time is up to read what is on its way to it.
SLOW_CLIENT_GRACE_S = 5.0
# Tokenising takes about 1 ms per 10 kB; longer texts leave the event loop.
LONG_TEXT_CHARACTERS = 20_000
RETRY_AFTER_LOADING_S = 2.0
MAX_OPEN_REQUESTS = 1024


@dataclass(frozen=True)
class Language:
    """How the served model reads and writes."""

    tokenizer: ModelTokenizer
    token_bytes: TokenBytes
    chat: ChatTemplate | None
    """None: the model has no chat template."""


class InferenceService(rpc.InferenceServiceServicer):
    """Accepts requests into the journal and streams what the worker makes of them."""

    def __init__(
        self,
        config: EngineConfig,
        board: Board,
        journal: Journal,
        supervisor: Supervisor,
        metrics: EngineMetrics,
        gate: Gate,
    ) -> None:
        self._config = config
        self._board = board
        self._journal = journal
        self._supervisor = supervisor
        self._metrics = metrics
        self._gate = gate
        self._keys = itertools.count(1)
        self._grammars = GrammarCheck()
        self._language: Language | None = None

    def speak(self, language: Language) -> None:
        """The tokenizer is loaded; until then nothing is accepted."""
        self._language = language

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        try:
            check_model(request.model, self._config.model.name)
            return answers.model_response(
                self._config.model.name, self._loaded().tokenizer, self._board
            )
        except ServiceError as error:
            await abort(context, error)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        try:
            self._gate.admit(request, context.invocation_metadata())
            language = self._accepting()
            job = await self._job(request, language)
        except ServiceError as error:
            self._metrics.refused(error.reason)
            await abort(context, error)
        prefix = language.tokenizer.decode(job.request.token_ids) if job.echo else ""
        group = SampleGroup(job, language.token_bytes, prefix)
        outcome, failure = "cancelled", None
        for entry in group.entries:
            self._journal.open(entry)
        self._supervisor.submit(group.entries)
        try:
            finish = await self._in_time(self._stream(group, language, context), context)
            outcome = finish.reason
        except ServiceError as error:
            outcome, failure = error.reason, error
        finally:
            self._close(group, outcome)
        if failure is not None:  # last, for it waits for a client that does not read
            await abort(context, failure)

    async def Multiplex(self, requests: object, context: Context) -> None:
        await serve_multiplex(self.Generate, context)

    def _close(self, group: SampleGroup, outcome: str) -> None:
        self._end(group, "cancelled")  # the client went away, or another sample failed
        for entry in group.entries:
            self._journal.close(entry)
        self._metrics.ended(group.latest, outcome)

    def _end(self, group: SampleGroup, reason: Reason) -> None:
        for entry in group.end(reason):
            self._supervisor.cancel(entry)

    def _loaded(self) -> Language:
        if self._language is None or self._board.ready is None:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "NO_ENGINE",
                "the model is loading; come back",
                retry_after_s=RETRY_AFTER_LOADING_S,
            )
        return self._language

    def _accepting(self) -> Language:
        if self._board.draining:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "DRAINING",
                "this engine is stopping; use another",
                retry_after_s=RETRY_AFTER_LOADING_S,
            )
        if len(self._journal) >= MAX_OPEN_REQUESTS:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                f"{MAX_OPEN_REQUESTS} requests are open; come back",
                retry_after_s=RETRY_AFTER_LOADING_S,
            )
        return self._loaded()

    def _limits(self, language: Language) -> ModelLimits:
        ready = self._board.ready
        assert ready is not None
        return ModelLimits(
            name=self._config.model.name,
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            eos_token_ids=language.tokenizer.eos_token_ids,
        )

    async def _job(self, request: pb.GenerateRequest, language: Language) -> Job:
        limits = self._limits(language)
        check_request(request, limits)
        grammar = await self._grammars.text(request)
        prompt_ids = await _prompt_ids(request, language)
        key = f"{self._config.server.engine_id}-{self._board.epoch:x}-{next(self._keys)}"
        job = build_job(request, prompt_ids, key, limits, self._config.limits, grammar)
        return degrade(job, self._config.degrade, self._board.state)

    async def _stream(self, group: SampleGroup, language: Language, context: Context) -> Finish:
        """Sends the whole answer; Accepted goes out with the first news, when admission is sure."""
        deadline = asyncio.get_running_loop().time() + self._time_limit(context)
        updates = await self._next_updates(group, deadline)
        if not group.num_output_tokens and group.is_told and group.finish.reason == "timeout":
            raise _no_token_in_time()
        await context.write(self._accepted(group))
        while True:
            for update in updates:
                await self._write(update, group, language, context)
            if group.is_told:
                await context.write(answers.finished(group, self._board))
                return group.finish
            updates = await self._next_updates(group, deadline)

    async def _write(
        self, update: Update, group: SampleGroup, language: Language, context: Context
    ) -> None:
        if update.token_ids or update.text:
            await context.write(answers.delta(update, group.job, language.token_bytes))
        if update.finish and group.job.samples.n > 1:
            await context.write(answers.sample_finished(update))

    async def _next_updates(self, group: SampleGroup, deadline: float) -> list[Update]:
        if asyncio.get_running_loop().time() >= deadline:
            # News that are there already do not wait, so the timeout below would not see the time.
            self._end(group, "timeout")
        try:
            async with asyncio.timeout_at(deadline):
                return await group.next_updates()
        except TimeoutError:
            self._end(group, "timeout")
            return await group.next_updates()

    async def _in_time(self, streaming: Coroutine[Any, Any, Finish], context: Context) -> Finish:
        """Ends a call whose client does not take what it is sent; nothing of it stays behind."""
        try:
            async with asyncio.timeout(self._time_limit(context) + SLOW_CLIENT_GRACE_S):
                return await streaming
        except TimeoutError as error:
            raise _not_taken_in_time() from error

    def _time_limit(self, context: Context) -> float:
        limit = self._config.limits.request_timeout
        remaining = context.time_remaining()
        return limit if remaining is None else min(limit, remaining - DEADLINE_MARGIN_S)

    def _accepted(self, group: SampleGroup) -> pb.GenerateResponse:
        ready, state = self._board.ready, self._board.state
        assert ready is not None and state is not None
        request = group.job.request
        longest = predictor.longest_sequence(ready.profile, ready.max_model_len)
        num_tokens = predictor.expected_length(request, state.expected_output_tokens, longest)
        prompt = request.num_prompt_tokens
        count = group.job.samples.num_sequences
        shape = predictor.RequestShape(prompt, num_tokens - prompt, samples=count)
        charged = predictor.demand(ready.profile, shape).total
        return answers.accepted(group.job, self._config.server.engine_id, charged)


async def _prompt_ids(request: pb.GenerateRequest, language: Language) -> list[int]:
    if request.WhichOneof("input") == "token_ids":
        return list(request.token_ids.ids)
    if request.WhichOneof("input") == "text":
        encode, text = language.tokenizer.encode_text, request.text
    else:
        encode, text = language.tokenizer.encode_rendered, _render(request.messages, language)
    if len(text) < LONG_TEXT_CHARACTERS:
        return encode(text)
    return await asyncio.to_thread(encode, text)


def _render(messages: pb.Messages, language: Language) -> str:
    if language.chat is None:
        raise invalid("messages", "the model has no chat template; send text or token_ids")
    try:
        field, told = "messages.template_arguments", messages.template_arguments
        arguments = read_arguments(told, language.chat, field)
        return language.chat.render(make_turns(messages.messages), arguments=arguments)
    except ChatTemplateError as error:
        raise invalid("messages", str(error)) from error


def _not_taken_in_time() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "SLOW_CLIENT",
        "the answer was not read within the time limit; read faster or ask for less",
    )


def _no_token_in_time() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "DEADLINE",
        "no token was produced within the time limit; allow more time or send less",
    )
