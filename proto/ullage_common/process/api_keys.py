"""API keys, and the entries that represent them in files.

A key has 256 random bits, so nobody can find the key from its SHA-256 by brute force. A slow hash
would only slow down every request. Files store an *entry*: `sha256:` and 64 hexadecimal digits.
"""

import hashlib
import re
import secrets

PREFIX = "sk-ullage-"
MIN_KEY = 16
"""Minimum number of characters in a key, because shorter hand-made keys can be guessed."""
MAX_KEY = 512
HASH_PREFIX = "sha256:"
TENANT_NAME = re.compile(r"[a-z0-9]([-a-z0-9_.]{0,61}[a-z0-9])?")
"""Matches names that are valid as a Secret's key, as a file name and as a metric label."""
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_KEY = re.compile(r"[!-~]+")


def new_key() -> str:
    """Generate a random key."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> bytes:
    """Return the SHA-256 of a key (32 bytes)."""
    return hashlib.sha256(key.encode()).digest()


def entry(key: str) -> str:
    """Return the entry for a key, which is one line of a Secret."""
    return HASH_PREFIX + digest(key).hex()


def read_entry(line: str) -> bytes:
    """Return the key's digest from a line of a Secret, which is an entry or a plain key.

    Raises:
        ValueError: the line is neither an entry nor a key. The message does not contain the line.
    """
    if line.startswith(HASH_PREFIX):
        if not _HASH.fullmatch(line):
            raise ValueError("sha256: is not followed by 64 lower-case hexadecimal digits")
        return bytes.fromhex(line.removeprefix(HASH_PREFIX))
    if not _KEY.fullmatch(line):
        raise ValueError("a key has spaces or characters that are not printable ASCII")
    if not MIN_KEY <= len(line) <= MAX_KEY:
        raise ValueError(
            f"a key has {len(line)} characters, not {MIN_KEY} to {MAX_KEY}; "
            "make one with `ullage key new`"
        )
    return digest(line)
