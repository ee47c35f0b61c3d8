"""The answers to one prompt as one stream: an entry of the journal each, one end for all."""

import asyncio
import dataclasses
import math

import msgspec

from ullage_engine.detokenizer import TokenBytes
from ullage_engine.server.job import Job
from ullage_engine.server.journal import Entry, Finish, Reason, Update
from ullage_engine.server.sample_plan import sample_seed

# Of several answers' ends the one that says most about the request as a whole comes first.
_WEIGHTIEST: tuple[Reason, ...] = ("cancelled", "timeout", "length", "stop")


class SampleGroup:
    """One request's samples, from its acceptance to its last message.

    Samples that are all returned are told as they grow. Of best_of more than n, and of a beam
    search, nothing is told before all have ended: then the likeliest first.
    """

    def __init__(self, job: Job, token_bytes: TokenBytes, prefix: str = "") -> None:
        """
        Args:
            prefix: text that begins every answer.
        """
        self.job = job
        self._news = asyncio.Event()
        self.entries = [
            Entry(_sample_job(job, i), token_bytes, index=i, news=self._news, prefix=prefix)
            for i in range(job.samples.num_generated)
        ]
        self._returned = self.entries
        self._untold = list(self.entries)

    @property
    def is_over(self) -> bool:
        return all(entry.is_over for entry in self.entries)

    @property
    def is_told(self) -> bool:
        """Every returned sample's finish has been in an update."""
        return not self._untold

    @property
    def num_output_tokens(self) -> int:
        """Over all samples, those not returned included."""
        return sum(len(entry.output_ids) for entry in self.entries)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was there before the request."""
        return self.entries[0].num_cached_tokens

    @property
    def resumes(self) -> int:
        return max(entry.resumes for entry in self.entries)

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
    def latest(self) -> Entry:
        """The sample that got its last token last."""
        return max(self.entries, key=lambda entry: entry.last_token_at or 0.0)

    def end(self, reason: Reason) -> list[Entry]:
        """Ends the samples that go on, with their text so far; which those were."""
        ended = [entry for entry in self.entries if not entry.is_over]
        for entry in ended:
            entry.end(reason)
        return ended

    async def next_updates(self) -> list[Update]:
        """Waits for news, which may be none that is told yet; each finish comes once.

        Raises:
            ServiceError: a sample failed, and with it the request.
        """
        await self._news.wait()
        self._news.clear()
        failed = next((entry.failure for entry in self.entries if entry.failure), None)
        if failed is not None:
            raise failed
        if not self.job.samples.is_streamed:
            if not self.is_over:
                return []
            self._rank()
        return [update for entry in list(self._untold) if (update := self._take(entry))]

    def _rank(self) -> None:
        if self.job.samples.is_ranked:
            ranked = sorted(self.entries, key=_mean_logprob, reverse=True)
            self._returned = ranked[: self.job.samples.n]
            self._untold = list(self._returned)

    def _take(self, entry: Entry) -> Update | None:
        """What is new of one sample, under the number by which the client knows it."""
        update = entry.take_update()
        if update is None:
            return None
        update.sample = self._returned.index(entry)
        if self.job.request.sampling.top_logprobs is None:
            update.logprobs = []
        if update.finish:
            self._untold.remove(entry)
        return update


def _sample_job(job: Job, index: int) -> Job:
    """The job of one sample: a key and a seed of its own."""
    request, sampling = job.request, job.request.sampling
    if job.samples.is_ranked and sampling.top_logprobs is None:
        sampling = msgspec.structs.replace(sampling, top_logprobs=0)
    if index:
        key = f"{request.request_id}#{index}"
        # The first answer is what the session goes on from.
        request = msgspec.structs.replace(request, request_id=key, session_id="")
        sampling = msgspec.structs.replace(sampling, seed=sample_seed(sampling.seed, index))
    return dataclasses.replace(job, request=msgspec.structs.replace(request, sampling=sampling))


def _mean_logprob(entry: Entry) -> float:
    """Of its tokens, under the model itself; one that has none is the least likely."""
    count = len(entry.output_ids)
    return entry.total_logprob / count if count else -math.inf
