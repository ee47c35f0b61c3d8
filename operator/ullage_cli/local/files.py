"""Writes the plan's configuration files, and creates the folders of its data."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ullage_operator.api.errors import LocalFailure


@dataclass(frozen=True, slots=True)
class File:
    """A configuration file to write: its path and its text."""

    path: Path
    text: str


def write_files(files: Sequence[File]) -> None:
    """Write configuration files, and create their folders."""
    for file in files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text, encoding="utf-8")


def make_folders(folders: Mapping[Path, str]) -> None:
    """Create folders, and check that each folder is writable.

    Args:
        folders: the folders, with the fields of the spec that set them.

    Raises:
        LocalFailure: a folder cannot be created or is not writable.
    """
    for folder, field in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise LocalFailure(
                f"{field} {folder}: {error.strerror}; choose a folder in which you "
                "may write, or leave path out for one in the run directory"
            ) from error
