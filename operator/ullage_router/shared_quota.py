"""Tenants' quotas as files that all processes of a router have: exact, whoever gets a request.

Each step locks the file (flock), reads it, and writes what has become of the quota: a few
microseconds. The lock of a process that dies is released by the kernel. Requests in flight are
counted by process, so that those of one that died are not counted for ever: its successor sets its
own count to 0. Times are of the monotonic clock, which the processes of one machine share.
"""

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from ullage_router.policy.quota import Quota, Shortage, TokenBucket

MAX_PROCESSES = 64
"""Most processes of a router."""
_RECORD = struct.Struct(f"=4d{MAX_PROCESSES}i")
"""Level and time of the bucket of requests, and of tokens; requests in flight of each process."""

_ACTIVE_AT = struct.calcsize("=4d")


class SharedQuota:
    """One process's view of the quota.

    Args:
        path: of the file; made with a full quota by the first process that opens it.
        index: of this process.
        full: allowances, and what is there at the beginning.
    """

    def __init__(self, path: Path, index: int, full: Quota) -> None:
        self._index = index
        self._full = full
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._locked():
            if os.fstat(self._fd).st_size == 0:
                self._write(full, [0] * MAX_PROCESSES)

    def close(self) -> None:
        os.close(self._fd)

    @property
    def state(self) -> Quota:
        """The quota with the requests of all processes."""
        with self._locked():
            return self._read()[0]

    def apply(self, step: Callable[[Quota], Quota | Shortage]) -> Quota | Shortage:
        """Make one step of the quota, unless it is short of something, and return its result."""
        with self._locked():
            quota, active = self._read()
            result = step(quota)
            if isinstance(result, Quota):
                active[self._index] += result.active - quota.active
                self._write(result, active)
            return result

    def clear(self) -> None:
        """Set this process's requests in flight to 0."""
        with self._locked():
            data = bytearray(os.pread(self._fd, _RECORD.size, 0))
            struct.pack_into("=i", data, _ACTIVE_AT + 4 * self._index, 0)
            os.pwrite(self._fd, data, 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _read(self) -> tuple[Quota, list[int]]:
        """Return the quota, and the requests in flight of each process."""
        values = _RECORD.unpack(os.pread(self._fd, _RECORD.size, 0))
        active = list(values[4:])
        requests = _bucket(self._full.requests, *values[:2])
        tokens = _bucket(self._full.tokens, *values[2:4])
        return Quota(requests, tokens, self._full.concurrency, sum(active)), active

    def _write(self, quota: Quota, active: list[int]) -> None:
        requests = quota.requests
        tokens = quota.tokens
        data = _RECORD.pack(
            requests.level if requests else 0.0,
            requests.at if requests else 0.0,
            tokens.level if tokens else 0.0,
            tokens.at if tokens else 0.0,
            *active,
        )
        os.pwrite(self._fd, data, 0)


def _bucket(full: TokenBucket | None, level: float, at: float) -> TokenBucket | None:
    return replace(full, level=level, at=at) if full else None


class QuotaFolder:
    """The quotas that a router's processes share, one file a tenant.

    Args:
        path: the folder; made if it is missing.
        index: of this process, whose requests in flight are 0 from now on.
    """

    def __init__(self, path: Path, index: int) -> None:
        self._path = path
        self._index = index
        path.mkdir(mode=0o700, exist_ok=True)
        for file in path.iterdir():
            self._forget_predecessor(file.name)

    def open(self, tenant: str, full: Quota) -> SharedQuota:
        """Open a tenant's quota, which is full if no process has opened it before."""
        return SharedQuota(self._path / tenant, self._index, full)

    def _forget_predecessor(self, tenant: str) -> None:
        """Take out the requests that a process of this index had when it died."""
        quota = SharedQuota(self._path / tenant, self._index, Quota())
        try:
            quota.clear()
        finally:
            quota.close()
