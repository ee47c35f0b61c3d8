"""A canary beside the stable engines: which requests it gets, and what became of them.

The operator writes a small file that says which engines are the canary's and how many requests of a
hundred it gets; the router looks at it once a second, so that a step of a rollout restarts nothing.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from ullage_router.config import PoolSection, Text
from ullage_rpc.config import ConfigError, Strict, read_file
from ullage_rpc.watch import Fingerprint, fingerprint, follow

GOLDEN = 0.6180339887498949
"""(√5 - 1) / 2: its multiples fall into [0, 1) more evenly than those of any other number."""

log = logging.getLogger(__name__)


class Side(StrEnum):
    """Whose engines."""

    STABLE = "stable"
    CANARY = "canary"


class CanarySection(Strict, frozen=True, kw_only=True):
    revision: Text
    weight: Annotated[int, msgspec.Meta(ge=0, le=100)]
    """Of a hundred new requests, how many it gets."""
    step: Annotated[int, msgspec.Meta(ge=0)] = 0
    """What happens to requests is counted anew for each."""
    pools: Annotated[tuple[PoolSection, ...], msgspec.Meta(min_length=1)]
    """Each beside the configured pool of the same name."""


class RolloutFile(Strict, frozen=True, kw_only=True):
    revision: str = ""
    """Of the stable engines; empty when nobody knows."""
    canary: CanarySection | None = None


class Split:
    """Draws sides.

    Sessions are drawn by their name: the same in every router, and one that is the canary's stays
    so while the weight grows. Other requests follow a low-discrepancy sequence, the fractional
    parts of multiples of the golden ratio: the count of n draws is exact to a request or two
    however they are grouped, and no period in the traffic can hide from it.
    """

    def __init__(self, start: float) -> None:
        self._point = start

    def draw(self, weight: int, session: str, salt: str) -> Side:
        """Args:
        weight: the canary's requests of a hundred.
        session: empty when the request belongs to none.
        salt: draws sessions anew when it changes.
        """
        if session:
            digest = hashlib.blake2b(f"{salt}\0{session}".encode(), digest_size=8).digest()
            point = int.from_bytes(digest) / 2**64
        else:
            point = self._point = (self._point + GOLDEN) % 1.0
        return Side.CANARY if 100 * point < weight else Side.STABLE


class Canary:
    """What the file says now.

    Args:
        path: the file; None: there never is a canary.
        on_change: told the canary's pools, none when there is no canary, and a name that changes
            whenever outcomes are to be counted anew.
    """

    def __init__(
        self, path: str | None, on_change: Callable[[tuple[PoolSection, ...], str], None]
    ) -> None:
        self._path = Path(path) if path else None
        self._on_change = on_change
        self._file = RolloutFile()
        self._split = Split(random.random())
        self._task: asyncio.Task[None] | None = None
        self.problem = ""
        """Why the file cannot be used; what it said before holds."""

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
        """The side of a new request."""
        if (canary := self._file.canary) is None:
            return Side.STABLE
        return self._split.draw(canary.weight, session, canary.revision)

    def revision(self, side: Side) -> str:
        """Empty when it is not known."""
        if side is Side.STABLE:
            return self._file.revision
        return self._file.canary.revision if self._file.canary else ""

    @property
    def weight(self) -> int:
        return self._file.canary.weight if self._file.canary else 0

    @property
    def step(self) -> int:
        return self._file.canary.step if self._file.canary else 0

    async def _read(self) -> None:
        assert self._path is not None
        try:
            found = await asyncio.to_thread(self._load, self._path)
        except ConfigError as error:
            self.problem = str(error)
            log.error("rollout file cannot be used", extra={"reason": self.problem})
            return
        self.problem = ""
        if found != self._file:
            self._take(found)

    def _load(self, path: Path) -> RolloutFile:
        return read_file(path, RolloutFile) if path.exists() else RolloutFile()

    def _take(self, found: RolloutFile) -> None:
        self._file, canary = found, found.canary
        self._on_change(canary.pools if canary else (), trial(canary))
        log.info(
            "rollout",
            extra={
                "stable": found.revision,
                "canary": canary.revision if canary else "",
                "weight": self.weight,
            },
        )


def trial(canary: CanarySection | None) -> str:
    """Names what is being tried; nothing is while the canary gets no requests.

    The weight is no part of it: it follows the pools' sizes, and may change in the midst of a step.
    """
    return f"{canary.revision}/{canary.step}" if canary and canary.weight else ""
