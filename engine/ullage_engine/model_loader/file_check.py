"""Checks that a path is a readable file and not a placeholder, such as a Git LFS pointer."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ullage_engine.protocol.errors import WeightsError

_LFS = b"version https://git-lfs.github.com/spec/"
_HTML = (b"<!doctype html", b"<html")


def check_file(path: Path) -> int:
    """Check that a path is a readable file and not a placeholder. Return its size in bytes.

    Raises:
        WeightsError: the check failed.
    """
    with explained(path):
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise WeightsError(f"{path}: a folder where a file is expected; download it again")
        if not stat.S_ISREG(status.st_mode):
            raise WeightsError(f"{path}: a pipe or device; put the file itself there")
        with path.open("rb") as file:
            start = file.read(256)
    if start.startswith(_LFS):
        match = re.search(rb"\nsize (\d+)", start)
        size = f" of {int(match[1]):,} bytes" if match else ""
        raise WeightsError(
            f"{path}: a Git LFS pointer to a file{size}, not the file; run git lfs pull where it "
            "was cloned, or download it again"
        )
    is_page = path.suffix != ".jinja" and start.lstrip().lower().startswith(_HTML)
    if is_page:
        raise WeightsError(
            f"{path}: an HTML page, such as a failed download leaves; download it again"
        )
    return status.st_size


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn OS errors within the `with` block into errors that name `path` and suggest a fix."""
    try:
        yield
    except OSError as error:
        raise WeightsError(f"{path}: {_cause(path, error)}") from error


def _cause(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return (
            f"a link to {os.readlink(path)}, which is not there; mount or copy the file that it "
            "links to, too"
        )
    if isinstance(error, PermissionError):
        return (
            f"{error.strerror} for user {os.geteuid()}; make the file and its folders readable to "
            "that user"
        )
    return f"{error.strerror}; check the file and its disk, or download it again"
