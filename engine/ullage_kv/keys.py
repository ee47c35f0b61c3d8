"""Content keys of KV blocks.

A block's key is a chained SHA-256 hash over all tokens up to the end of the block. The hash chain
starts from a namespace, so that two blocks have the same key only if they are interchangeable. All
keys in a chain start with the same two bytes, which come from the key of its first block. An index
can therefore group the blocks of a chain by their keys alone.
"""

import array
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

KEY_BYTES = 32
CHAIN_BYTES = 2
"""Number of leading bytes that all keys in a chain have in common."""

_FORMAT = 1
"""Version of the key format. A new version invalidates all stored blocks."""


def namespace(facts: Mapping[str, object]) -> bytes:
    """Return a 32-byte digest of everything, except tokens, that determines a block's contents.

    Args:
        facts: model, revision, dtype, geometry and everything else that affects a block's contents,
            as strings, numbers and lists of these.
    """
    text = json.dumps({"format": _FORMAT, **facts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def block_keys(
    space: bytes, token_ids: Sequence[int], block_tokens: int, salt: str = ""
) -> list[bytes]:
    """Return the keys of all complete blocks of `block_tokens` tokens in a text.

    Blocks with different namespaces or salts never have the same key.
    """
    return list(extend_keys(space, [], token_ids, block_tokens, salt))


def extend_keys(
    space: bytes,
    keys: Sequence[bytes],
    token_ids: Sequence[int],
    block_tokens: int,
    salt: str = "",
) -> Iterator[bytes]:
    """Yield the keys of a text's remaining complete blocks, after the blocks with `keys`."""
    parent = keys[-1] if keys else hashlib.sha256(space + salt.encode()).digest()
    chain = parent[:CHAIN_BYTES] if keys else b""
    start = len(keys) * block_tokens
    numbers = array.array("I", token_ids[start : len(token_ids) // block_tokens * block_tokens])
    if sys.byteorder == "big":
        numbers.byteswap()
    data = memoryview(numbers).cast("B")
    size = block_tokens * numbers.itemsize
    for offset in range(0, len(data), size):
        digest = hashlib.sha256(parent + data[offset : offset + size]).digest()
        chain = chain or digest[:CHAIN_BYTES]
        parent = chain + digest[CHAIN_BYTES:]
        yield parent


def part_key(key: bytes, part: str) -> bytes:
    """Return the key of a separately stored part of a block, such as its sliding-window layers."""
    return key[:CHAIN_BYTES] + hashlib.sha256(key + part.encode()).digest()[CHAIN_BYTES:]
