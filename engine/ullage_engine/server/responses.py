"""The messages of an answer, and the answers to one prompt merged into one stream.

Messages are built from what the engine reports; nothing here decides anything.
"""

import dataclasses
import math
from collections.abc import Iterator

import msgspec

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig
from ullage_common.wire import memory_profile
from ullage_common.wire.flow_control import AT_ONCE, SendPace
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.journal import Finish, JournalEntry, News, Update
from ullage_engine.server.request import Reason, ValidatedRequest, sample_seed
from ullage_engine.tokenizer.detokenizer import TokenBytes
from ullage_engine.tokenizer.tokenizer import ModelTokenizer

# Of several answers' ends the one that says most about the request as a whole comes first.
_WEIGHTIEST: tuple[Reason, ...] = ("cancelled", "timeout", "length", "stop")


class SampleGroup:
    """One request's samples, from its acceptance to its last message.

    Samples that are all returned are sent as they grow. Of best_of more than n, and of a beam
    search, nothing is sent before all have ended: then the likeliest first.
    """

    def __init__(
        self,
        job: ValidatedRequest,
        token_bytes: TokenBytes,
        prefix: str = "",
        pace: SendPace = AT_ONCE,
    ) -> None:
        """
        Args:
            prefix: text that begins every answer.
            pace: how tokens of a sample wait for others.
        """
        self.job = job
        self._news = news = News()
        self.entries = [
            JournalEntry(
                _sample_job(job, i), token_bytes, index=i, news=news, prefix=prefix, pace=pace
            )
            for i in range(job.samples.num_generated)
        ]
        for entry, answer in zip(self.entries, job.received, strict=bool(job.received)):
            entry.restore(answer)
        self._returned = self.entries
        self._unfinished = [entry for entry in self.entries if not self._is_end_received(entry)]
        if self.is_over:
            self._news.tell()
        else:  # Accepted waits until a worker has admitted what is not over
            self._news.forget()

    def _is_end_received(self, entry: JournalEntry) -> bool:
        received = self.job.received
        return bool(received) and received[entry.index].reason is not None

    @property
    def is_streamed(self) -> bool:
        """Whether samples are sent while they grow."""
        return self.job.samples.is_streamed

    @property
    def is_over(self) -> bool:
        return all(entry.is_over for entry in self.entries)

    @property
    def all_finishes_sent(self) -> bool:
        """Whether every returned sample's finish has been in an update."""
        return not self._unfinished

    @property
    def num_output_tokens(self) -> int:
        """Output tokens over all samples, those not returned included."""
        return sum(len(entry.output_ids) for entry in self.entries)

    @property
    def resumes(self) -> int:
        return max(entry.resumes for entry in self.entries)

    @property
    def is_inexact(self) -> bool:
        """Whether workers with different fingerprints generated parts of a sample."""
        return any(entry.is_inexact for entry in self.entries)

    @property
    def preemptions(self) -> int:
        return sum(entry.preemptions for entry in self.entries)

    @property
    def finish(self) -> Finish:
        """How the request ended: as its only sample did, or as the weightiest end of several."""
        ends = [entry.finish for entry in self._returned if entry.finish]
        if len(ends) == 1:
            return ends[0]
        return Finish(min((end.reason for end in ends), key=_WEIGHTIEST.index))

    @property
    def latest(self) -> JournalEntry:
        """The sample whose last token is the newest."""
        return max(self.entries, key=lambda entry: entry.last_token_at or 0.0)

    def end(self, reason: Reason) -> list[JournalEntry]:
        """End the unfinished samples with their text so far and return them."""
        ended = [entry for entry in self.entries if not entry.is_over]
        for entry in ended:
            entry.end(reason)
        return ended

    async def next_updates(self, until: float = math.inf) -> list[Update] | None:
        """Wait for news and returns updates, possibly none; each finish comes once.

        None: no news came until a time on the event loop's clock.

        Raises:
            ServiceError: a sample failed, and with it the request.
        """
        if not await self._news.wait(until):
            return None
        failed = next((entry.failure for entry in self.entries if entry.failure), None)
        if failed is not None:
            raise failed
        if not self.is_streamed:
            if not self.is_over:
                return []
            self._rank()
        return [update for entry in list(self._unfinished) if (update := self._take(entry))]

    def _rank(self) -> None:
        if self.job.samples.is_ranked:
            ranked = sorted(self.entries, key=_mean_logprob, reverse=True)
            self._returned = ranked[: self.job.samples.n]
            self._unfinished = list(self._returned)

    def _take(self, entry: JournalEntry) -> Update | None:
        """Return the update of one sample, under the number by which the client knows it."""
        update = entry.pop_update()
        if update is None:
            return None
        update.sample = self._returned.index(entry)
        if self.job.request.sampling.top_logprobs is None:
            update.logprobs = []
        if update.finish:
            self._unfinished.remove(entry)
        return update


def _sample_job(job: ValidatedRequest, index: int) -> ValidatedRequest:
    """Return the request of one sample, with a key and a seed of its own."""
    request = job.request
    sampling = job.request.sampling
    if job.samples.is_ranked and sampling.top_logprobs is None:
        sampling = msgspec.structs.replace(sampling, top_logprobs=0)
    if index:
        key = f"{request.request_id}#{index}"
        # The first answer is what the session goes on from.
        request = msgspec.structs.replace(request, request_id=key, session_id="")
        sampling = msgspec.structs.replace(sampling, seed=sample_seed(sampling.seed, index))
    return dataclasses.replace(job, request=msgspec.structs.replace(request, sampling=sampling))


def _mean_logprob(entry: JournalEntry) -> float:
    """Mean log-probability of a sample's tokens under the model; without tokens, the least."""
    count = len(entry.output_ids)
    return entry.total_logprob / count if count else -math.inf


TASKS = {"generate": pb.TASK_GENERATE, "embed": pb.TASK_EMBED}
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


def sample_finished(update: Update) -> pb.GenerateResponse:
    """Build the message that ends one of several samples."""
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
    """Write where the KV of the prompt was found, which all samples share."""
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
    """Build the description of a loaded model."""
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
    )


def _logprobs(update: Update, token_bytes: TokenBytes) -> Iterator[pb.TokenLogprob]:
    # Log-probabilities are all there or, when not asked for, all missing.
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
    """Return whether the last token ended the answer, rather than a stop string in its text."""
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
