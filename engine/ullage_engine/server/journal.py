"""The journal of open requests, from which a new worker goes on with them.

An entry holds the request as it was accepted, with its seed, every token received so far, and the
part that the client has not been sent yet. The unsent part is bounded by the request's max_tokens.
A client that reads slowly gets it in fewer, larger pieces.
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
    """The regular end of a request, with its reason."""

    reason: Reason
    stop_string: str = ""


@dataclass(slots=True)
class Update:
    """News for the client of one sample since the last update."""

    sample: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: bytes = b""
    finish: Finish | None = None


class News:
    """Wakes the sender of a request's samples, at once or when tokens that wait for others may
    leave.

    `SendWindow` decides when tokens leave. Entries predict that time by the call's `SendPace`, so
    that the sender is not woken to make a delta that would wait there.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._reader: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Wakes the reader for tokens that waited."""

    def tell(self) -> None:
        """Wake the reader now."""
        self._has_come = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    def tell_from(self, due: float) -> None:
        """Wake the reader at a time on the event loop's clock, or now if that has passed."""
        loop = asyncio.get_running_loop()
        if loop.time() >= due:
            self.tell()
        elif self._timer is None and not self._has_come:
            self._timer = loop.call_at(due, self.tell)

    def forget(self) -> None:
        """Drop news that no reader has waited for."""
        self._has_come = False

    async def wait(self, until: float) -> bool:
        """Wait for news, at most until a time on the event loop's clock; return whether there is
        any.
        """
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
    """Prompt tokens of one request whose KV one tier below the device had."""

    tier: str
    """host, remote or file."""
    num_tokens: int
    seconds: float
    """Seconds from the first query until their KV was on the device."""


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
        """Args:
        job: the accepted request.
        token_bytes: the spelling of each token.
        index: number of the sample among the request's.
        news: woken whenever there is an update to send.
        prefix: text that begins the answer.
        pace: how tokens wait for others.
        """
        self.job = job
        self.index = index
        self.output_ids: list[int] = []
        self.num_restored = 0
        """Output tokens that came from another engine."""
        self.total_logprob = 0.0
        """Sum of log-probabilities over its tokens; 0 unless they are reported."""
        self.num_cached_tokens = 0
        """Prompt tokens whose KV was on the device when the sample was first computed."""
        self.tier_hits: list[TierHit] = []
        """Prompt tokens whose KV was loaded from below the device, at most once a tier; complete
        before the first output."""
        self.finish: Finish | None = None
        self.failure: ServiceError | None = None
        self.submitted = False
        """Whether the present worker has been sent the sample."""
        self.admitted = False
        """Whether a worker, this one or one before, has admitted the sample."""
        self.is_taken = False
        """Whether the present worker has admitted the sample."""
        self._num_tokens_here = 0
        """Output tokens that the present worker has given."""
        self.resumes = 0
        self.deaths = 0
        """Workers since the last decode that may have died of the sample."""
        self.lone_deaths = 0
        """Those of them that had no other request."""
        self.is_inexact = False
        """Whether workers with different fingerprints generated its tokens."""
        self.accepted_at = time.monotonic()
        self.last_token_at: float | None = None
        self._preemptions_before = 0
        self._preemptions_now = 0
        self._detokenizer = Detokenizer(token_bytes, job.stop_strings, job.special_tokens)
        self._update = Update(text=prefix)
        self._news = news
        self._pace = pace
        self._due = 0.0
        """Time on the event loop's clock at which new tokens leave, however few."""
        self._num_received = 0
        """Characters of the coming text that the client has already, from another engine."""

    @property
    def key(self) -> str:
        """The sample's request id towards the worker, unique in this process."""
        return self.job.request.request_id

    @property
    def request_key(self) -> str:
        """The key that all samples of the request share: the first one's."""
        return self.key.removesuffix(f"#{self.index}") if self.index else self.key

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.failure is not None

    @property
    def has_begun(self) -> bool:
        """Whether a token has come since it was sent to the newest worker."""
        return self._num_tokens_here > 0 and len(self.output_ids) > self.num_restored

    @property
    def has_decoded(self) -> bool:
        """Whether the present worker has survived a decode of the sample.

        A worker gives the first token for the prompt, with all output so far, which is no proof
        that it survives the steps of single tokens that follow.
        """
        return self._num_tokens_here > 1

    @property
    def preemptions(self) -> int:
        return self._preemptions_before + self._preemptions_now

    def restore(self, answer: PartialAnswer) -> None:
        """Begin with output that the client has from another engine.

        A sample that had ended there has ended here, too. Any other sample is admitted or refused
        like a new one.
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
        """Record the tiers of the prompt's KV, unless the sample was computed already."""
        if not self.output_ids and not self.resumes:
            self.tier_hits = hits
            if served := self.job.served:
                for hit in hits:
                    served.loaded(hit.tier, hit.num_tokens, hit.seconds)

    def blame(self, *, was_alone: bool) -> None:
        """Count the death of the present worker, which may have died of the sample."""
        self.deaths += 1
        self.lone_deaths += was_alone

    def resume(self) -> None:
        """Prepare the sample for the next worker, as new if no worker ever admitted it."""
        self.submitted = False
        self.is_taken = False
        self._num_tokens_here = 0
        if not self.admitted:
            return

        self.resumes += 1
        self._preemptions_before = self.preemptions
        self._preemptions_now = 0

    def take(self) -> None:
        """Note that the present worker has admitted the sample."""
        self.admitted = True
        self.is_taken = True

    def on_other_fingerprint(self) -> None:
        """Record that the next worker has another fingerprint than the workers before it."""
        # Of tokens from another engine, its reader compares the fingerprints.
        self.is_inexact |= len(self.output_ids) > self.num_restored

    def append_output(self, output: TokenOutput) -> None:
        """Append a step's output; a stop string may end the request before the worker does."""
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
        """End the request with the embedding that it asked for."""
        self.take()
        self.num_cached_tokens = embedding.num_cached_tokens
        self._update.embedding = embedding.vector
        self._finish(Finish("stop"))

    def end(self, reason: Reason) -> None:
        """End the request with its text so far; do nothing if it is over."""
        if self.is_over:
            return
        piece = self._detokenizer.flush()
        self._append_text(piece.text)
        if piece.stop_string:
            self._finish(Finish("stop", piece.stop_string))
        else:
            self._finish(Finish(reason))

    def fail(self, error: ServiceError) -> None:
        """End the request with an error; do nothing if it is over."""
        if not self.is_over:
            self.failure = error
            self._news.tell()

    def pop_update(self) -> Update | None:
        """Remove and return the update, with the finish if the sample has ended; None: no news."""
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
            # The token that ends the answer is counted, but it is not text.
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
    """Entries that are sent to a worker together."""

    entries: list[JournalEntry]
    resumed: bool
    """Whether a former worker had admitted them."""


def submissions(entries: Iterable[JournalEntry]) -> Iterator[Submission]:
    """Yield the entries that need a worker and were not sent to the present one.

    Samples that no worker has admitted yet go together, and so do the hypotheses of a beam search,
    which have no output before its end. Other samples have diverged: each goes by itself.
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
    """Return the entries that a worker may have died of, oldest first.

    A worker takes requests in their order. It has seen none behind the first that it did not admit,
    except for requests whose grammar was being compiled. Entries that it decoded were harmless so
    far. If it did die of one of them, the next worker dies of that one at its first decode.
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
    """All open entries, oldest first."""

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
        """Remove an entry whose client has been sent everything or has gone."""
        self._entries.pop(entry.key, None)
        if not self._entries:
            self._empty.set()

    def get(self, key: str) -> JournalEntry | None:
        """Return an open entry; None: it is closed, as after a cancel that crossed its tokens."""
        return self._entries.get(key)

    def submissions(self) -> Iterator[Submission]:
        """Yield the entries that the present worker has not been sent, oldest first."""
        return submissions(self._entries.values())

    def unfinished(self) -> list[JournalEntry]:
        """List the entries that still need a worker, oldest first."""
        return [entry for entry in self._entries.values() if not entry.is_over]

    def end_all(self, end: Callable[[JournalEntry], None]) -> None:
        for entry in self.unfinished():
            end(entry)

    async def emptied(self, within_s: float) -> int:
        """Wait until no entry is open; return the number of open entries when the time is up."""
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return len(self._entries)
