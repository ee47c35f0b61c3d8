"""Runs the batches of this router, and keeps their records.

A tenant's batches run one after another. The requests of all batches share a few slots, for which
batches take turns. Each answer is on the disk before it counts, so that a router that is killed
continues where it was: the output files themselves say which requests are answered.
"""

import asyncio
import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from ullage_common.config.router import BatchLimits
from ullage_common.wire.errors import ServiceError
from ullage_router.batches.batch import ENDED, WINDOW_S, Batch, BatchError, Ending, Status
from ullage_router.batches.lines import (
    BatchLine,
    BatchReply,
    LineIndex,
    answered_numbers,
    check_file,
    error_line,
    reply_line,
)
from ullage_router.batches.records import BatchRecords
from ullage_router.errors import batch_ended, batches_full, file_store_failed, unknown_batch
from ullage_router.files.catalog import StoredFile
from ullage_router.files.growing import GrowingFile
from ullage_router.files.store import FileStore, new_id

MAX_TRIES = 3
"""Number of times that a request is sent if the service fails."""
MAX_WAIT_S = 30.0
"""Longest wait before a request is sent again, in seconds."""
DISK_WAIT_S = 2.0
"""Seconds after which a write is tried again, if the store was full or its disk failed."""
MAX_KEPT = 1000
"""Maximum number of batches that have ended and are kept. One tenant gets at most half of this."""
CLOSE_S = 5.0
"""Maximum seconds that the end of the router waits for a disk that does not respond."""
MAX_LINES_AT_ONCE = 256
"""Number of lines that are written together for requests that were not answered in time."""
REQUEST_STATES = ("waiting", "running")
"""States of a request that has no line in the output files yet."""
_REFUSED = frozenset({429, 503})
_FAILED = frozenset({408, 500, 502, 504})
_EXPIRED = "This request could not be executed before the completion window expired."
_LOST = "The router lost this request; send it in another batch."

T = TypeVar("T")

log = logging.getLogger(__name__)

Send = Callable[[str, str, bytes, str], Awaitable[BatchReply]]
"""Sends a request: takes the endpoint, the tenant, the body and the request id."""


@dataclass(slots=True)
class _Outputs:
    """The files that a batch writes."""

    answers: GrowingFile
    errors: GrowingFile

    def of(self, reply: BatchReply) -> GrowingFile:
        return self.answers if reply.is_success else self.errors

    def close(self) -> None:
        self.answers.close()
        self.errors.close()


class BatchRunner:
    """Runs batches.

    Args:
        limits: The limits on batches.
        store: The store of files, which has the batches' records, too.
        clock: Returns Unix time in seconds.

    Attributes:
        send: Sends a request. It is set before the store opens.
        num_sent: Number of requests sent, once for each try.
        ended: Number of requests that got a line, by whether it is an answer or an error.
    """

    def __init__(
        self, limits: BatchLimits, store: FileStore, clock: Callable[[], float] = time.time
    ) -> None:
        self.send: Send = _not_connected
        self._limits = limits
        self._store = store
        self._clock = clock
        self._records = BatchRecords(Path(store.section.dir) / "batches", store.folder)
        self._batches: dict[str, Batch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        """The part of a batch's task that a cancellation ends."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by tenant, since a tenant's batches run one after another."""
        self._writing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks of the records by batch."""
        self._checking = asyncio.Lock()
        self._slots = asyncio.Semaphore(limits.max_concurrency)
        self._num_running = 0
        self.num_sent = 0
        self.ended = {"completed": 0, "failed": 0}
        store.resident = self

    def load(self) -> dict[str, str]:
        """Read the batches, and return the tenants of their unfinished files by id. This blocks."""
        self._batches = {batch.id: batch for batch in self._records.load()}
        return {
            name: batch.tenant
            for batch in self._batches.values()
            if not batch.has_ended
            for name in (batch.output_name, batch.error_name)
        }

    def on_open(self) -> None:
        """Continue the batches that have not ended."""
        for batch in self._batches.values():
            if not batch.has_ended:
                self._begin(batch)

    async def close(self) -> None:
        """Stop, so that the next router continues the batches.

        A write that runs is waited for, unless the disk does not respond.
        """
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, hanging = await asyncio.wait(tasks, timeout=CLOSE_S)
        if hanging:
            names = sorted(task.get_name() for task in hanging)
            log.error("the disk of batches does not respond", extra={"batches": names})

    async def create(
        self,
        tenant: str,
        endpoint: str,
        input_file: StoredFile,
        metadata: dict[str, str] | None,
        output_ttl: int,
    ) -> Batch:
        """Create a batch, and begin to run it.

        Args:
            tenant: The tenant that owns the batch.
            endpoint: The endpoint of the requests.
            input_file: The file with the requests, which exists when this is called.
            metadata: Data of the client.
            output_ttl: Seconds for which the output files are kept.

        Raises:
            ServiceError: Too many batches have not ended, or the disk failed.
        """
        name = new_id("batch_")
        # Before anything waits, so that nobody removes the file that the caller has looked up.
        self._store.catalog.pin(input_file.id, name)
        try:
            await self._sweep()
            self._require_place(tenant)
        except BaseException:
            self._store.catalog.unpin(input_file.id, name)
            raise

        now = int(self._clock())
        batch = Batch(
            id=name,
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file.id,
            output_name=new_id("file-"),
            error_name=new_id("file-"),
            output_ttl=output_ttl,
            metadata=metadata,
            created_at=now,
            expires_at=now + WINDOW_S,
        )
        self._batches[batch.id] = batch
        # A client that disconnects now must not leave a batch that nobody runs.
        await asyncio.shield(asyncio.create_task(self._write_and_begin(batch)))
        return batch

    def _require_place(self, tenant: str) -> None:
        """Check that a tenant may have one more batch.

        Raises:
            ServiceError: Too many batches have not ended.
        """
        active = [batch.tenant for batch in self._batches.values() if not batch.has_ended]
        most = self._limits.max_active
        of_tenant = max(1, most // 2) if tenant else most
        if len(active) >= most or active.count(tenant) >= of_tenant:
            raise batches_full(most if len(active) >= most else of_tenant)

    async def _write_and_begin(self, batch: Batch) -> None:
        try:
            await self._write(batch)
        except OSError as error:
            del self._batches[batch.id]
            self._writing.pop(batch.id, None)
            self._store.catalog.unpin(batch.input_file_id, batch.id)
            raise file_store_failed(error) from error
        self._begin(batch)

    def find(self, tenant: str, name: str) -> Batch:
        """Return a tenant's batch.

        Raises:
            ServiceError: There is no such batch.
        """
        self._store.require_open()
        batch = self._batches.get(name)
        if batch is None or batch.tenant != tenant:
            raise unknown_batch(name)
        return batch

    def page(self, tenant: str, limit: int, after: str) -> tuple[list[Batch], bool]:
        """Return up to `limit` batches of a tenant, the newest first, and whether more follow.

        Args:
            tenant: The tenant.
            limit: Maximum number of batches.
            after: Id of the batch after which the page begins (empty for the first page).
        """
        self._store.require_open()
        names = sorted(self._batches, reverse=True)
        own = [name for name in names if self._batches[name].tenant == tenant]
        rest = [name for name in own if not after or name < after]
        return [self._batches[name] for name in rest[:limit]], len(rest) > limit

    async def cancel(self, tenant: str, name: str) -> Batch:
        """Cancel a tenant's batch. The requests that were answered stay answered.

        Raises:
            ServiceError: There is no such batch, it has ended, or the disk failed.
        """
        batch = self.find(tenant, name)
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise batch_ended(name, batch.status)
        batch.ending = "cancelled"
        batch.enter("cancelling", self._clock())
        if work := self._work.get(name):
            work.cancel()
        try:
            await self._write(batch)
        except OSError as error:
            raise file_store_failed(error) from error
        return batch

    def as_json(self) -> dict[str, object]:
        """Return the state of the batches for /stats."""
        return {
            "active": sum(not batch.has_ended for batch in self._batches.values()),
            "max_active": self._limits.max_active,
            "requests_left": self._num_left,
            "requests_running": self._num_running,
            "requests_sent": self.num_sent,
        }

    def num_batches(self, status: str) -> int:
        """Return the number of batches with a status."""
        return sum(batch.status == status for batch in self._batches.values())

    def num_requests(self, state: str) -> int:
        """Return the number of requests in a state of REQUEST_STATES."""
        return self._num_running if state == "running" else self._num_left - self._num_running

    @property
    def _num_left(self) -> int:
        """Number of requests of batches that have not ended, which have no line yet."""
        active = [batch for batch in self._batches.values() if not batch.has_ended]
        return sum(batch.total - batch.completed - batch.failed for batch in active)

    def _begin(self, batch: Batch) -> None:
        self._store.catalog.pin(batch.input_file_id, batch.id)
        task = asyncio.create_task(self._run(batch), name=batch.id)
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, batch: Batch) -> None:
        """Run a batch from the state in which it is to its end."""
        outputs = _Outputs(
            self._store.growing(batch.tenant, batch.output_name),
            self._store.growing(batch.tenant, batch.error_name),
        )
        try:
            if batch.status in ("validating", "in_progress"):
                await self._work_safely(batch, outputs)
            if not batch.has_ended:
                await self._finalize_safely(batch, outputs)
        finally:
            outputs.close()
        log.info(
            "batch ended",
            extra={
                "batch": batch.id,
                "status": batch.status,
                "completed": batch.completed,
                "failed": batch.failed,
            },
        )

    async def _work_safely(self, batch: Batch, outputs: _Outputs) -> None:
        """Answer the requests of a batch. If the router is at fault, the batch fails."""
        try:
            await self._work_in_time(batch, outputs)
        except Exception as error:
            _note_failure(batch, error)

    async def _finalize_safely(self, batch: Batch, outputs: _Outputs) -> None:
        """Complete the output files, and end the batch. If the router is at fault, it fails."""
        try:
            await self._finalize(batch, outputs)
        except Exception as error:
            _note_failure(batch, error)
            await self._enter(batch, "failed")

    async def _work_in_time(self, batch: Batch, outputs: _Outputs) -> None:
        """Answer the requests of a batch, until they are answered, cancelled or too late."""
        remaining_s = max(0.0, batch.expires_at - self._clock())
        is_late = not await self._do(batch, self._check_and_answer(batch, outputs), remaining_s)
        if is_late and batch.status != "cancelling":
            await self._do(batch, self._expire(batch, outputs), None)

    async def _do(
        self, batch: Batch, work: Coroutine[None, None, None], timeout_s: float | None
    ) -> bool:
        """Do work that the cancellation of the batch ends.

        Args:
            batch: The batch.
            work: The work.
            timeout_s: Seconds after which the work ends too, or None.

        Returns:
            Whether the work ended before the timeout.
        """
        task = asyncio.create_task(work)
        self._work[batch.id] = task
        try:
            await asyncio.wait([task], timeout=timeout_s)
            is_late = not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del self._work[batch.id]

        if is_late or batch.status == "cancelling":
            return not is_late
        if task.cancelled():
            raise RuntimeError("the work of the batch was cancelled, but not the batch")
        task.result()
        return True

    async def _check_and_answer(self, batch: Batch, outputs: _Outputs) -> None:
        path = self._store.folder.data(batch.input_file_id)
        if batch.status == "validating":
            async with self._checking:
                checker = await self._read(
                    batch, check_file, path, batch.endpoint, self._limits.max_requests
                )
            if checker.errors:
                batch.errors = checker.errors
                await self._enter(batch, "failed")
                return
            batch.total = checker.total
            await self._enter(batch, "in_progress")

        async with self._turns[batch.tenant]:
            index = await self._read(batch, LineIndex, path)
            answered = await self._answered(batch, outputs)
            await self._answer(batch, index, answered, outputs)
            await self._fail_the_rest(batch, index, outputs, "internal_error", _LOST)

    async def _answered(self, batch: Batch, outputs: _Outputs) -> set[int]:
        """Return the numbers of the requests that have lines in the output files.

        The counts of the batch are set to the numbers of these lines.
        """
        completed, failed = [
            await self._read(batch, _numbers, file.path)
            for file in (outputs.answers, outputs.errors)
        ]
        batch.completed = len(completed)
        batch.failed = len(failed)
        return completed | failed

    async def _answer(
        self, batch: Batch, index: LineIndex, answered: set[int], outputs: _Outputs
    ) -> None:
        """Answer all requests that are not answered."""
        most = asyncio.Semaphore(self._limits.max_concurrency)
        """Requests of this batch that are being answered, or wait before they are sent again."""

        async def answer_one(number: int) -> None:
            try:
                await self._answer_line(batch, index, number, outputs)
            finally:
                most.release()

        async with asyncio.TaskGroup() as group:
            for number in range(len(index)):
                if number not in answered:
                    await most.acquire()
                    group.create_task(answer_one(number))

    async def _answer_line(
        self, batch: Batch, index: LineIndex, number: int, outputs: _Outputs
    ) -> None:
        line = await self._read(batch, index.read, number)
        reply = await self._reply(batch, number, line)
        data = reply_line(batch.id, number, line.custom_id, reply)
        await self._append(batch, outputs.of(reply), data)
        if reply.is_success:
            batch.completed += 1
            self.ended["completed"] += 1
        else:
            batch.failed += 1
            self.ended["failed"] += 1

    async def _reply(self, batch: Batch, number: int, line: BatchLine) -> BatchReply:
        """Send a request until it is answered. After a refusal it waits and is sent again."""
        request_id = f"{batch.id}_{number}"
        tries = 0
        refusals = 0
        while True:
            async with self._slots:
                self.num_sent += 1
                self._num_running += 1
                try:
                    reply = await self.send(
                        batch.endpoint, batch.tenant, bytes(line.body), request_id
                    )
                finally:
                    self._num_running -= 1
            tries += reply.status in _FAILED
            refusals += reply.status in _REFUSED
            is_final = reply.status not in _FAILED | _REFUSED or tries >= MAX_TRIES
            if is_final:
                return reply
            await asyncio.sleep(wait_s(tries + refusals, reply.retry_after_s))

    async def _expire(self, batch: Batch, outputs: _Outputs) -> None:
        """Write an error for each request that was not answered in time."""
        batch.ending = "expired"
        if batch.status == "validating":
            return
        path = self._store.folder.data(batch.input_file_id)
        index = await self._read(batch, LineIndex, path)
        await self._fail_the_rest(batch, index, outputs, "batch_expired", _EXPIRED)

    async def _fail_the_rest(
        self, batch: Batch, index: LineIndex, outputs: _Outputs, code: str, message: str
    ) -> None:
        """Write an error for each request that has no line in the output files."""
        answered = await self._answered(batch, outputs)
        rest = [number for number in range(len(index)) if number not in answered]
        for start in range(0, len(rest), MAX_LINES_AT_ONCE):
            numbers = rest[start : start + MAX_LINES_AT_ONCE]
            lines = await self._read(batch, _error_lines, batch.id, index, numbers, code, message)
            await self._append(batch, outputs.errors, lines)
            batch.failed += len(numbers)
            self.ended["failed"] += len(numbers)

    async def _finalize(self, batch: Batch, outputs: _Outputs) -> None:
        """Complete the output files, and end the batch."""
        if batch.status == "in_progress":
            batch.ending = batch.ending or "completed"
            await self._enter(batch, "finalizing")
        elif batch.status in ("finalizing", "cancelling"):
            try:
                await self._answered(batch, outputs)
            except Exception as error:
                _note_failure(batch, error)
        ending: Ending = batch.ending or "completed"

        now = int(self._clock())
        while True:
            try:
                batch.has_output = await outputs.answers.finish(
                    "batch_output", f"{batch.id}_output.jsonl", now, batch.output_ttl
                )
                batch.has_errors = await outputs.errors.finish(
                    "batch_output", f"{batch.id}_error.jsonl", now, batch.output_ttl
                )
                break
            except ServiceError as error:
                await _wait_for_disk(batch, error)
        await self._enter(batch, ending)

    async def _read(self, batch: Batch, work: Callable[..., T], *args: object) -> T:
        """Read from the disk. If it fails, try again until the batch expires.

        Raises:
            OSError: The file does not exist, or the disk failed for too long.
        """
        while True:
            try:
                return await self._store.on_disk(work, *args)
            except FileNotFoundError:
                raise
            except OSError as error:
                if self._clock() >= batch.expires_at:
                    raise
                await _wait_for_disk(batch, file_store_failed(error))

    async def _append(self, batch: Batch, file: GrowingFile, lines: bytes) -> None:
        """Write lines. If the store or the disk is full, wait until there is room."""
        while True:
            try:
                await file.append(lines)
                return
            except ServiceError as error:
                await _wait_for_disk(batch, error)

    async def _enter(self, batch: Batch, status: Status) -> None:
        """Enter a state, which is on the disk when this returns.

        A batch that is being cancelled only enters its last state.
        """
        if batch.status == "cancelling" and status not in ENDED:
            return
        batch.enter(status, self._clock())
        if batch.has_ended:
            self._store.catalog.unpin(batch.input_file_id, batch.id)
        while True:
            try:
                await self._write(batch)
                return
            except OSError as error:
                await _wait_for_disk(batch, file_store_failed(error))

    async def _write(self, batch: Batch) -> None:
        """Write the record of a batch, even if the caller is cancelled meanwhile."""
        await asyncio.shield(asyncio.create_task(self._write_latest(batch)))

    async def _write_latest(self, batch: Batch) -> None:
        async with self._writing[batch.id]:  # so that an older state is never written last
            data = msgspec.json.encode(batch)
            await self._store.on_disk(self._records.write, batch.id, data)

    async def _sweep(self) -> None:
        """Remove the batches that ended long ago, and the oldest if too many have ended."""
        ended = [batch for batch in self._batches.values() if batch.has_ended]
        last = self._clock() - self._store.section.ttl
        old = [batch for batch in ended if batch.ended_at <= last]
        recent = [batch for batch in ended if batch.ended_at > last]
        for batch in [*old, *surplus(recent, MAX_KEPT)]:
            if self._batches.pop(batch.id, None) is None:
                continue  # another sweep removed it meanwhile
            self._writing.pop(batch.id, None)
            # Even if the client disconnects now, or the batch would come back at the next start.
            removing = self._store.clean_up(partial(self._records.remove, batch.id))
            await asyncio.shield(asyncio.create_task(removing))


def surplus(ended: Iterable[Batch], most: int) -> Iterator[Batch]:
    """Yield the batches that are too many, each time the oldest of the tenant that has the most.

    Args:
        ended: Batches that have ended.
        most: Maximum number of batches. A tenant with a name gets at most half of them.
    """
    by_tenant: defaultdict[str, deque[Batch]] = defaultdict(deque)
    total = 0
    for batch in sorted(ended, key=lambda batch: batch.ended_at):
        by_tenant[batch.tenant].append(batch)
        total += 1

    while by_tenant:
        tenant, own = max(by_tenant.items(), key=lambda item: len(item[1]))
        of_tenant = max(1, most // 2) if tenant else most
        if total <= most and len(own) <= of_tenant:
            return
        total -= 1
        yield own.popleft()


def wait_s(tries: int, retry_after_s: float | None) -> float:
    """Return the seconds to wait before a request is sent again.

    Args:
        tries: Number of times that the request was sent.
        retry_after_s: The wait that the service asked for, in seconds, or None.
    """
    backoff = min(MAX_WAIT_S, 2.0 ** min(tries - 1, 10))
    return max(retry_after_s or 0.0, backoff) * random.uniform(1.0, 1.25)


def _numbers(path: Path | None) -> set[int]:
    return set(answered_numbers(path)) if path else set()


def _error_lines(
    batch: str, index: LineIndex, numbers: list[int], code: str, message: str
) -> bytes:
    return b"".join(
        error_line(batch, number, index.read(number).custom_id, code, message) for number in numbers
    )


def _note_failure(batch: Batch, error: Exception) -> None:
    log.error("batch failed", exc_info=error, extra={"batch": batch.id})
    message = "the router failed; its log names this batch"
    batch.errors = [BatchError(code="internal_error", message=message)]
    batch.ending = "failed"


async def _wait_for_disk(batch: Batch, error: ServiceError) -> None:
    log.warning("a batch waits for room", extra={"batch": batch.id, "reason": error.message})
    await asyncio.sleep(DISK_WAIT_S)


async def _not_connected(endpoint: str, tenant: str, body: bytes, request_id: str) -> BatchReply:
    raise AssertionError("the runner needs a way to send requests")
