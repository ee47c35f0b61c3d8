"""API keys, and how configuration files list them.

A key has 256 random bits, so its plain SHA-256 cannot be searched for, and a slow hash would only
slow down every request. Files store an *entry*: `sha256:` and 64 hexadecimal digits.
"""

import hashlib
import re
import secrets

PREFIX = "sk-ullage-"
MIN_KEY = 16
"""Characters: shorter keys of one's own making can be guessed."""
MAX_KEY = 512
HASH_PREFIX = "sha256:"
TENANT_NAME = re.compile(r"[a-z0-9]([-a-z0-9_.]{0,61}[a-z0-9])?")
"""Names that are a Secret's key, a file and a metric's label alike."""
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_KEY = re.compile(r"[!-~]+")


def new_key() -> str:
    """Generate a random key."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> bytes:
    """The 32 bytes that stand for a key."""
    return hashlib.sha256(key.encode()).digest()


def entry(key: str) -> str:
    """The line of a Secret that lets a key in."""
    return HASH_PREFIX + digest(key).hex()


def read_entry(line: str) -> bytes:
    """The digest that a line of a Secret means: an entry, or a key as it is.

    Raises:
        ValueError: it is neither; the message does not repeat it.
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
