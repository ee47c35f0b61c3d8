"""Builds an answer's gRPC messages from the journal and the engine's status."""

from collections.abc import Iterator

import msgspec
import numpy as np

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig
from ullage_common.wire import memory_profile
from ullage_common.wire.request_fields import known_fields
from ullage_engine.protocol.requests import EngineRequest, PromptLogprobs
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.journal import Update
from ullage_engine.server.request import ValidatedRequest
from ullage_engine.server.samples import SampleGroup
from ullage_engine.tokenizer.detokenizer import TokenBytes
from ullage_engine.tokenizer.tokenizer import ModelTokenizer

TASKS = {"generate": pb.TASK_GENERATE, "embed": pb.TASK_EMBED}
_SCORED_AT_ONCE = 256
"""Maximum number of prompt tokens whose log-probabilities one message has."""
_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "timeout": pb.FINISH_REASON_TIMEOUT,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}


def accepted(
    group: SampleGroup, engine: str, predicted_bytes: int, fingerprint: str
) -> pb.GenerateResponse:
    job = group.job
    request = group.job.request
    message = pb.Accepted(
        request_id=job.client_id,
        engine=engine,
        prompt_tokens=request.num_prompt_tokens,
        predicted_bytes=predicted_bytes,
        max_tokens=request.max_tokens,
        degraded=job.degraded,
        seed=request.sampling.seed,
        continued_tokens=job.num_received_tokens,
        prompt_token_ids=request.token_ids if job.return_token_ids else (),
        fingerprint=fingerprint,
    )
    _write_cached(group, message)
    return pb.GenerateResponse(accepted=message)


def delta(update: Update, job: ValidatedRequest, token_bytes: TokenBytes) -> pb.GenerateResponse:
    response = pb.GenerateResponse()
    message = response.delta
    message.text = update.text
    message.num_tokens = len(update.token_ids)
    if job.delta_token_ids:
        message.token_ids.extend(update.token_ids)
    if update.logprobs:
        message.logprobs.extend(_logprobs(update, token_bytes))
        message.logprobs[-1].is_end = _is_ended_by_token(update)
    if update.sample:
        message.sample = update.sample
    if update.embedding:
        message.embedding = update.embedding
    return response


def prompt_logprobs(group: SampleGroup, token_bytes: TokenBytes) -> Iterator[pb.GenerateResponse]:
    """Build the messages with the log-probabilities of the prompt's tokens, in their order.

    Each has few enough tokens to be far below the largest message.
    """
    request = group.job.request
    if request.prompt_logprobs is None:
        return

    response = pb.GenerateResponse()
    message = response.delta.prompt_logprobs
    message.tokens.append(_token(request.token_ids[0], token_bytes))
    position = 1
    for scored in group.take_prompt_logprobs():
        for entry in _scored_tokens(scored, request, token_bytes):
            if len(message.tokens) == _SCORED_AT_ONCE:
                yield response
                response = pb.GenerateResponse()
                message = response.delta.prompt_logprobs
                message.start = position
            message.tokens.append(entry)
            position += 1
    yield response


def _scored_tokens(
    scored: PromptLogprobs, request: EngineRequest, token_bytes: TokenBytes
) -> Iterator[pb.TokenLogprob]:
    count = scored.num_tokens
    logprobs = np.frombuffer(scored.logprobs, "<f4").reshape(count, -1)
    top_ids = np.frombuffer(scored.top_ids, "<i4").reshape(count, -1)
    ranks = np.frombuffer(scored.ranks, "<i4")
    for index in range(count):
        own, *top = logprobs[index].tolist()
        entry = _token(request.token_ids[scored.start + index], token_bytes)
        entry.logprob = own
        entry.rank = int(ranks[index])
        for token_id, logprob in zip(top_ids[index].tolist(), top, strict=True):
            entry.top.append(_alternative(token_id, logprob, token_bytes))
        yield entry


def _token(token_id: int, token_bytes: TokenBytes) -> pb.TokenLogprob:
    spelling = token_bytes.spelling(token_id)
    return pb.TokenLogprob(
        token_id=token_id, token=spelling.decode("utf-8", "replace"), token_bytes=spelling
    )


def sample_finished(update: Update) -> pb.GenerateResponse:
    """Build the message that ends one sample of a request with several samples."""
    assert update.finish is not None, "a sample that goes on"
    message = pb.SampleFinished(
        sample=update.sample,
        reason=_REASONS[update.finish.reason],
        stop_string=update.finish.stop_string,
    )
    return pb.GenerateResponse(sample_finished=message)


def finished(group: SampleGroup, engine_status: EngineStatus) -> pb.GenerateResponse:
    finish = group.finish
    message = pb.Finished(
        reason=_REASONS[finish.reason],
        usage=pb.Usage(
            prompt_tokens=group.job.request.num_prompt_tokens,
            completion_tokens=group.num_output_tokens,
        ),
        stop_string=finish.stop_string,
        resumes=group.resumes,
        resumed_inexact=group.is_inexact,
        preemptions=group.preemptions,
        headroom_bytes=engine_status.headroom_bytes,
    )
    _write_cached(group, message.usage)
    return pb.GenerateResponse(finished=message)


def _write_cached(group: SampleGroup, message: pb.Accepted | pb.Usage) -> None:
    """Set the message's counts of cached prompt tokens, in total and by tier."""
    first = group.entries[0]
    hits = [hit for hit in first.tier_hits if hit.num_tokens]
    message.cached_tokens = first.num_cached_tokens + sum(hit.num_tokens for hit in hits)
    if hits and first.num_cached_tokens:
        message.cached_by_tier.add(tier="device", tokens=first.num_cached_tokens)
    for hit in hits:
        message.cached_by_tier.add(tier=hit.tier, tokens=hit.num_tokens, seconds=hit.seconds)


def model_response(
    config: EngineConfig, tokenizer: ModelTokenizer, engine_status: EngineStatus
) -> pb.GetModelResponse:
    """Build the description of the loaded model."""
    ready = engine_status.ready
    assert ready is not None
    return pb.GetModelResponse(
        model=config.model.name,
        task=TASKS[ready.task],
        tokenizer_json=tokenizer.json_bytes,
        chat_template=tokenizer.chat_template,
        tool_chat_template=tokenizer.tool_chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        eos_token_ids=tokenizer.eos_token_ids,
        special_tokens=tokenizer.special_tokens,
        sampling_defaults=pb.SamplingParams(**tokenizer.sampling_defaults),
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        profile=memory_profile.to_wire(engine_status.profile),
        dtype=ready.dtype,
        add_bos=tokenizer.add_bos,
        chat_adds_bos=tokenizer.chat_adds_bos,
        created=engine_status.created,
        ranks=[pb.RankPlacement(**msgspec.structs.asdict(place)) for place in ready.ranks],
        fingerprint=ready.fingerprint.digest,
        fingerprint_facts=ready.fingerprint.facts,
        request_fields=sorted(known_fields()),
    )


def _logprobs(update: Update, token_bytes: TokenBytes) -> Iterator[pb.TokenLogprob]:
    # Either all tokens have log-probabilities, or the request did not ask for any.
    for token_id, logprobs in zip(update.token_ids, update.logprobs, strict=False):
        chosen = _alternative(token_id, logprobs.logprob, token_bytes)
        yield pb.TokenLogprob(
            token_id=token_id,
            token=chosen.token,
            token_bytes=chosen.token_bytes,
            logprob=chosen.logprob,
            top=[
                _alternative(other, logprob, token_bytes)
                for other, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            ],
        )


def _is_ended_by_token(update: Update) -> bool:
    """Return whether the last token finished the answer, rather than a stop string in its text."""
    end = update.finish
    return end is not None and end.reason == "stop" and not end.stop_string


def _alternative(token_id: int, logprob: float, token_bytes: TokenBytes) -> pb.Alternative:
    spelling = token_bytes.spelling(token_id)
    return pb.Alternative(
        token_id=token_id,
        token=spelling.decode("utf-8", "replace"),
        token_bytes=spelling,
        logprob=logprob,
    )
