"""The records of batches on the disk, one file for each. All calls block."""

import contextlib
import logging
from pathlib import Path

import msgspec

from ullage_router.batches.batch import Batch
from ullage_router.files.folder import FileFolder

log = logging.getLogger(__name__)


class BatchRecords:
    """Reads and writes the records of batches.

    Args:
        path: The folder of the records, in the folder of the store.
        folder: The folder of the store.
    """

    def __init__(self, path: Path, folder: FileFolder) -> None:
        self._path = path
        self._folder = folder

    def load(self) -> list[Batch]:
        """Return all batches, in the order of their creation.

        Raises:
            OSError: The folder cannot be read.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        batches = []
        for path in sorted(self._path.glob("*.json")):
            try:
                batches.append(msgspec.json.decode(path.read_bytes(), type=Batch))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.error("a batch is damaged", extra={"batch": path.stem, "reason": str(error)})
        return batches

    def write(self, name: str, data: bytes) -> None:
        """Write a batch's record.

        Raises:
            OSError: The disk is full or failed. The old record is still there.
        """
        self._folder.write_whole(self._path / f"{name}.json", data)

    def remove(self, name: str) -> None:
        """Remove a batch's record."""
        with contextlib.suppress(OSError):
            (self._path / f"{name}.json").unlink()
