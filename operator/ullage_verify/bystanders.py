"""Clients that stream ordinary responses while other requests or faults disturb the server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from ullage_verify.client import ChatAnswer
from ullage_verify.criteria import Checks
from ullage_verify.kinds import KINDS
from ullage_verify.target import Target

QUESTIONS = tuple(kind.question for kind in KINDS if kind.name == "greedy")
BEGUN_PIECES = 5
"""Number of events with text that each stream must have received before the disturbance begins."""
POLL_S = 0.01
MIN_TOKENS = 200
MIN_STREAM_S = 3.0
"""Minimum duration of a stream in seconds, so that faults happen while it is running."""


@dataclass(frozen=True)
class Reference:
    """The bystanders' responses in a run without a disturbance, for comparison."""

    texts: Sequence[str]
    """Response texts by question (empty if the texts of two undisturbed runs differ)."""
    tokens: int
    """Maximum number of tokens in each response."""


@dataclass
class Bystanders:
    """Other clients' streams, which must continue unharmed during a disturbance."""

    reference: Reference
    answers: list[ChatAnswer] = field(default_factory=list)
    disturbed_at: float | None = None
    """Time of the fault on the monotonic clock, or None if requests cause the disturbance."""

    def check(self, checks: Checks, name: str, max_gap_s: float) -> None:
        """Check that the streams are complete, paused only briefly, and have the expected texts."""
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
        """Return how many responses have the same nonempty text as in the undisturbed run."""
        pairs = zip(self.answers, self.reference.texts, strict=True)
        return sum(answer.text == text != "" for answer, text in pairs)

    def _was_disturbed(self) -> bool:
        at = self.disturbed_at
        return at is None or any(a.began_at < at < a.ended_at for a in self.answers)


async def undisturbed(target: Target) -> Reference:
    """Return the responses that bystanders get without a disturbance.

    They are long enough to take at least MIN_STREAM_S, unless the model's context is too short.
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
    """Run three streams in the background while the body of the `async with` statement runs.

    The body starts once all streams have received text. When the body has ended, the streams run to
    their end, and the yielded object then contains the complete responses.
    """
    begun = 0

    def count(answer: ChatAnswer) -> None:
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


async def _ask(target: Target, question: str, tokens: int, on_text: object = None) -> ChatAnswer:
    messages = [{"role": "user", "content": question}]
    return await target.client.chat(
        target.model, messages, tokens, on_text if callable(on_text) else None, ignore_eos=True
    )
