"""The samples of one request, merged into one stream of updates."""

import dataclasses
import math

import msgspec

from ullage_common.wire.flow_control import AT_ONCE, SendPace
from ullage_engine.server.journal import Finish, JournalEntry, News, Update
from ullage_engine.server.request import Reason, ValidatedRequest, sample_seed
from ullage_engine.tokenizer.detokenizer import TokenBytes

_WEIGHTIEST: tuple[Reason, ...] = ("cancelled", "timeout", "length", "stop")
"""Finish reasons by importance. A request gets the most important reason of its samples."""


class SampleGroup:
    """The samples of one request, from its acceptance to its last message.

    If all samples are returned, their text is sent as it is generated. In a beam search, or if
    `best_of` is above `n`, the samples are sent once all have ended, most likely first.
    """

    def __init__(
        self,
        job: ValidatedRequest,
        token_bytes: TokenBytes,
        prefix: str = "",
        pace: SendPace = AT_ONCE,
    ) -> None:
        """Create the journal entries of an accepted request.

        Args:
            job: the request.
            token_bytes: the bytes of each token.
            prefix: text that begins every answer.
            pace: how long a sample's tokens may wait so that several are sent together.
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
        else:  # Accepted is sent once a worker has admitted the unfinished samples
            self._news.forget()

    def _is_end_received(self, entry: JournalEntry) -> bool:
        received = self.job.received
        return bool(received) and received[entry.index].reason is not None

    @property
    def is_streamed(self) -> bool:
        """Return whether samples are sent as they are generated."""
        return self.job.samples.is_streamed

    @property
    def is_over(self) -> bool:
        return all(entry.is_over for entry in self.entries)

    @property
    def all_finishes_sent(self) -> bool:
        """Return whether the finish of every returned sample has been sent in an update."""
        return not self._unfinished

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens of all samples, including those not returned."""
        return sum(len(entry.output_ids) for entry in self.entries)

    @property
    def resumes(self) -> int:
        return max(entry.resumes for entry in self.entries)

    @property
    def is_inexact(self) -> bool:
        """Return whether workers with different fingerprints generated parts of any sample."""
        return any(entry.is_inexact for entry in self.entries)

    @property
    def preemptions(self) -> int:
        return sum(entry.preemptions for entry in self.entries)

    @property
    def finish(self) -> Finish:
        """Return the finish of the only sample, or the most important reason of several samples."""
        ends = [entry.finish for entry in self._returned if entry.finish]
        if len(ends) == 1:
            return ends[0]
        return Finish(min((end.reason for end in ends), key=_WEIGHTIEST.index))

    @property
    def latest(self) -> JournalEntry:
        """Return the sample that received a token most recently."""
        return max(self.entries, key=lambda entry: entry.last_token_at or 0.0)

    def end(self, reason: Reason) -> list[JournalEntry]:
        """End the unfinished samples with their text so far, and return them."""
        ended = [entry for entry in self.entries if not entry.is_over]
        for entry in ended:
            entry.end(reason)
        return ended

    async def next_updates(self, until: float = math.inf) -> list[Update] | None:
        """Wait for updates, at most until a time on the event loop's clock.

        Returns:
            The updates, or None if the wait timed out. The list may be empty. Each sample's finish
            is returned only once.

        Raises:
            ServiceError: a sample failed, so the request fails.
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
        """Return the update of one sample, with the sample's index in the client's answer."""
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
    """Return the request of one sample, with the sample's own key and seed."""
    request = job.request
    sampling = job.request.sampling
    if job.samples.is_ranked and sampling.top_logprobs is None:
        sampling = msgspec.structs.replace(sampling, top_logprobs=0)
    if index:
        key = f"{request.request_id}#{index}"
        # The session continues from the first answer.
        request = msgspec.structs.replace(request, request_id=key, session_id="")
        sampling = msgspec.structs.replace(sampling, seed=sample_seed(sampling.seed, index))
    return dataclasses.replace(job, request=msgspec.structs.replace(request, sampling=sampling))


def _mean_logprob(entry: JournalEntry) -> float:
    """Return the mean log-probability of a sample's tokens, or minus infinity without tokens."""
    count = len(entry.output_ids)
    return entry.total_logprob / count if count else -math.inf
