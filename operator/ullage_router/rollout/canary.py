"""The file that names the current canary, and the draw of a side for each request.

The operator writes a small file with the canary's engines, its percentage of requests, and the
adapters of the stable engines, since engines of a pool that sleeps cannot report theirs. The router
reads the file again within a second of a change, so that a change restarts nothing.
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
"""(√5 - 1) / 2: its multiples fall into [0, 1) more evenly than those of any other number."""

log = logging.getLogger(__name__)


class CanarySection(Strict, frozen=True, kw_only=True):
    """The canary of a rollout file."""

    revision: Text
    weight: Annotated[int, msgspec.Meta(ge=0, le=100)]
    """Percentage of new requests that the canary gets."""
    step: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The rollout's step. Outcomes start from zero with each step."""
    pools: Annotated[tuple[PoolSection, ...], msgspec.Meta(min_length=1)]
    """The canary's pools, each named like the configured pool that it belongs to."""


class RolloutFile(Strict, frozen=True, kw_only=True):
    """The file that the operator writes and the router follows."""

    revision: str = ""
    """Revision of the stable engines, or empty when it is not known."""
    adapters: tuple[Text, ...] | None = None
    """Adapters of engines that will be woken, or None if only the engines list them."""
    canary: CanarySection | None = None
    stopped: bool = False
    """Whether the service was stopped on purpose and has no engines."""


class SideDraw:
    """Draws a side for each request.

    Sessions are drawn by a hash of their name. All routers draw the same side, and a session on the
    canary stays there while the weight grows.

    Other requests follow a low-discrepancy sequence, the fractional parts of multiples of the
    golden ratio. The count of any n successive draws is exact to a request or two, and the sequence
    has no period that could match one of the traffic.

    Args:
        start: first point of the sequence, from 0 to 1.
    """

    def __init__(self, start: float) -> None:
        self._point = start

    def draw(self, weight: int, session: str, salt: str) -> Side:
        """Return the side of a new request.

        Args:
            weight: percentage of requests that the canary gets.
            session: the request's session, or empty for none.
            salt: another salt draws other sessions for the canary.
        """
        if session:
            digest = hashlib.blake2b(f"{salt}\0{session}".encode(), digest_size=8).digest()
            point = int.from_bytes(digest) / 2**64
        else:
            point = self._point = (self._point + GOLDEN) % 1.0
        return Side.CANARY if 100 * point < weight else Side.STABLE


class Canary:
    """The canary that the file currently names.

    Args:
        path: the file, or None if there is never a canary.
        on_change: called with the file's content when it changes.
    """

    def __init__(self, path: str | None, on_change: Callable[[RolloutFile], None]) -> None:
        self._path = Path(path) if path else None
        self._on_change = on_change
        self._file = RolloutFile()
        self._split = SideDraw(random.random())
        self._task: asyncio.Task[None] | None = None

        self.problem = ""
        """The reason why the file cannot be used. Its last valid content remains in use."""

    async def start(self) -> None:
        if self._path is None:
            return
        folder = self._path.parent
        seen: Fingerprint = fingerprint([folder])
        await self._read()
        self._task = asyncio.create_task(follow([folder], seen, self._read), name="follow rollout")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def draw(self, session: str) -> Side:
        """Return the side of a new request."""
        if (canary := self._file.canary) is None:
            return Side.STABLE
        return self._split.draw(canary.weight, session, canary.revision)

    def revision(self, side: Side) -> str:
        """Return the revision of a side, or empty when it is not known."""
        if side is Side.STABLE:
            return self._file.revision
        return self._file.canary.revision if self._file.canary else ""

    @property
    def is_stopped(self) -> bool:
        """Return whether the service has no engines on purpose."""
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
        except ConfigError as error:
            self.problem = str(error)
            log.error("rollout file cannot be used", extra={"reason": self.problem})
            return
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
    """Return the name of the current trial, or empty while the canary gets no requests.

    The name does not contain the weight, which follows the pools' sizes and may change during a
    step.
    """
    return f"{canary.revision}/{canary.step}" if canary and canary.weight else ""
