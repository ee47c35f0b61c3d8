"""Clients that stream ordinary answers while something goes wrong for others."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from ullage_verify.client import Answer
from ullage_verify.criteria import Checks
from ullage_verify.kinds import KINDS
from ullage_verify.target import Target

QUESTIONS = tuple(kind.question for kind in KINDS if kind.name == "greedy")
BEGUN_PIECES = 5
"""Events with text that each stream has before the disturbance begins."""
POLL_S = 0.01
MIN_TOKENS = 200
MIN_STREAM_S = 3.0
"""Least duration of a stream, so that faults fall into its middle."""


@dataclass(frozen=True)
class Reference:
    """The bystanders' answers without a disturbance."""

    texts: Sequence[str]
    """The texts, or empty if two undisturbed runs differ."""
    tokens: int
    """Number of tokens in each answer."""


@dataclass
class Bystanders:
    """Streams of other clients, which a disturbance must not harm."""

    reference: Reference
    answers: list[Answer] = field(default_factory=list)
    disturbed_at: float | None = None
    """Moment of a fault, which must be in the middle of the streams. None: requests disturb."""

    def check(self, checks: Checks, name: str, max_gap_s: float) -> None:
        """Add the criteria of streams that a disturbance must not harm."""
        if not self._was_disturbed():
            checks.skip(name, "the streams of others had ended before it happened")
            return
        count = len(self.answers)
        whole = sum(answer.is_whole for answer in self.answers)
        errors = sorted({answer.error for answer in self.answers if answer.error})
        seen = f"{whole} of {count}" + (f" ({errors[0][:80]})" if errors else "")
        checks.holds(f"{name}: streams of others end well", whole == count, f"{count}", seen)

        gap = max(answer.longest_gap_s for answer in self.answers)
        checks.at_most(f"{name}: longest pause of their streams", gap, max_gap_s)
        if not self.reference.texts:
            checks.skip(
                f"{name}: the same words", "the server's greedy answers differ without a fault, too"
            )
            return
        same = self.num_same()
        checks.holds(f"{name}: the same words", same == count, f"{count}", f"{same} of {count}")

    def num_same(self) -> int:
        """Return how many answers have the words of the undisturbed run, at least one word."""
        pairs = zip(self.answers, self.reference.texts, strict=True)
        return sum(answer.text == text != "" for answer, text in pairs)

    def _was_disturbed(self) -> bool:
        at = self.disturbed_at
        return at is None or any(a.began_at < at < a.ended_at for a in self.answers)


async def undisturbed(target: Target) -> Reference:
    """Return the answers that bystanders get without a disturbance.

    Their streams take at least MIN_STREAM_S, as far as the context allows it.
    """
    began = time.monotonic()
    await _texts(target, MIN_TOKENS)
    took = max(time.monotonic() - began, POLL_S)
    tokens = min(max(MIN_TOKENS, int(MIN_TOKENS * MIN_STREAM_S / took)), target.usable // 2)

    first = await _texts(target, tokens)
    return Reference(first if first == await _texts(target, tokens) else (), tokens)


async def _texts(target: Target, tokens: int) -> list[str]:
    answers = await asyncio.gather(*(_ask(target, each, tokens) for each in QUESTIONS))
    return [answer.text for answer in answers]


@contextlib.asynccontextmanager
async def bystanders(target: Target, reference: Reference) -> AsyncIterator[Bystanders]:
    """Let three streams run during the block, which begins when all have text.

    Their answers are complete after the block.
    """
    begun = 0

    def count(answer: Answer) -> None:
        nonlocal begun
        begun += answer.num_pieces == BEGUN_PIECES

    crowd = Bystanders(reference)
    tasks = [asyncio.create_task(_ask(target, each, reference.tokens, count)) for each in QUESTIONS]
    try:
        while begun < len(tasks) and not any(task.done() for task in tasks):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        yield crowd
        crowd.answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _ask(target: Target, question: str, tokens: int, on_text: object = None) -> Answer:
    messages = [{"role": "user", "content": question}]
    return await target.client.chat(
        target.model, messages, tokens, on_text if callable(on_text) else None, ignore_eos=True
    )
