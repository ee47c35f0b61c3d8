"""Detects changes in mounted files by polling once a second.

Kubernetes replaces a mounted Secret by pointing the link `..data` to a new folder. On some file
systems, inotify misses this change. Polling with a few `stat` calls per second always detects it.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

INTERVAL_S = 1.0

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


async def follow(
    folders: Sequence[Path], seen: Fingerprint, reload: Callable[[], Awaitable[None]]
) -> None:
    """Call `reload` whenever a file in the folders changes, until cancelled. Retry failed reloads.

    Args:
        seen: the fingerprint from before the files were first read, so that no change is missed.
    """
    while True:
        await asyncio.sleep(INTERVAL_S)
        current = await asyncio.to_thread(fingerprint, folders)
        if current == seen:
            continue
        try:
            await reload()
        except Exception:  # the loop must continue, to notice the next change
            log.exception("changed files cannot be loaded; retrying")
        else:
            seen = current
