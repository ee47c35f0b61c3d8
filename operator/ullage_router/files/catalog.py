"""The list of stored files, with the limits on their number and their bytes. It does no I/O.

A file that is being written counts from its first byte, so that files that grow at the same time
cannot exceed the limits together.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

import msgspec

from ullage_common.config.router import FilesLimits
from ullage_router.errors import file_in_use, file_store_full

Purpose = Literal["batch", "user_data", "batch_output"]
Order = Literal["asc", "desc"]


class StoredFile(msgspec.Struct, frozen=True):
    """The description of a file, as its JSON file on the disk has it."""

    id: str
    """The id. Ids of later files sort behind those of earlier files."""
    tenant: str
    """Name of the tenant that owns the file (empty without tenants)."""
    filename: str
    purpose: Purpose
    num_bytes: int = msgspec.field(name="bytes")
    created_at: int
    """Unix time of the creation, in seconds."""
    expires_at: int
    """Unix time at which the file expires, in seconds."""


class FileCatalog:
    """The stored files by id, and the bytes and files that count against the limits.

    Args:
        limits: The limits. A tenant with a name gets at most half of each.

    Attributes:
        num_bytes: Bytes of all files, including those that are being written.
        num_files: Number of all files, including those that are being written.
    """

    def __init__(self, limits: FilesLimits) -> None:
        self._limits = limits
        self._files: dict[str, StoredFile] = {}
        self._users: dict[str, set[str]] = {}
        """The batches that read a file, by the file's id."""
        self._bytes = Counter[str]()
        self._counts = Counter[str]()
        self.num_bytes = 0
        self.num_files = 0

    def __len__(self) -> int:
        return len(self._files)

    def take_file(self, tenant: str) -> None:
        """Count one more file.

        Raises:
            ServiceError: The limit on the number of files is reached.
        """
        most = self._limits.max_files
        if self.num_files >= most:
            raise file_store_full("maxFiles", most, of_tenant=False)
        if tenant and self._counts[tenant] >= max(1, most // 2):
            raise file_store_full("maxFiles", max(1, most // 2), of_tenant=True)
        self.num_files += 1
        self._counts[tenant] += 1

    def take_bytes(self, tenant: str, num_bytes: int) -> None:
        """Count more bytes of a file that is being written.

        Raises:
            ServiceError: The limit on the bytes of all files is reached.
        """
        most = self._limits.max_bytes
        if self.num_bytes + num_bytes > most:
            raise file_store_full("maxBytes", most, of_tenant=False)
        if tenant and self._bytes[tenant] + num_bytes > most // 2:
            raise file_store_full("maxBytes", most // 2, of_tenant=True)
        self._count(tenant, num_bytes, 0)

    def return_bytes(self, tenant: str, num_bytes: int) -> None:
        """Stop counting bytes that could not be written."""
        self._count(tenant, -num_bytes, 0)

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Stop counting a file that was not completed.

        Args:
            tenant: The tenant of the file.
            num_bytes: The bytes that were counted for the file.
        """
        self._count(tenant, -num_bytes, -1)

    def add(self, file: StoredFile) -> None:
        """Add a file whose bytes are already counted."""
        self._files[file.id] = file

    def clear(self) -> None:
        """Forget all files, before those on the disk are restored."""
        self._files.clear()
        self._bytes.clear()
        self._counts.clear()
        self.num_bytes = 0
        self.num_files = 0

    def restore(self, file: StoredFile) -> None:
        """Add a file that was on the disk at the start, even if it exceeds the limits."""
        self._count(file.tenant, file.num_bytes, 1)
        self._files[file.id] = file

    def restore_unfinished(self, tenant: str, num_bytes: int) -> None:
        """Count a file that was being written when the last router stopped."""
        self._count(tenant, num_bytes, 1)

    def remove(self, name: str) -> None:
        """Remove a file."""
        file = self._files.pop(name)
        self._count(file.tenant, -file.num_bytes, -1)

    def has(self, name: str) -> bool:
        """Return whether a file is complete."""
        return name in self._files

    def find(self, tenant: str, name: str, now: float) -> StoredFile | None:
        """Return a tenant's file, or None if there is none that has not expired."""
        file = self._files.get(name)
        if file is None or file.tenant != tenant:
            return None
        return file if file.expires_at > now or name in self._users else None

    def pin(self, name: str, user: str) -> None:
        """Keep a file while a batch reads it: it neither expires nor can be deleted."""
        self._users.setdefault(name, set()).add(user)

    def unpin(self, name: str, user: str) -> None:
        """Let a file expire again, unless another batch reads it."""
        users = self._users.get(name, set())
        users.discard(user)
        if not users:
            self._users.pop(name, None)

    def check_unused(self, name: str) -> None:
        """Check that no batch reads a file.

        Raises:
            ServiceError: A batch reads the file.
        """
        if users := self._users.get(name):
            raise file_in_use(name, min(users))

    def expired(self, now: float) -> list[StoredFile]:
        """Return the files that have expired and that no batch reads."""
        return [file for file in self._files.values() if self.has_expired(file, now)]

    def has_expired(self, file: StoredFile, now: float) -> bool:
        """Return whether a file is in the list, has expired, and no batch reads it."""
        return file.id in self._files and file.expires_at <= now and file.id not in self._users

    def page(
        self, tenant: str, now: float, *, purpose: str = "", after: str = "", order: Order = "desc"
    ) -> Iterator[StoredFile]:
        """Yield a tenant's files in the order of their creation.

        Args:
            tenant: The tenant.
            now: Unix time in seconds.
            purpose: Purpose of the files (empty for all).
            after: Id of the file after which the page begins (empty for the first page).
            order: Whether the oldest file comes first (`asc`) or the newest (`desc`).
        """
        is_down = order == "desc"
        for name in sorted(self._files, reverse=is_down):
            is_before = after and (name >= after if is_down else name <= after)
            file = None if is_before else self.find(tenant, name, now)
            if file and purpose in ("", file.purpose):
                yield file

    def _count(self, tenant: str, num_bytes: int, num_files: int) -> None:
        self.num_bytes += num_bytes
        self.num_files += num_files
        self._bytes[tenant] += num_bytes
        self._counts[tenant] += num_files
        if not self._counts[tenant] and not self._bytes[tenant]:
            del self._counts[tenant]
            del self._bytes[tenant]
