"""Who a key belongs to: a folder with one file a tenant, read into digests.

Each line of a file is one key or one entry (`ullage_rpc.keys`), so that a new key works before the
old one is taken away. Keys themselves are forgotten as soon as they are hashed.
"""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ullage_rpc.keys import MAX_KEY, TENANT_NAME, digest, read_entry

MAX_FILE_BYTES = 1 << 20
"""A Secret is no larger."""

Digests = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the folder says."""

    keys: Mapping[str, Digests] = field(default_factory=lambda: MappingProxyType({}))
    """Digests by tenant."""
    problems: tuple[str, ...] = ()
    """What could not be read; those tenants keep what they had."""


def load(folder: Path, last: Mapping[str, Digests]) -> Loaded:
    """Reads the folder; a file that is broken leaves its tenant the keys of `last`."""
    try:
        paths = sorted(p for p in folder.iterdir() if p.name[0] != "." and p.is_file())
    except OSError as error:
        return Loaded(last, (f"{folder}: {error.strerror}; mount the Secret with the keys",))
    keys: dict[str, Digests] = {}
    problems: list[str] = []
    for path in paths:
        try:
            keys[path.name] = _read(path)
        except ValueError as error:
            problems.append(f"{path}: {error}")
            if path.name in last:
                keys[path.name] = last[path.name]
    return Loaded(keys, (*problems, *_shared(keys)))


def _read(path: Path) -> Digests:
    """Raises ValueError with the line and no key."""
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
    found: list[bytes] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        try:
            found.append(read_entry(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return tuple(found)


def _shared(keys: Mapping[str, Digests]) -> list[str]:
    """Keys that two tenants have; they belong to the first by name."""
    owners: dict[bytes, str] = {}
    problems = []
    for tenant in sorted(keys):
        for key in keys[tenant]:
            owner = owners.setdefault(key, tenant)
            if owner != tenant:
                problems.append(f"{tenant} has a key that {owner} has; it counts as {owner}'s")
    return problems


class KeyRing:
    """Finds a key's tenant in a time that says nothing about other keys.

    Digests are indexed by a keyed hash whose secret is this object's own, so what the index
    compares cannot be steered from outside; the digest found is then compared in constant time.
    """

    def __init__(self, keys: Mapping[str, Digests]) -> None:
        self._pepper = secrets.token_bytes(32)
        self._nobody = secrets.token_bytes(32)
        self._owners: dict[bytes, tuple[bytes, str]] = {}
        for tenant in sorted(keys):
            for known in keys[tenant]:
                self._owners.setdefault(self._place(known), (known, tenant))

    def owner(self, key: str) -> str | None:
        """The tenant of a key; None when nobody has it."""
        given = digest(key[: MAX_KEY + 1])
        known, tenant = self._owners.get(self._place(given), (self._nobody, ""))
        return tenant if hmac.compare_digest(known, given) else None

    def _place(self, key: bytes) -> bytes:
        return hmac.digest(self._pepper, key, "sha256")
