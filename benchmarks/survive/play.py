"""Plays a case with a server: starts it, lets three clients stream, and looks at what they saw."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.compare.servers import Running, Server, lives, reason_of, running
from benchmarks.support.load import ServerError
from benchmarks.survive.cases import CASES, CRASH_LOOP, Case, NotPlayedError, Scene
from benchmarks.survive.container import Container, SharedFiles, container
from benchmarks.survive.outcome import Outcome
from ullage_verify.bystanders import Reference, bystanders, undisturbed
from ullage_verify.client import ChatAnswer, OpenAIClient
from ullage_verify.processes import ServerProcesses
from ullage_verify.target import Target, TargetError, describe

GROUP = f"ullage-survive-{os.getpid()}"
PATIENCE_S = 150.0
"""Longest wait for a word, or for an answer after the case, seconds."""
START_S = 900.0
"""Seconds within which a server must have answered its first request."""
WATCH_S = 0.5
"""Seconds between two looks at /health."""
LOOK_S = 2.0
"""Seconds within which /health must answer."""
KILLS = 10
"""Number of times that a server is killed in the case crash-loop."""
SHORT_TOKENS = 96
"""Tokens of each stream whose words are not compared with an undisturbed run."""
WORST_LIMIT_BYTES = 6 << 30
"""Memory that a server may take in a case without a limit of its own."""


@dataclass(frozen=True)
class Sitting:
    """How thoroughly the cases are played."""

    logs: Path
    """Folder for the output of servers."""
    is_quick: bool = False
    """Whether streams are short and have no undisturbed run to be compared with."""
    num_kills: int = KILLS


@dataclass
class Health:
    """The times at which a server called itself healthy, on the monotonic clock."""

    good: list[float] = field(default_factory=list)

    def silent_s(self, answers: Sequence[ChatAnswer]) -> float:
        """Return for how long the server was healthy after the last word of a broken stream."""
        longest = 0.0
        for answer in answers:
            if answer.is_whole:
                continue
            since = answer.last_at or answer.began_at
            longest = max([longest, *(at - since for at in self.good if at <= answer.ended_at)])
        return longest


@contextlib.asynccontextmanager
async def watched_health(target: Target) -> AsyncIterator[Health]:
    """Look at the server's liveness again and again until the end of the block."""
    health = Health()
    # A router of Ullage has it under Kubernetes' name.
    path = "/healthz" if target.is_ullage else "/health"

    async def watch() -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    if await target.client.page(path) is not None:
                        health.good.append(time.monotonic())
            await asyncio.sleep(WATCH_S)

    task = asyncio.create_task(watch())
    try:
        yield health
    finally:
        task.cancel()


async def play(
    server: Server, name: str, started: Running, box: Container, *, is_quick: bool = False
) -> Outcome:
    """Let a case happen in the middle of three answers."""
    async with OpenAIClient(started.url, silence_s=PATIENCE_S) as client:
        target = await describe(client, server.model, server.context)
        short = Reference((), SHORT_TOKENS)
        reference = short if is_quick else await undisturbed(target)
        async with watched_health(target) as health, bystanders(target, reference) as others:
            scene = Scene(target, started, box.group)
            try:
                causes = await CASES[name].happen(scene)
            except NotPlayedError as error:
                return Outcome(server.name, name, skipped=str(error))
            hit_at = time.monotonic()

        back_s = await seconds_to_answer(target, started)
        status = "" if back_s is not None else await health_of(client)

    if not causes and all(each.is_whole and each.ended_at < hit_at for each in others.answers):
        return Outcome(server.name, name, skipped="the streams had ended before it happened")

    whole = sum(answer.is_whole for answer in others.answers)
    other_words = whole - others.num_same() if reference.texts else None
    return Outcome(
        server=server.name,
        case=name,
        cause=counted(causes),
        whole=whole,
        other_words=other_words,
        broken=len(others.answers) - whole,
        longest_pause_s=round(max(answer.longest_gap_s for answer in others.answers), 2),
        back_s=None if back_s is None else round(back_s, 1),
        health=status,
        healthy_while_silent_s=round(health.silent_s(others.answers), 1),
        errors=[answer.error for answer in others.answers if answer.error],
    )


async def seconds_to_answer(target: Target, started: Running) -> float | None:
    """Return how long the server takes to answer a new request, or None if it is too long.

    A server whose first process has ended never answers, as nothing starts it again.
    """
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S and lives(started.process):
        answer = await target.client.chat(target.model, target.prompt(1, 16), 4)
        if answer.is_whole:
            return time.monotonic() - began
        await asyncio.sleep(0.2)
    return None


async def health_of(client: OpenAIClient) -> str:
    """Return "200" if a server that answers no request still calls itself healthy."""
    return "200" if await client.page("/health") is not None else "not 200"


def counted(answers: Sequence[ChatAnswer]) -> str:
    counts = Counter(answer.outcome for answer in answers)
    if len(answers) == 1:
        return answers[0].outcome
    return ", ".join(f"{count} of {len(answers)}: {each}" for each, count in sorted(counts.items()))


@contextlib.contextmanager
def in_container(server: Server, case: Case, logs: Path) -> Iterator[tuple[Running, Container]]:
    """Run a server in a new container.

    Raises:
        ServerError: the server does not start.
    """
    with container(GROUP) as box:
        box.group.limit(WORST_LIMIT_BYTES)
        with case.surround(box), start(server, box, logs) as started:
            yield started, box


@contextlib.contextmanager
def start(server: Server, box: Container, logs: Path) -> Iterator[Running]:
    """Run a server in a container that exists. Raise a ServerError if it does not start."""
    inside = replace(server, command=lambda port: box.inside(server.command(port)))
    log = logs / f"{server.name.replace(' ', '-')}-{time.time():.0f}.log"
    with running(inside, log, START_S) as started:
        yield started


def outcomes_of(server: Server, names: Sequence[str], sitting: Sitting) -> Iterator[Outcome]:
    """Yield the outcome of each case. All cases have the server's setting.

    A server serves one case after the other while it lives, unless a case wants a new server.
    """
    waiting = list(names)
    while waiting:
        name = waiting[0]
        if name == CRASH_LOOP:
            yield crash_loop(server, sitting)
            waiting.pop(0)
            continue
        try:
            with in_container(server, CASES[name], sitting.logs) as (started, box):
                while waiting:
                    name = waiting.pop(0)
                    playing = play(server, name, started, box, is_quick=sitting.is_quick)
                    outcome = asyncio.run(playing)
                    box.group.limit(WORST_LIMIT_BYTES)
                    yield outcome
                    is_alone = CASES[name].is_alone or (waiting and CASES[waiting[0]].is_alone)
                    if outcome.back_s is None or is_alone:
                        break
        except (ServerError, TargetError) as error:
            waiting = waiting[1:] if waiting and waiting[0] == name else waiting
            yield Outcome(
                server.name,
                name,
                failure=f"does not start: {reason_of(str(error).splitlines())}",
                errors=[str(error)],
            )


def crash_loop(server: Server, sitting: Sitting) -> Outcome:
    """Kill all of a server's processes and start it again many times, with one /dev/shm."""
    num_back = -1  # before the first start
    failure = ""
    with container(GROUP) as box:
        box.group.limit(WORST_LIMIT_BYTES)
        before = box.shared_files()
        try:
            for number in range(sitting.num_kills + 1):
                with start(server, box, sitting.logs) as started:
                    num_back = number
                    if number < sitting.num_kills:
                        asyncio.run(kill_all(server, started))
        except (ServerError, TargetError) as error:
            failure = (
                f"does not start after {num_back + 1} kills: {reason_of(str(error).splitlines())}"
            )
        after = box.shared_files()

    seen = f"back {max(0, num_back)} of {sitting.num_kills} times, /dev/shm {growth(before, after)}"
    return Outcome(server.name, CRASH_LOOP, restarts=seen, failure=failure)


async def kill_all(server: Server, started: Running) -> None:
    """Send SIGKILL to all of a server's processes at once, while three clients stream."""
    async with OpenAIClient(started.url, silence_s=PATIENCE_S) as client:
        target = await describe(client, server.model, server.context)
        async with bystanders(target, Reference((), SHORT_TOKENS)):
            for pid in ServerProcesses(started.process.pid).family():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def growth(before: SharedFiles, after: SharedFiles) -> str:
    if after.count == before.count:
        return f"has {after.count} files as before"
    more_mib = (after.num_bytes - before.num_bytes) >> 20
    return f"grew by {after.count - before.count} files ({more_mib} MiB)"
