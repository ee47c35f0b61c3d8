"""Replays prompts on stable engines and on the canary, to compare their answers.

Each prompt is answered greedily by a stable engine. The canary is then asked for one token in the
place of each token of that answer (see `answers.py`). Requests are sent one at a time, with the
lowest priority, and only to engines with plenty of free memory, so that users' requests do not wait
for them. They belong to no tenant, and are not counted among the outcomes of the trial.

Prompts come from a file, or from the first requests of the trial. The latter are kept in memory
until they have been replayed or the trial ends, and are never logged.
"""

import asyncio
import logging
import random
import secrets
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

import grpc
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ullage.inference.v1 import inference_pb2
from ullage_common.canary_answers import MIN_PROMPTS, Unjudged
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import MAX_PRIORITY
from ullage_router.admission.queue import RequestQueue
from ullage_router.call import Call
from ullage_router.engines.engine import Engine
from ullage_router.engines.engines import Engines
from ullage_router.engines.flow_control import FlowControl, for_unary
from ullage_router.errors import broken_stream
from ullage_router.metric_names import ANSWERS, ANSWERS_UNJUDGED
from ullage_router.policy.facts import EngineView, Side
from ullage_router.prompts.prompts import Prompt, PromptBuilder
from ullage_router.rollout.answers import (
    MAX_MEMORY_SHARE,
    AnswerCounts,
    TokenLogprob,
    could_take,
    has_room,
    replay_bytes,
)
from ullage_router.rollout.canary import AnswersSection
from ullage_router.rollout.prompt_file import PromptFileError, read_prompts

MAX_PROMPTS = 16
"""Maximum number of prompts in a trial that are compared, or given up after engines failed."""
MAX_ANSWER_TOKENS = 16
"""Maximum number of tokens of each answer that are compared."""
MAX_SAMPLED_TOKENS = 4096
"""Maximum number of tokens of a request whose prompt is sampled."""
LIKELY_BIAS = 100.0
"""Bias that makes an engine choose a token, and so report its log-probability.

Log-probabilities are those of the model itself, without the bias.
"""
MAX_TRIES = 3
"""Number of failures after which an answer, or a token of the canary, is given up."""
MAX_ROUNDS = 3
"""Number of times that a prompt is replayed if engines are slow or away, before it is given up."""
TIMEOUT_S = 60.0
POLL_S = 0.5
"""Seconds between two looks for an engine with free memory."""
MAX_BUSY_S = 30.0
"""Maximum seconds for which a prompt waits for free memory before others are tried."""
PAUSE_S = 5.0
"""Seconds before the next attempt after a prompt, or the file of prompts, could not be used."""
_FAILURES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
"""Statuses of an engine that could not compute an answer.

An engine that is slow, full or away says nothing about its answers.
"""
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, *_FAILURES)
"""Statuses after which a prompt is not replayed again."""
_TOO_LARGE = "PROMPT_TOO_LARGE"
_WHOLE = (inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH)

Sign = Callable[[str, inference_pb2.GenerateRequest], tuple[str, str]]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A prompt that is still to be replayed."""

    request: inference_pb2.GenerateRequest
    failures: int = 0
    """Number of times that its replay has failed."""


class Replayer:
    """Compares the answers of both sides during one trial at a time.

    Args:
        engines: the engines of both sides.
        prompts: renders the prompts of a file.
        queue: the requests that wait for memory. While there are any, nothing is replayed.
        sign: returns the metadata entry with a ticket for a request to an engine, which is given by
            name. None if no engine requires tickets.

    Attributes:
        counts: the comparison so far.
        unjudged: why the comparison makes no progress (None if it does, or is complete).
    """

    def __init__(
        self,
        engines: Engines,
        prompts: PromptBuilder,
        queue: RequestQueue,
        sign: Sign | None,
    ) -> None:
        self._engines = engines
        self._prompts = prompts
        self._queue = queue
        self._sign = sign
        self._flow = for_unary(FlowControl(stall_s=TIMEOUT_S))
        self._salt = secrets.token_hex(16)
        """Cache salt of replayed requests, so that they share no cached KV with tenants."""

        self.counts = AnswerCounts()
        self.unjudged: Unjudged | None = None
        self._trial = ""
        self._section: AnswersSection | None = None
        self._task: asyncio.Task[None] | None = None
        self._uses: Counter[str] = Counter()
        """Number of prompts for which each engine was chosen, by engine key."""
        self._chosen: dict[Side, str] = {}
        """Keys of the engines that were chosen for the current prompt."""

        self._sampled: deque[_Pending] = deque()
        self._seen: set[int] = set()
        """Hashes of the prompts that have been sampled."""
        self._has_sampled = asyncio.Event()

    @property
    def trial(self) -> str:
        """Name of the trial whose answers are compared (empty if none are)."""
        return self._trial if self._section else ""

    def follow(self, trial: str, section: AnswersSection | None) -> None:
        """Start over if the trial or the source of prompts has changed.

        Args:
            trial: name of the trial (empty while the canary gets no requests).
            section: where the prompts come from, or None to compare no answers.
        """
        section = section if trial else None
        if (trial, section) == (self._trial, self._section):
            return
        if self._task:
            self._task.cancel()
            self._task = None
        self._trial = trial
        self._section = section
        self.counts = AnswerCounts()
        self.unjudged = None
        self._uses.clear()
        self._sampled.clear()
        self._seen.clear()
        self._has_sampled.clear()
        if section:
            self._task = asyncio.create_task(self._run(section), name="replay prompts")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def offer(self, call: Call, prompt: Prompt) -> None:
        """Keep a request's prompt for the comparison, if prompts are sampled and one is missing.

        Prompts that are too large to be replayed are not kept.
        """
        section = self._section
        if section is None or section.prompts_file:
            return
        if len(self._sampled) + _num_done(self.counts) >= MAX_PROMPTS:
            return
        num_tokens = len(prompt.token_ids)
        if call.adapter or call.request.embed or num_tokens > MAX_SAMPLED_TOKENS:
            return
        ready = self._ready_engines()
        able = _able(ready, num_tokens + MAX_ANSWER_TOKENS)
        if {engine.side for engine, _ in able} != {engine.side for engine in ready}:
            return
        token_ids = array("I", prompt.token_ids)
        key = hash(token_ids.tobytes())
        if key not in self._seen:
            self._seen.add(key)
            request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=token_ids))
            self._sampled.append(_Pending(request))
            self._has_sampled.set()

    def as_json(self) -> dict[str, object]:
        """Return the comparison for /stats."""
        counts = self.counts
        return {
            "prompts": counts.prompts,
            "tokens": counts.tokens,
            "agreed": counts.agreed,
            "canary_nll": round(counts.canary_nll, 4),
            "stable_nll": round(counts.stable_nll, 4),
            "refused": counts.refused,
            "unjudged": self.unjudged,
        }

    async def _run(self, section: AnswersSection) -> None:
        counts = self.counts  # those of this trial, even if the next one has begun
        try:
            if section.prompts_file:
                await self._replay_file(Path(section.prompts_file), counts)
            else:
                await self._replay_samples(counts)
        except Exception:  # a bug here must not end the router
            log.exception("answers of the canary are no longer compared")
            self.unjudged = Unjudged.FAILING
        else:
            self.unjudged = Unjudged.FAILING if counts.prompts < MIN_PROMPTS else None

    async def _replay_file(self, path: Path, counts: AnswerCounts) -> None:
        requests = await self._read(path)
        random.shuffle(requests)
        waiting: deque[_Pending] = deque()
        while True:
            missing = MAX_PROMPTS - _num_done(counts) - len(waiting)
            waiting.extend(map(_Pending, requests[:missing]))
            del requests[:missing]
            if not waiting:
                return
            await self._replay_first(waiting, counts)

    async def _replay_samples(self, counts: AnswerCounts) -> None:
        while _num_done(counts) < MAX_PROMPTS:
            if not self._sampled:
                if self.unjudged is not Unjudged.FAILING:
                    self.unjudged = Unjudged.FEW_PROMPTS
                self._has_sampled.clear()
                await self._has_sampled.wait()
            await self._replay_first(self._sampled, counts)

    async def _replay_first(self, waiting: deque[_Pending], counts: AnswerCounts) -> None:
        """Replay the first prompt. Remove it if it is done with, or else put it last."""
        if await self._compare(waiting[0], counts):  # it counts as sampled until it is done with
            waiting.popleft()
        else:
            waiting.rotate(-1)
            await asyncio.sleep(PAUSE_S)

    async def _read(self, path: Path) -> list[inference_pb2.GenerateRequest]:
        """Read the file of prompts, waiting until it is usable."""
        reported = ""
        while True:
            try:
                requests = await asyncio.to_thread(read_prompts, path)
            except PromptFileError as error:
                self.unjudged = Unjudged.UNUSABLE_PROMPTS
                if str(error) != reported:
                    log.error("prompts cannot be used", extra={"reason": str(error)})
                reported = str(error)
                await asyncio.sleep(PAUSE_S)
            else:
                self.unjudged = None
                return requests

    async def _compare(self, pending: _Pending, counts: AnswerCounts) -> bool:
        """Answer a prompt on a stable engine, and compare the canary's tokens with the answer.

        Returns:
            Whether the prompt is done with: it has been compared, or is given up.
        """
        self._chosen.clear()
        try:
            engine = await self._engine(Side.STABLE, 0, 0)
            assert engine.model
            prompt = await self._prompts.build(engine.model, pending.request, "")
            token_ids = list(prompt.token_ids)
            answer = await self._ask(Side.STABLE, token_ids, MAX_ANSWER_TOKENS)
            canary_answer = await self._canary_logprobs(answer, token_ids)
        except ServiceError as error:
            log.info("a prompt was not replayed", extra={"reason": error.reason})
            return self._is_given_up(pending, error, counts)
        counts.add_answer(zip_longest(answer, canary_answer))
        self.unjudged = None
        return True

    def _is_given_up(self, pending: _Pending, error: ServiceError, counts: AnswerCounts) -> bool:
        """Return whether a prompt is not replayed again after a failure, and count it if so.

        Prompts that are too large for the engines are not counted, so that others take their place.
        """
        if error.reason == _TOO_LARGE:
            return True
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self.unjudged = Unjudged.ENGINES_BUSY
            return False
        self.unjudged = Unjudged.FAILING
        pending.failures += 1
        if error.code not in _REFUSALS and pending.failures < MAX_ROUNDS:
            return False
        counts.refused += 1
        return True

    async def _canary_logprobs(
        self, answer: Sequence[TokenLogprob], prompt: Sequence[int]
    ) -> list[TokenLogprob]:
        """Return what the canary says in the place of each token of a stable answer.

        The result ends early if the canary cannot compute it.

        Raises:
            ServiceError: the canary could not answer for a reason that is not its fault.
        """
        canary_answer: list[TokenLogprob] = []
        token_ids = list(prompt)
        try:
            for token in answer:
                [position] = await self._ask(Side.CANARY, token_ids, 1, token.token_id)
                canary_answer.append(position)
                token_ids.append(token.token_id)
        except ServiceError as error:
            if error.code not in _FAILURES:
                raise
            log.warning("the canary fails on a prompt", extra={"reason": error.reason})
        return canary_answer

    async def _ask(
        self, side: Side, token_ids: Sequence[int], max_tokens: int, forced: int | None = None
    ) -> list[TokenLogprob]:
        """Return the next tokens of one side, with their log-probabilities.

        Args:
            side: the side to ask.
            token_ids: the tokens that precede them.
            max_tokens: maximum number of tokens.
            forced: token whose log-probability is wanted, or None for the likeliest tokens.

        Raises:
            ServiceError: the request is refused, or the last of MAX_TRIES attempts has failed.
        """
        request = inference_pb2.GenerateRequest(
            request_id=f"replay-{secrets.token_hex(8)}",
            token_ids=inference_pb2.TokenIds(ids=token_ids),
            sampling=inference_pb2.SamplingParams(temperature=0.0),
            # Engines learn the usual length of answers from those that end by themselves.
            stop=inference_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=forced is not None),
            output=inference_pb2.OutputOptions(top_logprobs=1),
            cache_salt=self._salt,
            priority=-MAX_PRIORITY,
        )
        if forced is not None:
            request.sampling.logit_bias[forced] = LIKELY_BIAS

        for tries in range(1, MAX_TRIES + 1):
            engine = await self._engine(side, len(token_ids), max_tokens)
            try:
                return await self._generate(engine, request)
            except ServiceError as error:
                if error.code is grpc.StatusCode.INVALID_ARGUMENT or tries == MAX_TRIES:
                    raise
                log.info("a replay failed", extra={"engine": engine.id, "reason": error.reason})
            # A worker that was lost takes seconds to come back, and its engine to say so.
            await asyncio.sleep(POLL_S * 2**tries)
        raise AssertionError("the last attempt returns or raises")

    async def _engine(self, side: Side, num_tokens: int, max_tokens: int) -> Engine:
        """Wait for an engine of one side with plenty of free memory.

        Raises:
            ServiceError: the request is too large, or engines are busy for MAX_BUSY_S.
        """
        busy_until = time.monotonic() + MAX_BUSY_S
        while isinstance(chosen := self._choose(side, num_tokens + max_tokens), Unjudged):
            self.unjudged = chosen
            if chosen is not Unjudged.ENGINES_BUSY:
                busy_until = time.monotonic() + MAX_BUSY_S
            elif time.monotonic() >= busy_until:
                message = f"no engine had plenty of free memory for {MAX_BUSY_S:g} s"
                raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "ENGINES_BUSY", message)
            await asyncio.sleep(POLL_S)
        if self.unjudged is not Unjudged.FAILING:  # which lasts until a prompt is compared
            self.unjudged = None
        if self._chosen.get(side) != chosen.key:
            self._chosen[side] = chosen.key
            self._uses[chosen.key] += 1
        return chosen

    def _choose(self, side: Side, num_tokens: int) -> Engine | Unjudged:
        """Return the engine to ask, or why there is none.

        Args:
            side: the side to ask.
            num_tokens: number of tokens of the prompt and the answer.

        Raises:
            ServiceError: one side has no engine that could ever take that many tokens.
        """
        ready = self._ready_engines()
        sides = {each.side for each in ready}
        if Side.STABLE not in sides:
            return Unjudged.NO_STABLE_ENGINE
        if Side.CANARY not in sides:
            return Unjudged.NO_CANARY_ENGINE
        if len({each.fingerprint for each in ready}) > 1:
            return Unjudged.OTHER_TOKENIZER
        if len(self._queue):
            return Unjudged.ENGINES_BUSY

        able = _able(ready, num_tokens)
        if {each.side for each, _ in able} != sides:
            message = (
                f"prompt and answer have {num_tokens} tokens, more than an engine takes or than "
                f"{MAX_MEMORY_SHARE:.0%} of its memory hold; give shorter prompts"
            )
            raise invalid("prompt", message, _TOO_LARGE)
        own = [(each, view) for each, view in able if each.side is side]
        free = [each for each, view in own if not each.is_on_trial and has_room(view, num_tokens)]
        if not free:
            return Unjudged.ENGINES_BUSY
        # An engine that has the beginning of the answer in its cache goes on with it.
        chosen = self._chosen.get(side)
        return min(free, key=lambda each: (each.key != chosen, self._uses[each.key], each.load))

    def _ready_engines(self) -> list[Engine]:
        return [e for e in self._engines.all() if e.state == "ready" and e.breaker.is_closed]

    async def _generate(
        self, engine: Engine, request: inference_pb2.GenerateRequest
    ) -> list[TokenLogprob]:
        """Send a request to an engine, and return the answer's tokens with log-probabilities.

        Raises:
            ServiceError: the engine refused or failed.
        """
        metadata = (self._sign(engine.id, request),) if self._sign else ()
        view = engine.view(time.monotonic())
        num_tokens = len(request.token_ids.ids)
        size = replay_bytes(view, num_tokens + request.stop.max_tokens) if view else 0
        credit = engine.reserve(size, num_tokens)
        source = None
        tokens: list[TokenLogprob] = []
        try:
            source = engine.generate(request, TIMEOUT_S, metadata, self._flow)
            engine.watchdog.watch(source)
            while event := await source.read():
                if event.HasField("accepted"):
                    engine.on_accepted(credit)
                elif event.HasField("delta"):
                    tokens += event.delta.logprobs
                elif event.finished.reason not in _WHOLE:
                    raise broken_stream("the engine cut the answer short")
            if not tokens:
                raise invalid("top_logprobs", "the engine gave no log-probabilities")
            return tokens
        finally:
            if source:
                engine.watchdog.forget(source)
                source.cancel()
            engine.release(credit)


def _num_done(counts: AnswerCounts) -> int:
    """Return the number of prompts that have been compared or given up."""
    return counts.prompts + counts.refused


def _able(engines: Iterable[Engine], num_tokens: int) -> list[tuple[Engine, EngineView]]:
    """Return the engines that could replay so many tokens if they were idle."""
    now = time.monotonic()
    views = ((each, each.view(now)) for each in engines)
    return [(each, view) for each, view in views if view and could_take(view, num_tokens)]


class AnswersCollector(Collector):
    """Exports the comparison of the current trial as Prometheus metrics for the operator."""

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer

    def collect(self) -> Iterator[GaugeMetricFamily]:
        trial = self._replayer.trial
        if not trial:
            return
        family = ANSWERS.family()
        for name, value in asdict(self._replayer.counts).items():
            family.add_metric([trial, name], value)
        yield family
        unjudged = ANSWERS_UNJUDGED.family()
        if reason := self._replayer.unjudged:
            unjudged.add_metric([trial, reason], 1)
        yield unjudged

    def describe(self) -> list[GaugeMetricFamily]:
        return []
