"""Clients that stream ordinary answers while something goes wrong for others."""

import asyncio
import contextlib
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
MAX_TOKENS = 200


@dataclass
class Bystanders:
    """Three streams, and the texts they have without a disturbance."""

    expected: Sequence[str]
    """Texts without a disturbance. Empty if the server repeats itself not even then."""
    answers: list[Answer] = field(default_factory=list)

    def check(self, checks: Checks, name: str, max_gap_s: float) -> None:
        """Add the criteria of streams that a disturbance must not harm."""
        count = len(self.answers)
        whole = sum(answer.is_whole for answer in self.answers)
        errors = sorted({answer.error for answer in self.answers if answer.error})
        seen = f"{whole} of {count}" + (f" ({errors[0][:80]})" if errors else "")
        checks.holds(f"{name}: streams of others end well", whole == count, f"{count}", seen)

        gap = max(answer.longest_gap_s for answer in self.answers)
        checks.at_most(f"{name}: longest pause of their streams", gap, max_gap_s)
        if not self.expected:
            checks.skip(
                f"{name}: the same words", "the server's greedy answers differ without a fault, too"
            )
            return
        same = sum(
            answer.text == text for answer, text in zip(self.answers, self.expected, strict=True)
        )
        checks.holds(f"{name}: the same words", same == count, f"{count}", f"{same} of {count}")


async def expected_texts(target: Target, tokens: int = MAX_TOKENS) -> Sequence[str]:
    """Return the undisturbed texts, or nothing if two undisturbed runs differ."""
    first = await _texts(target, tokens)
    return first if first == await _texts(target, tokens) else ()


async def _texts(target: Target, tokens: int) -> list[str]:
    answers = await asyncio.gather(*(_ask(target, each, tokens) for each in QUESTIONS))
    return [answer.text for answer in answers]


@contextlib.asynccontextmanager
async def bystanders(
    target: Target, expected: Sequence[str], tokens: int = MAX_TOKENS
) -> AsyncIterator[Bystanders]:
    """Let three streams run during the block, which begins when all have text.

    Their answers are complete after the block.
    """
    begun = 0

    def count(answer: Answer) -> None:
        nonlocal begun
        begun += answer.num_pieces == BEGUN_PIECES

    crowd = Bystanders(expected)
    tasks = [asyncio.create_task(_ask(target, each, tokens, count)) for each in QUESTIONS]
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
