"""Notices that mounted files changed, by looking once a second.

Kubernetes replaces a mounted Secret by pointing the link `..data` at a new folder. Notification
through inotify misses that on some file systems; a handful of `stat` calls a second misses nothing.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

INTERVAL_S = 1.0

log = logging.getLogger(__name__)

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Path, inode, time of change and size of every file."""


def fingerprint(folders: Sequence[Path]) -> Fingerprint:
    """Change whenever a file in one of the folders does; links are followed, folders are not."""
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
        except OSError:  # a link that points nowhere, or a file removed just now
            continue
        if path.is_file():
            files.append((str(path), status.st_ino, status.st_mtime_ns, status.st_size))
    return files


async def follow(
    folders: Sequence[Path], seen: Fingerprint, reload: Callable[[], Awaitable[None]]
) -> None:
    """Call `reload` after every change, for ever; one that fails is tried again.

    Args:
        seen: the fingerprint before what is in use was read, so that no change is missed.
    """
    while True:
        await asyncio.sleep(INTERVAL_S)
        current = await asyncio.to_thread(fingerprint, folders)
        if current == seen:
            continue
        try:
            await reload()
        except Exception:  # the next change must be noticed all the same
            log.exception("changed files cannot be taken up; trying again")
        else:
            seen = current
