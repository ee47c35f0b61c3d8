"""Detects changes in mounted files by polling once a second.

Kubernetes replaces a mounted Secret by pointing the link `..data` to a new folder. On some file
systems, inotify misses this change. Polling with a few `stat` calls per second always detects it.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from ullage_common.process.config_file import ConfigError

INTERVAL_S = 1.0
"""Seconds between two looks at the files."""
QUICK_RETRIES = 10
"""Number of failures after which the same files are loaded again less often."""
RETRY_S = 30.0
"""Seconds between two tries to load files that have failed to load many times."""

log = logging.getLogger(__name__)

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Path, inode, modification time and size of every file."""


def fingerprint(folders: Sequence[Path]) -> Fingerprint:
    """Return a value that changes whenever a file in the folders changes.

    Symbolic links are followed. Files in subfolders are ignored.
    """
    return tuple(item for folder in folders for item in _files(folder))


def _files(folder: Path) -> list[tuple[str, int, int, int]]:
    files = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        path = folder / name
        try:
            status = path.stat()
        except OSError:  # a dangling link, or a file that was just removed
            continue
        if path.is_file():
            files.append((str(path), status.st_ino, status.st_mtime_ns, status.st_size))
    return files


def retry_delay_s(num_failures: int) -> float:
    """Return the seconds until the next try, after this many failures to load the same files."""
    return INTERVAL_S if num_failures <= QUICK_RETRIES else RETRY_S


async def follow(
    folders: Sequence[Path],
    seen: Fingerprint | None,
    reload: Callable[[], Awaitable[None]],
    failure: str = "changed files cannot be loaded",
) -> None:
    """Call `reload` whenever a file in the folders changes, until cancelled.

    If `reload` raises, the same files are loaded again, every second at first and every `RETRY_S`
    seconds later. The files may be valid soon, or the disk readable again.

    Args:
        seen: the fingerprint from before the files were first read, so that no change is missed, or
            None to call `reload` at once.
        failure: log message for a failed reload. An error is logged once, until another one occurs.
    """
    tried = seen
    num_failures = 0
    retry_at = 0.0
    logged = ""
    while True:
        try:
            current = await asyncio.to_thread(fingerprint, folders)
        except Exception as error:  # no thread can be started, or the disk fails
            if repr(error) != logged:
                logged = repr(error)
                log.error("files cannot be looked at; retrying", exc_info=error)
            await asyncio.sleep(INTERVAL_S)
            continue
        try:
            is_changed = current != tried
            if is_changed or (num_failures and time.monotonic() >= retry_at):
                if is_changed:
                    num_failures = 0
                    logged = ""
                tried = current
                await reload()
                num_failures = 0
                logged = ""
        except Exception as error:  # the loop must continue, to notice the next change
            num_failures += 1
            retry_at = time.monotonic() + retry_delay_s(num_failures)
            if repr(error) != logged:
                logged = repr(error)
                _log_failure(failure, error)
        await asyncio.sleep(INTERVAL_S)


def _log_failure(failure: str, error: Exception) -> None:
    if isinstance(error, ConfigError):
        log.error("%s; retrying", failure, extra={"reason": str(error)})
    else:
        log.error("%s; retrying", failure, exc_info=error)
