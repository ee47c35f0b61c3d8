"""A content-addressed store for the KV cache of language models.

The store keeps blocks in shared host memory, with copies in files and on other hosts. It only deals
with keys and bytes, and knows nothing about models or devices. See docs/guide/kv-store.md.
"""

from ullage_kv.arena import Arena, ArenaError
from ullage_kv.file_io import FileTierError
from ullage_kv.file_tier import FileTier
from ullage_kv.keys import block_keys, extend_keys, namespace, part_key
from ullage_kv.results import FAILURES, Result, Status
from ullage_kv.store import Block, Store
from ullage_kv.tier import LowerTier, TierStats, Transfer

__all__ = [
    "FAILURES",
    "Arena",
    "ArenaError",
    "Block",
    "FileTier",
    "FileTierError",
    "LowerTier",
    "Result",
    "Status",
    "Store",
    "TierStats",
    "Transfer",
    "block_keys",
    "extend_keys",
    "namespace",
    "part_key",
]
