"""Injects faults while responses are streaming, and checks that streams and server recover."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import NamedTuple

from ullage_verify.bystanders import Reference, bystanders, undisturbed
from ullage_verify.client import ChatAnswer
from ullage_verify.criteria import Checks
from ullage_verify.faults import Fault
from ullage_verify.processes import ServerProcesses
from ullage_verify.scenarios import marathon
from ullage_verify.scenarios.settings import ScenarioSettings
from ullage_verify.shared_files import SharedFiles, SharedUse
from ullage_verify.target import Target, TargetError

BACK_WITHIN_S = 30.0
"""Seconds after the end of a fault within which the server must have completed a request."""
PATIENCE_S = 120.0
"""Seconds without a complete response after which a server counts as dead."""
RETRY_S = 0.2
NUM_IN_A_ROW = 3
HEALTH = "/health of a server that did not come back"
"""Name of the criterion for the probe of a dead server."""
HEALTHY = 200
NOT_FOUND = 404
SETTLE_S = 3.0
SHARED_FILES = "files of the server in /dev/shm after all faults"
"""Name of the criterion for files that killed processes leave, as in vllm#54002 and #57303."""
SHARED_FILES_WITHIN_S = 10.0
"""Seconds within which the files of killed processes must be gone."""
SHARED_GROWTH_SHARE = 0.05
"""Maximum growth of the bytes in /dev/shm, as a fraction of the bytes before the faults."""


class Recovery(NamedTuple):
    """The last request that was sent after a fault to see whether the server is back."""

    answer: ChatAnswer
    seconds: float
    """Time from the end of the fault to the end of the request, in seconds."""


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Inject each fault while three streams run, and then one fault three times in a row."""
    for name, reason in settings.missing_faults.items():
        checks.skip(name, reason)
    if not settings.faults:
        checks.skip("faults", "none may be made; give an option such as --pid or --pod")
        return

    reference = await undisturbed(target)
    if settings.processes:
        async with _checked_shared_files(settings.processes, checks) as noted:
            faults = {name: noted(fault) for name, fault in settings.faults.items()}
            await _inject_all(target, replace(settings, faults=faults), checks, reference)
    else:
        await _inject_all(target, settings, checks, reference)


async def _inject_all(
    target: Target, settings: ScenarioSettings, checks: Checks, reference: Reference
) -> None:
    possible: dict[str, Fault] = {}
    for name, fault in settings.faults.items():
        settings.progress(name)
        try:
            async with bystanders(target, reference) as crowd:
                crowd.disturbed_at = await fault()
                # While their streams go on, or their length would count as the server's pause.
                recovery = await _next_answer(target)
        except TargetError as error:
            checks.skip(name, str(error))
            continue
        possible[name] = fault
        crowd.check(checks, name, settings.gap_s)
        if not await _check_back(target, checks, name, recovery):
            checks.skip("all later faults", "the server did not come back")
            return
        await asyncio.sleep(SETTLE_S)

    if not possible:
        return
    name, fault = next(iter(possible.items()))
    await _in_a_row(target, settings, checks, name, fault)
    if settings.num_faults:
        await marathon.run(target, replace(settings, faults=possible), checks)


@contextlib.asynccontextmanager
async def _checked_shared_files(
    processes: ServerProcesses, checks: Checks
) -> AsyncIterator[Callable[[Fault], Fault]]:
    """Check that the faults of the block leave no files in /dev/shm.

    Yields:
        A function that returns a fault which is like the given one. It notes the files of the
        processes first, because a killed process no longer shows them.
    """
    files = SharedFiles(processes)
    try:
        before = await asyncio.to_thread(files.use)
    except TargetError as error:
        checks.skip(SHARED_FILES, str(error))
        yield lambda fault: fault
        return

    def noted(fault: Fault) -> Fault:
        async def note_and_inject() -> float:
            await asyncio.to_thread(files.note)
            return await fault()

        return note_and_inject

    yield noted
    try:
        await _check_shared_files(files, before, checks)
    except TargetError as error:
        checks.skip(SHARED_FILES, str(error))


async def _check_shared_files(files: SharedFiles, before: SharedUse, checks: Checks) -> None:
    """Check that the server's files take as much as before, at most SHARED_FILES_WITHIN_S later.

    Raises:
        TargetError: the server's first process has ended.
    """
    most_bytes = int(before.num_bytes * (1 + SHARED_GROWTH_SHARE))
    until = time.monotonic() + SHARED_FILES_WITHIN_S
    while True:
        after = await asyncio.to_thread(files.use)
        is_back = after.num_files <= before.num_files and after.num_bytes <= most_bytes
        if is_back or time.monotonic() > until:
            break
        await asyncio.sleep(RETRY_S)
    limit = f"≤ {before.num_files} with {most_bytes} bytes"
    checks.holds(SHARED_FILES, is_back, limit, f"{after.num_files} with {after.num_bytes} bytes")


async def _in_a_row(
    target: Target, settings: ScenarioSettings, checks: Checks, name: str, fault: Fault
) -> None:
    """Inject a fault again each time the server has recovered, to imitate a crash loop."""
    for number in range(NUM_IN_A_ROW):
        settings.progress(f"{name}, {number + 1} of {NUM_IN_A_ROW}")
        try:
            await fault()
        except TargetError as error:
            checks.skip(f"{name}, {NUM_IN_A_ROW} times in a row", str(error))
            return
        recovery = await _next_answer(target)
        if not await _check_back(target, checks, f"{name}, time {number + 1} in a row", recovery):
            return


async def _next_answer(target: Target) -> Recovery:
    """Send short requests until the server completes one, at most for PATIENCE_S."""
    since = time.monotonic()
    while True:
        answer = await target.client.chat(target.model, target.prompt(8, 16), 4)
        seconds = time.monotonic() - since
        if answer.is_whole or seconds > PATIENCE_S:
            return Recovery(answer, seconds)
        await asyncio.sleep(RETRY_S)


async def _check_back(target: Target, checks: Checks, name: str, recovery: Recovery) -> bool:
    """Check how soon the server completed a new request, and return whether it did."""
    criterion = f"{name}: time to the next answer"
    if recovery.answer.is_whole:
        checks.at_most(criterion, recovery.seconds, BACK_WITHIN_S)
        return True

    checks.holds(criterion, False, f"≤ {BACK_WITHIN_S:g} s", recovery.answer.outcome)
    await _check_health(target, checks, name)
    return False


async def _check_health(target: Target, checks: Checks, name: str) -> None:
    """Check that a server that completes no request fails its probe, so that it is replaced.

    In kserve#6259 the probe of an engine that had run out of memory still passed.
    """
    criterion = f"{name}: {HEALTH}"
    page = await target.client.get("/health")
    if page.status == NOT_FOUND:
        checks.skip(criterion, "the server has no /health")
    else:
        seen = str(page.status or "no answer")
        checks.holds(criterion, page.status != HEALTHY, "not 200", seen)
