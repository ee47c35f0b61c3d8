"""Follows the rollout file, and picks a side (stable or canary) for each request.

The operator writes a small file that names the canary's engines and its percentage of requests. The
file also lists the stable engines' adapters, because a pool that is scaled to zero has no engines
to report them. The router rereads the file within a second of a change, without a restart.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from ullage_common.config.router import PoolSection
from ullage_common.process.config_file import ConfigError, Strict, Text, read_file
from ullage_common.process.file_watch import Fingerprint, fingerprint, follow
from ullage_router.policy.facts import Side

GOLDEN = 0.6180339887498949
"""(√5 - 1) / 2. Its multiples modulo 1 are spread more evenly than those of any other number."""

log = logging.getLogger(__name__)


class AnswersSection(Strict, frozen=True, kw_only=True):
    """Where the prompts come from whose answers are compared on both sides."""

    prompts_file: Text | None = None
    """File with one prompt per line (`prompt_file.py`), or None to take those of requests."""


class CanarySection(Strict, frozen=True, kw_only=True):
    """The section of the rollout file that describes the canary."""

    revision: Text
    weight: Annotated[int, msgspec.Meta(ge=0, le=100)]
    """Percentage of new requests that are sent to the canary."""
    step: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The current rollout step. The outcome counts are reset at each step."""
    answers: AnswersSection | None = None
    """Which answers of both sides are compared, or None to compare none."""
    pools: Annotated[tuple[PoolSection, ...], msgspec.Meta(min_length=1)]
    """The canary's pools, each named after the configured pool to which it belongs."""


class RolloutFile(Strict, frozen=True, kw_only=True):
    """Content of the rollout file, which the operator writes and the router follows."""

    revision: str = ""
    """Revision that the stable engines run (empty if unknown)."""
    adapters: tuple[Text, ...] | None = None
    """Adapters that engines will serve once woken, or None to rely on what engines report."""
    canary: CanarySection | None = None
    stopped: bool = False
    """Whether the service was stopped intentionally and has no engines."""


class SideDraw:
    """Picks a side, stable or canary, for each request.

    A session's side depends on a hash of its name. All routers therefore pick the same side, and a
    session that is on the canary stays there while the canary's weight grows.

    Other requests follow a low-discrepancy sequence: the fractional parts of multiples of the
    golden ratio. Among any n consecutive requests, the canary's count is within one or two requests
    of its exact fraction. Unlike a fixed pattern, the sequence cannot fall into step with a
    periodic pattern in the traffic.

    Args:
        start: first point of the sequence, from 0 to 1.
    """

    def __init__(self, start: float) -> None:
        self._point = start

    def draw(self, weight: int, session: str, salt: str) -> Side:
        """Pick the side for a new request.

        Args:
            weight: percentage of requests that the canary gets.
            session: the request's session (empty for none).
            salt: a string that is hashed along with the session, so that each canary gets different
                sessions.
        """
        if session:
            digest = hashlib.blake2b(f"{salt}\0{session}".encode(), digest_size=8).digest()
            point = int.from_bytes(digest) / 2**64
        else:
            point = self._point = (self._point + GOLDEN) % 1.0
        return Side.CANARY if 100 * point < weight else Side.STABLE


class Canary:
    """Follows the rollout file, and picks sides according to its current content.

    Args:
        path: path of the rollout file, or None if canaries are not configured.
        on_change: called with the file's content whenever the content changes.
    """

    def __init__(self, path: str | None, on_change: Callable[[RolloutFile], None]) -> None:
        self._path = Path(path) if path else None
        self._on_change = on_change
        self._file = RolloutFile()
        self._split = SideDraw(random.random())
        self._task: asyncio.Task[None] | None = None

        self.problem = ""
        """Why the file cannot be used (empty if it can). The last valid content remains in use."""

    async def start(self) -> None:
        """Read the file, and follow it. A file that cannot be used is read again and again."""
        if self._path is None:
            return
        folder = self._path.parent
        seen: Fingerprint | None = fingerprint([folder])
        try:
            await self._read()
        except ConfigError:
            seen = None
        following = follow([folder], seen, self._read, "rollout file cannot be used")
        self._task = asyncio.create_task(following, name="follow rollout")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def draw(self, session: str) -> Side:
        """Pick the side for a new request, based on its session if it has one."""
        if (canary := self._file.canary) is None:
            return Side.STABLE
        return self._split.draw(canary.weight, session, canary.revision)

    def revision(self, side: Side) -> str:
        """Return the revision that one side runs (empty if unknown)."""
        if side is Side.STABLE:
            return self._file.revision
        return self._file.canary.revision if self._file.canary else ""

    @property
    def is_stopped(self) -> bool:
        """Return whether the service was stopped intentionally and has no engines."""
        return self._file.stopped

    @property
    def weight(self) -> int:
        return self._file.canary.weight if self._file.canary else 0

    @property
    def step(self) -> int:
        return self._file.canary.step if self._file.canary else 0

    async def _read(self) -> None:
        assert self._path is not None
        try:
            content = await asyncio.to_thread(self._load, self._path)
        except Exception as error:
            self.problem = str(error)
            raise
        self.problem = ""
        if content != self._file:
            self._use(content)

    def _load(self, path: Path) -> RolloutFile:
        return read_file(path, RolloutFile) if path.exists() else RolloutFile()

    def _use(self, content: RolloutFile) -> None:
        self._file = content
        canary = content.canary
        self._on_change(content)
        log.info(
            "rollout",
            extra={
                "stable": content.revision,
                "canary": canary.revision if canary else "",
                "weight": self.weight,
            },
        )


def trial(canary: CanarySection | None) -> str:
    """Return a name for the current trial, which is one canary at one rollout step.

    The name is empty while the canary gets no requests. It does not include the canary's percentage
    of requests, because that depends on the pools' sizes and may change during a step.
    """
    return f"{canary.revision}/{canary.step}" if canary and canary.weight else ""
