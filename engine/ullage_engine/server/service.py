"""The inference service, which handles each Generate RPC from validation to the last message."""

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import grpc
from msgspec import structs

from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc as rpc
from ullage_common.chat.truncation import truncated
from ullage_common.config.engine import EngineConfig
from ullage_common.process.tracing import Tracer
from ullage_common.request_cost import most_tokens, request_blocks
from ullage_common.wire.errors import SLOW_CLIENT_GRACE_S, ServiceError, abort, slow_client
from ullage_common.wire.fingerprint import with_adapter
from ullage_common.wire.flow_control import AT_ONCE, SendPace
from ullage_common.wire.multiplex import CallContext, serve_multiplex
from ullage_engine.protocol.messages import Ready
from ullage_engine.protocol.request_events import ServedRequest
from ullage_engine.server import responses
from ullage_engine.server.adapters import AdapterSet
from ullage_engine.server.grammar import GrammarCheck
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.journal import Finish, Journal, Update
from ullage_engine.server.metrics import EngineMetrics
from ullage_engine.server.prompts import TokenizerBundle, bad_word_ids, prompt_ids
from ullage_engine.server.request import (
    ModelLimits,
    Reason,
    ValidatedRequest,
    check_model,
    check_request,
    degrade,
    keep_degraded,
    validated_request,
)
from ullage_engine.server.samples import SampleGroup
from ullage_engine.server.supervisor import WorkerSupervisor
from ullage_engine.server.tickets import TicketVerifier

log = logging.getLogger("ullage.engine")

Context = grpc.aio.ServicerContext[Any, Any]

DEADLINE_MARGIN_S = 0.1
"""Seconds before the client's deadline at which to end the answer, so it arrives in time."""
RETRY_AFTER_LOADING_S = 2.0
"""Seconds after which to retry a request refused while loading, draining or overloaded."""
MAX_OPEN_REQUESTS = 1024
INLINE_TOKENS = 1024
"""Maximum number of tokens that are converted to text on the event loop, in a few milliseconds."""


class InferenceService(rpc.InferenceServiceServicer):
    """Accepts requests into the journal and streams the worker's answers to clients."""

    def __init__(
        self,
        config: EngineConfig,
        engine_status: EngineStatus,
        journal: Journal,
        supervisor: WorkerSupervisor,
        metrics: EngineMetrics,
        ticket_verifier: TicketVerifier,
        tracer: Tracer | None = None,
        adapters: AdapterSet | None = None,
    ) -> None:
        """Create the service.

        Args:
            tracer: creates trace spans for requests, or None if tracing is off.
            adapters: the engine's LoRA adapters, or None if it serves none.
        """
        self._tracer = tracer
        self._adapters = adapters
        self._config = config
        self._engine_status = engine_status
        self._journal = journal
        self._supervisor = supervisor
        self._metrics = metrics
        self._ticket_verifier = ticket_verifier
        self._keys = itertools.count(1)
        self._grammars = GrammarCheck()
        self._tokenizer_bundle: TokenizerBundle | None = None

    def unservable(self, ready: Ready) -> str:
        """Return why the loaded tokenizer cannot serve the worker's model, or "" if it can.

        A model that generates text needs a tokenizer that can convert tokens to text.
        """
        bundle = self._tokenizer_bundle
        return bundle.token_bytes.problem if bundle and ready.task == "generate" else ""

    def set_tokenizer(self, tokenizer_bundle: TokenizerBundle) -> None:
        """Set the loaded tokenizer. Requests are refused until it is set."""
        self._tokenizer_bundle = tokenizer_bundle

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        try:
            check_model(request.model, self._config.model.name, self._adapter_keys)
            response = responses.model_response(
                self._config, self._loaded().tokenizer, self._engine_status
            )
            for each in self._adapters.sections if self._adapters else ():
                response.adapters.add(name=each.name, rank=each.rank)
            return response
        except ServiceError as error:
            await abort(context, error)

    @property
    def _adapter_keys(self) -> dict[str, str]:
        return self._adapters.keys if self._adapters else {}

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        try:
            if self._adapters is None:
                await self._generate(request, context)
                return
            # A request keeps its version of the adapter to the end, even if the adapter is edited.
            with self._adapters.held(request.model):
                await self._generate(request, context)
        except ServiceError as error:
            # Last, since abort waits for a client that does not read.
            await abort(context, error)

    async def _generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Answer a request.

        Raises:
            ServiceError: the request is refused, or has failed and holds nothing any more.
        """
        key = f"{self._config.server.engine_id}-{self._engine_status.epoch:x}-{next(self._keys)}"
        served = self._served(request, key, context)
        try:
            self._ticket_verifier.admit(request, context.invocation_metadata())
            tokenizer_bundle = self._accepting()
            job = await self._job(request, key, served, tokenizer_bundle)
            group = await _group(job, tokenizer_bundle, _pace_of(context))
            # The engine may have begun to drain or stay out while the grammar was compiled.
            self._accepting()
        except ServiceError as error:
            self._metrics.refused(error.reason)
            served.end("refused", _refusal_fields(error), error=error.reason)
            raise
        except asyncio.CancelledError:  # the client went away during tokenising
            served.end("finished", {"outcome": "cancelled"}, error="cancelled")
            raise
        except Exception as error:
            served.end("refused", {}, error=type(error).__name__)
            raise

        outcome = "cancelled"
        failure = None
        try:
            for entry in group.entries:
                self._journal.open(entry)
            self._supervisor.submit(group.entries)
            with self._engine_status.step_limits.held(request.step_limit_s):
                streaming = self._stream(group, tokenizer_bundle, context)
                outcome = (await self._in_time(streaming, context)).reason
        except ServiceError as error:
            outcome = error.reason
            failure = error
            raise
        finally:
            self._close(group, outcome)
            _log_end(served, group, outcome, failure)

    def _served(self, request: pb.GenerateRequest, key: str, context: Context) -> ServedRequest:
        engine = {"ullage.engine": self._config.server.engine_id}
        metadata = context.invocation_metadata() or ()
        return ServedRequest(self._tracer, request.request_id or key, tuple(metadata), engine)

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

    def _loaded(self) -> TokenizerBundle:
        if self._tokenizer_bundle is None or self._engine_status.ready is None:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "NO_ENGINE",
                "the model is loading; try again later",
                retry_after_s=RETRY_AFTER_LOADING_S,
            )
        return self._tokenizer_bundle

    def _accepting(self) -> TokenizerBundle:
        if self._engine_status.draining:
            raise _stopping()
        if reason := self._engine_status.not_ready_reason:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_ENGINE", reason)
        if len(self._journal) >= MAX_OPEN_REQUESTS:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                f"{MAX_OPEN_REQUESTS} requests are open; try again later",
                retry_after_s=RETRY_AFTER_LOADING_S,
            )
        return self._loaded()

    def _limits(self, tokenizer_bundle: TokenizerBundle) -> ModelLimits:
        ready = self._engine_status.ready
        assert ready is not None
        return ModelLimits(
            name=self._config.model.name,
            adapters=self._adapter_keys,
            task=responses.TASKS[ready.task],
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            eos_token_ids=tokenizer_bundle.tokenizer.eos_token_ids,
            sampling_defaults=tokenizer_bundle.tokenizer.sampling_defaults,
        )

    async def _job(
        self,
        request: pb.GenerateRequest,
        key: str,
        served: ServedRequest,
        tokenizer_bundle: TokenizerBundle,
    ) -> ValidatedRequest:
        limits = self._limits(tokenizer_bundle)
        check_request(request, limits)
        grammar = await self._grammars.text(request)
        whole_prompt = await prompt_ids(request, tokenizer_bundle)
        affixes = tokenizer_bundle.tokenizer.affixes
        token_ids = truncated(whole_prompt, request, limits.max_model_len, affixes)
        bad_words = bad_word_ids(request.sampling.bad_words, tokenizer_bundle.tokenizer)
        checked = validated_request(
            request, token_ids, key, limits, self._config.limits, grammar, bad_words
        )
        max_tokens = checked.request.max_tokens
        served.happened("received", prompt_tokens=len(token_ids), max_tokens=max_tokens)
        job = replace(
            checked,
            served=served,
            request=structs.replace(
                checked.request, client_id=served.client_id, traceparent=served.traceparent
            ),
        )
        if request.HasField("continuation"):  # the request keeps the max_tokens it was granted
            return keep_degraded(job, request.continuation.degraded)
        if request.embed:
            return job
        return degrade(job, self._config.degrade, self._engine_status.state)

    async def _stream(
        self, group: SampleGroup, tokenizer_bundle: TokenizerBundle, context: Context
    ) -> Finish:
        """Stream the whole answer. The Accepted message is sent once admission is certain."""
        deadline = asyncio.get_running_loop().time() + self._time_limit(context)
        updates = await self._next_updates(group, deadline)
        # Samples that do not score the prompt may have tokens sooner than the one that does.
        while group.awaits_prompt_logprobs and not group.all_finishes_sent:
            updates += await self._next_updates(group, deadline)

        is_unscored = group.awaits_prompt_logprobs
        is_late = group.all_finishes_sent and group.finish.reason == "timeout"
        if is_late and (is_unscored or not group.num_output_tokens):
            raise _no_token_in_time()
        if is_unscored:
            raise _stopping() if self._engine_status.draining else _not_scored()

        accepted = self._accepted(group)
        if served := group.job.served:
            served.happened("first_token", seconds=served.seconds, **_tiers(accepted.accepted))
        await context.write(accepted)
        for scored in responses.prompt_logprobs(group, tokenizer_bundle.token_bytes):
            await context.write(scored)
        while True:
            for update in updates:
                await self._write(update, group, tokenizer_bundle, context)
            if group.all_finishes_sent:
                await context.write(responses.finished(group, self._engine_status))
                return group.finish
            updates = await self._next_updates(group, deadline)

    async def _write(
        self,
        update: Update,
        group: SampleGroup,
        tokenizer_bundle: TokenizerBundle,
        context: Context,
    ) -> None:
        if update.token_ids or update.text or update.embedding:
            await context.write(responses.delta(update, group.job, tokenizer_bundle.token_bytes))
        if update.finish and group.job.samples.n > 1:
            await context.write(responses.sample_finished(update))

    async def _next_updates(self, group: SampleGroup, deadline: float) -> list[Update]:
        """Wait for updates of the samples, and finish samples that exceed a time limit.

        Samples are finished at the deadline, or when a streamed answer has had no update for
        `limits.request_timeout`.
        """
        now = asyncio.get_running_loop().time()
        news_by = now + self._config.limits.request_timeout if group.is_streamed else deadline
        if now >= deadline:
            # With news at hand the call below does not wait, so its timeout would never fire.
            self._end(group, "timeout")
        updates = await group.next_updates(min(deadline, news_by))
        if updates is None:
            self._end(group, "timeout")
            updates = await group.next_updates()
        assert updates is not None, "an end that is no news"
        return updates

    async def _in_time(self, streaming: Coroutine[Any, Any, Finish], context: Context) -> Finish:
        """Await the stream, and time out the RPC if its client stops reading.

        The timeout frees the journal entries of the RPC.
        """
        try:
            async with asyncio.timeout(self._time_limit(context) + SLOW_CLIENT_GRACE_S):
                return await streaming
        except TimeoutError as error:
            raise slow_client() from error

    def _time_limit(self, context: Context) -> float:
        limit = self._config.limits.total_timeout
        remaining = context.time_remaining()
        return limit if remaining is None else min(limit, remaining - DEADLINE_MARGIN_S)

    def _accepted(self, group: SampleGroup) -> pb.GenerateResponse:
        ready = self._engine_status.ready
        state = self._engine_status.state
        assert ready is not None
        assert state is not None
        request = group.job.request
        profile = ready.profile
        longest = min(ready.max_model_len, most_tokens(profile, profile.kv_pool_bytes))
        num_tokens = request.charged_tokens(state.expected_output_tokens, longest)
        num_samples = group.job.samples.num_sequences
        blocks = request_blocks(profile, request.num_prompt_tokens, num_tokens, num_samples)
        charged = blocks * profile.block_bytes
        engine_id = self._config.server.engine_id
        digest = with_adapter(ready.fingerprint.digest, request.adapter)
        return responses.accepted(group, engine_id, charged, digest)


async def _group(job: ValidatedRequest, bundle: TokenizerBundle, pace: SendPace) -> SampleGroup:
    """Create the samples of a request, in a thread if many tokens have to be converted to text."""

    def create() -> SampleGroup:
        prefix = bundle.tokenizer.decode(job.request.token_ids) if job.echo else ""
        return SampleGroup(job, bundle.token_bytes, prefix, pace)

    num_echoed = len(job.request.token_ids) if job.echo else 0
    if num_echoed + job.num_received_tokens <= INLINE_TOKENS:
        return create()
    return await asyncio.to_thread(create)


def _pace_of(context: Context) -> SendPace:
    """Return how long an RPC's tokens may be held back, so that several are sent together.

    Tokens are held back only for RPCs that share one stream (`Multiplex`).
    """
    return context.pace if isinstance(context, CallContext) else AT_ONCE


def _tiers(accepted: pb.Accepted) -> dict[str, object]:
    """Return log fields with the number of prompt tokens cached in each tier, or {} if none."""
    if not accepted.cached_by_tier:
        return {}
    return {
        "prompt_tokens": accepted.prompt_tokens,
        "cached_tokens": {each.tier: each.tokens for each in accepted.cached_by_tier},
        "cached_s": {each.tier: round(each.seconds, 4) for each in accepted.cached_by_tier},
    }


def _refusal_fields(error: ServiceError) -> dict[str, object]:
    """Return the log fields of an error: its metadata and, if set, the retry delay."""
    after_s = error.retry_after_s
    return {**error.metadata, "retry_after_s": after_s} if after_s else dict(error.metadata)


def _log_end(
    served: ServedRequest, group: SampleGroup, outcome: str, failure: ServiceError | None
) -> None:
    is_refused = failure is not None and not group.num_output_tokens
    is_failed = failure is not None or outcome == "cancelled"
    fields: dict[str, object] = {
        **(_refusal_fields(failure) if failure is not None else {}),
        "outcome": outcome,
        "output_tokens": group.num_output_tokens,
        "preemptions": group.preemptions,
        "resumes": group.resumes,
        **({"resumed_inexact": True} if group.is_inexact else {}),
        "seconds": served.seconds,
    }
    served.end("refused" if is_refused else "finished", fields, error=outcome if is_failed else "")


def _stopping() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "DRAINING",
        "this engine is stopping; use another",
        retry_after_s=RETRY_AFTER_LOADING_S,
    )


def _not_scored() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "NO_ENGINE",
        "the answer ended before the log-probabilities of its prompt were complete; try again",
        retry_after_s=RETRY_AFTER_LOADING_S,
    )


def _no_token_in_time() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "DEADLINE",
        "no token was produced within the time limit; allow more time or send less",
    )
