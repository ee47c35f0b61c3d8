"""The journal of open requests, which lets a new worker continue them.

An entry holds the request as it was accepted, its seed, all tokens received so far, and the output
that has not been sent to the client yet. The unsent output is bounded by the request's max_tokens.
A client that reads slowly gets fewer but larger chunks.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from ullage_common.wire.errors import ServiceError
from ullage_common.wire.flow_control import AT_ONCE, SendPace
from ullage_engine.protocol.requests import Embedding, EngineRequest, TokenLogprobs, TokenOutput
from ullage_engine.server.request import PartialAnswer, Reason, ValidatedRequest
from ullage_engine.tokenizer.detokenizer import Detokenizer, TokenBytes


@dataclass(frozen=True, slots=True)
class Finish:
    """The finish of a request that ended without an error, with its reason."""

    reason: Reason
    stop_string: str = ""


@dataclass(slots=True)
class Update:
    """The new output of one sample since the last update."""

    sample: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: bytes = b""
    finish: Finish | None = None


class News:
    """Wakes the task that sends a request's samples, at once or when held tokens may be sent.

    `SendWindow` decides when tokens are sent. Journal entries use the `SendPace` of the RPC to
    predict that time, so that the sender does not wake up before it may send tokens.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._reader: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Timer that wakes the reader when held tokens may be sent."""

    def tell(self) -> None:
        """Wake the reader at once."""
        self._has_come = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    def tell_from(self, due: float) -> None:
        """Wake the reader at a given event loop time, or at once if that time has passed."""
        loop = asyncio.get_running_loop()
        if loop.time() >= due:
            self.tell()
        elif self._timer is None and not self._has_come:
            self._timer = loop.call_at(due, self.tell)

    def forget(self) -> None:
        """Drop news that no reader has waited for."""
        self._has_come = False

    async def wait(self, until: float) -> bool:
        """Wait for news until a time on the event loop's clock. Return whether any news arrived."""
        if not self._has_come:
            await self._woken(until)
        has_come = self._has_come
        self._has_come = False
        return has_come

    async def _woken(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        alarm = loop.call_at(until, self._wake) if until < math.inf else None
        try:
            await self._reader
        finally:
            self._reader = None
            if alarm is not None:
                alarm.cancel()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class TierHit(NamedTuple):
    """Prompt tokens of one request whose KV was found in one tier below the device."""

    tier: str
    """Name of the tier: host, remote or file."""
    num_tokens: int
    seconds: float
    """Seconds from the first query until the KV was on the device."""


class JournalEntry:
    """One sample of a request, from its acceptance to its last message."""

    def __init__(
        self,
        job: ValidatedRequest,
        token_bytes: TokenBytes,
        *,
        index: int,
        news: News,
        prefix: str,
        pace: SendPace = AT_ONCE,
    ) -> None:
        """Create the entry of one sample.

        Args:
            job: the accepted request.
            token_bytes: the bytes of each token.
            index: index of the sample in the request.
            news: wakes the sender whenever there is an update to send.
            prefix: text that begins the answer.
            pace: how long tokens may wait so that several are sent together.
        """
        self.job = job
        self.index = index
        self.output_ids: list[int] = []
        self.num_restored = 0
        """Number of output tokens that another engine generated."""
        self.total_logprob = 0.0
        """Sum of the tokens' log-probabilities, or 0 if log-probabilities are not reported."""
        self.num_cached_tokens = 0
        """Number of prompt tokens whose KV was on the device when the sample was first computed."""
        self.tier_hits: list[TierHit] = []
        """Prompt tokens whose KV was loaded from tiers below the device, one hit per tier at most.

        The list is complete before the first output.
        """
        self.finish: Finish | None = None
        self.failure: ServiceError | None = None
        self.submitted = False
        """Whether the sample was sent to the current worker."""
        self.admitted = False
        """Whether the current worker or an earlier worker has admitted the sample."""
        self.is_taken = False
        """Whether the current worker has admitted the sample."""
        self._num_tokens_here = 0
        """Number of output tokens from the current worker."""
        self.resumes = 0
        self.deaths = 0
        """Number of workers that the sample may have killed since its last decode."""
        self.lone_deaths = 0
        """Number of workers that the sample may have killed while they had no other request."""
        self.is_inexact = False
        """Whether workers with different fingerprints generated the sample's tokens."""
        self.accepted_at = time.monotonic()
        self.last_token_at: float | None = None
        self._preemptions_before = 0
        self._preemptions_now = 0
        self._detokenizer = Detokenizer(token_bytes, job.stop_strings, job.special_tokens)
        self._update = Update(text=prefix)
        self._news = news
        self._pace = pace
        self._due = 0.0
        """Time on the event loop's clock at which held tokens are sent, regardless of their number.
        """
        self._num_received = 0
        """Number of characters of the coming text that the client already has from another engine.
        """

    @property
    def key(self) -> str:
        """The sample's request id in the worker, unique in this process."""
        return self.job.request.request_id

    @property
    def request_key(self) -> str:
        """The request's key, which is the key of its first sample."""
        return self.key.removesuffix(f"#{self.index}") if self.index else self.key

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.failure is not None

    @property
    def has_begun(self) -> bool:
        """Return whether the current worker has generated a token of the sample."""
        return self._num_tokens_here > 0 and len(self.output_ids) > self.num_restored

    @property
    def has_decoded(self) -> bool:
        """Return whether the current worker has survived a decode of the sample.

        The first token comes from the prefill of the prompt and all output so far, so it does not
        prove that the worker survives a decode step.
        """
        return self._num_tokens_here > 1

    @property
    def preemptions(self) -> int:
        return self._preemptions_before + self._preemptions_now

    def restore(self, answer: PartialAnswer) -> None:
        """Restore output that the client has already received from another engine.

        A sample that has ended on the other engine is ended here, too. Any other sample is admitted
        or refused like a new sample.
        """
        prefix = self._update.text
        self._update = Update()
        self._num_received = answer.text_length
        self.num_restored = len(answer.token_ids)
        self._append_text(prefix)
        has_stopped = bool(set(answer.token_ids[-1:]) & set(self.job.request.stop_token_ids))
        self._append_tokens(answer.token_ids, [], "stop" if has_stopped else "")
        self._update = Update(text=self._update.text)
        if answer.reason:
            self.finish = Finish(answer.reason)

    def engine_request(self) -> EngineRequest:
        """Build the request for a worker: the prompt and all output received so far."""
        request = self.job.request
        return msgspec.structs.replace(
            request,
            token_ids=request.token_ids + self.output_ids,
            accepted_at=0.0 if self.output_ids else self.accepted_at,
        )

    def add_tier_hits(self, hits: list[TierHit]) -> None:
        """Record which tiers held the prompt's KV, unless the sample has been computed before."""
        if not self.output_ids and not self.resumes:
            self.tier_hits = hits
            if served := self.job.served:
                for hit in hits:
                    served.loaded(hit.tier, hit.num_tokens, hit.seconds)

    def blame(self, *, was_alone: bool) -> None:
        """Record that the sample may have killed the current worker."""
        self.deaths += 1
        self.lone_deaths += was_alone

    def resume(self) -> None:
        """Prepare the sample for the next worker. A never admitted sample counts as new."""
        self.submitted = False
        self.is_taken = False
        self._num_tokens_here = 0
        if not self.admitted:
            return

        self.resumes += 1
        self._preemptions_before = self.preemptions
        self._preemptions_now = 0

    def take(self) -> None:
        """Record that the current worker has admitted the sample."""
        self.admitted = True
        self.is_taken = True

    def on_other_fingerprint(self) -> None:
        """Record that the next worker's fingerprint differs from that of the previous worker."""
        # For tokens from another engine, the client compares the fingerprints.
        self.is_inexact |= len(self.output_ids) > self.num_restored

    def append_output(self, output: TokenOutput) -> None:
        """Append a step's output. A stop string may end the request before the worker does."""
        self.take()
        self._num_tokens_here += len(output.token_ids)
        if self.has_decoded:
            self.deaths = 0
            self.lone_deaths = 0
        self._preemptions_now = output.num_preemptions
        if not self.output_ids and not self.resumes:
            self.num_cached_tokens = output.num_cached_tokens
        self._append_tokens(output.token_ids, output.logprobs or [], output.finish)
        if len(self._update.token_ids) >= self._pace.max_tokens:
            self._news.tell()
        else:
            self._news.tell_from(self._due)

    def set_embedding(self, embedding: Embedding) -> None:
        """End the request with its embedding."""
        self.take()
        self.num_cached_tokens = embedding.num_cached_tokens
        self._update.embedding = embedding.vector
        self._finish(Finish("stop"))

    def end(self, reason: Reason) -> None:
        """End the request with its text so far, unless it has already ended."""
        if self.is_over:
            return
        piece = self._detokenizer.flush()
        self._append_text(piece.text)
        if piece.stop_string:
            self._finish(Finish("stop", piece.stop_string))
        else:
            self._finish(Finish(reason))

    def fail(self, error: ServiceError) -> None:
        """End the request with an error, unless it has already ended."""
        if not self.is_over:
            self.failure = error
            self._news.tell()

    def pop_update(self) -> Update | None:
        """Remove and return the pending update, or None. The last update has the finish reason."""
        if not self._update.token_ids and self.finish is None:
            return None
        update = self._update
        self._update = Update()
        update.finish = self.finish
        if self._pace.pause_s:
            self._due = self._pace.next_tick(asyncio.get_running_loop().time())
        return update

    def _append_tokens(
        self, token_ids: list[int], logprobs: list[TokenLogprobs], finish: Reason | Literal[""]
    ) -> None:
        last = len(token_ids) - 1
        for place, token_id in enumerate(token_ids):
            self._report(logprobs[place : place + 1])
            # The token that ends the answer counts, but it has no text.
            self._append_token(token_id, is_text=finish != "stop" or place < last)
            if self.is_over:
                return
        if finish:
            self.end(finish)

    def _report(self, logprobs: list[TokenLogprobs]) -> None:
        self._update.logprobs.extend(logprobs)
        self.total_logprob += sum(entry.logprob for entry in logprobs)

    def _append_token(self, token_id: int, is_text: bool) -> None:
        self.output_ids.append(token_id)
        self._update.token_ids.append(token_id)
        if not is_text:
            return
        piece = self._detokenizer.push(token_id)
        self._append_text(piece.text)
        if piece.stop_string:
            self._finish(Finish("stop", piece.stop_string))

    def _append_text(self, text: str) -> None:
        if self._num_received:
            num_dropped = min(self._num_received, len(text))
            self._num_received -= num_dropped
            text = text[num_dropped:]
        self._update.text += text

    def _finish(self, finish: Finish) -> None:
        self.finish = finish
        self._news.tell()


class Submission(NamedTuple):
    """Journal entries that are sent to a worker together."""

    entries: list[JournalEntry]
    resumed: bool
    """Whether an earlier worker had admitted the entries."""


def submissions(entries: Iterable[JournalEntry]) -> Iterator[Submission]:
    """Yield the entries that need a worker and were not yet sent to the current worker.

    Samples that no worker has admitted yet are sent together. The hypotheses of a beam search are
    also sent together, because they have no output before the search ends. Other samples have
    diverged, so each is sent separately.
    """
    waiting = (entry for entry in entries if not (entry.submitted or entry.is_over))
    for _, some in itertools.groupby(waiting, lambda entry: entry.request_key):
        together = list(some)
        resumed = any(entry.admitted for entry in together)
        if resumed and together[0].job.samples.beam is None:
            yield from (Submission([entry], resumed) for entry in together)
        else:
            yield Submission(together, resumed)


def in_question(entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """Return the entries that may have killed a worker, oldest first.

    A worker admits requests in order, except that a request whose grammar is being compiled may be
    overtaken. So the worker has not seen any request after the first unadmitted request without a
    grammar. Entries that the worker has decoded are considered harmless. If such an entry did kill
    the worker, the entry kills the next worker in its first decode step.
    """
    suspects: list[JournalEntry] = []
    next_key = ""

    for entry in entries:
        if entry.has_decoded:
            continue
        if not entry.is_taken and not entry.job.request.grammar:
            next_key = next_key or entry.request_key
            if entry.request_key != next_key:
                continue
        suspects.append(entry)

    return suspects


class Journal:
    """All open journal entries, oldest first."""

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, entry: JournalEntry) -> None:
        self._entries[entry.key] = entry
        self._empty.clear()

    def close(self, entry: JournalEntry) -> None:
        """Remove an entry whose client has received everything or has disconnected."""
        self._entries.pop(entry.key, None)
        if not self._entries:
            self._empty.set()

    def get(self, key: str) -> JournalEntry | None:
        """Return an open entry, or None if the entry is closed.

        A worker may send tokens of a closed entry before it reads the cancel.
        """
        return self._entries.get(key)

    def submissions(self) -> Iterator[Submission]:
        """Yield the entries that were not yet sent to the current worker, oldest first."""
        return submissions(self._entries.values())

    def unfinished(self) -> list[JournalEntry]:
        """List the entries that still need a worker, oldest first."""
        return [entry for entry in self._entries.values() if not entry.is_over]

    def end_all(self, end: Callable[[JournalEntry], None]) -> None:
        for entry in self.unfinished():
            end(entry)

    async def emptied(self, within_s: float) -> int:
        """Wait until no entry is open, at most `within_s` seconds. Return how many are open."""
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return len(self._entries)
