"""Reads tenants' API keys from a folder, and finds the tenant to which a key belongs.

The folder has one file per tenant. Each line of a file is a key or a key's digest
(`ullage_common.process.api_keys`). A tenant can have several keys, so that a new key works before
the old one is removed. Only the keys' digests are kept in memory.
"""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ullage_common.process.api_keys import MAX_KEY, TENANT_NAME, digest, read_entry

MAX_FILE_BYTES = 1 << 20
"""Maximum size of a key file in bytes, which equals the size limit of a Kubernetes Secret."""

Digests = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """The tenants and key digests read from a folder."""

    digests: Mapping[str, Digests] = field(default_factory=lambda: MappingProxyType({}))
    """Digests of each tenant's keys, by tenant name."""
    problems: tuple[str, ...] = ()
    """Problems with the key files. If a file is unreadable, its tenant keeps the previous keys."""


class KeyRing:
    """Finds the tenant that owns a key, without revealing anything about other keys by timing.

    A keyed hash of the key serves as an index to its digest, and a constant-time comparison
    confirms the match. The hash's secret is random and private to this object, so clients cannot
    influence which comparisons the index makes.
    """

    def __init__(self, digests: Mapping[str, Digests]) -> None:
        self._pepper = secrets.token_bytes(32)
        self._nobody = secrets.token_bytes(32)
        self._owners: dict[bytes, tuple[bytes, str]] = {}
        for tenant in sorted(digests):
            for entry in digests[tenant]:
                self._owners.setdefault(self._slot(entry), (entry, tenant))

    def owner(self, key: str) -> str | None:
        """Return the tenant that owns a key, or None if the key is unknown."""
        given = digest(key[: MAX_KEY + 1])
        entry, tenant = self._owners.get(self._slot(given), (self._nobody, ""))
        return tenant if hmac.compare_digest(entry, given) else None

    def _slot(self, key: bytes) -> bytes:
        return hmac.digest(self._pepper, key, "sha256")


def load_keys(folder: Path, last: Mapping[str, Digests]) -> TenantKeys:
    """Read all tenants' key files from a folder.

    Args:
        folder: folder with one file per tenant.
        last: the previous digests by tenant. A tenant keeps them if its file is invalid.
    """
    try:
        paths = sorted(p for p in folder.iterdir() if p.name[0] != "." and p.is_file())
    except OSError as error:
        return TenantKeys(last, (f"{folder}: {error.strerror}; mount the Secret with the keys",))

    digests: dict[str, Digests] = {}
    problems: list[str] = []
    for path in paths:
        try:
            digests[path.name] = _read(path)
        except ValueError as error:
            problems.append(f"{path}: {error}")
            if path.name in last:
                digests[path.name] = last[path.name]
    return TenantKeys(digests, (*problems, *_duplicates(digests)))


def _read(path: Path) -> Digests:
    """Return the key digests in a tenant's file.

    Raises:
        ValueError: the file is invalid. The message has the line number but reveals no key.
    """
    if not TENANT_NAME.fullmatch(path.name):
        raise ValueError("not a tenant's name; use lower-case letters, digits, '-', '_' and '.'")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"longer than {MAX_FILE_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None  # the error would show the bytes
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error

    digests: list[bytes] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        try:
            digests.append(read_entry(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return tuple(digests)


def _duplicates(digests: Mapping[str, Digests]) -> list[str]:
    """Return a message for each key that two tenants share.

    The key belongs to the tenant whose name sorts first.
    """
    owners: dict[bytes, str] = {}
    problems = []
    for tenant in sorted(digests):
        for key in digests[tenant]:
            owner = owners.setdefault(key, tenant)
            if owner != tenant:
                problems.append(f"{tenant} has a key that {owner} has; it counts as {owner}'s")
    return problems
