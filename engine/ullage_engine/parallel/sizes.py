"""Bytes that ranks take for one another: arithmetic, so that the ledger reserves before."""

from ullage_engine.models.geometry import ModelGeometry
from ullage_engine.parallel.layout import RankLayout, rank_geometry


def transfer_bytes(layout: RankLayout, rank: int, max_rows: int, hidden: int, itemsize: int) -> int:
    """Buffers of one rank: partial sums, rows received and rows sent."""
    buffers = (layout.tensor > 1) + (not layout.is_first(rank)) + (not layout.is_last(rank))
    return buffers * max_rows * hidden * itemsize


def group_kv_bytes(geometry: ModelGeometry, layout: RankLayout, itemsize: int) -> tuple[int, int]:
    """KV bytes of a token on all ranks together, heads that several keep counted each time; and
    among how many ranks they may be taken as divided evenly, so that none has a larger share."""
    parts = [rank_geometry(geometry, layout, rank) for rank in range(layout.world)]
    return _shared([part.kv_bytes_per_token(itemsize) for part in parts])


def group_state_bytes(
    geometry: ModelGeometry, layout: RankLayout, itemsize: int
) -> tuple[int, int]:
    """The same of one sequence's convolution state."""
    parts = [rank_geometry(geometry, layout, rank) for rank in range(layout.world)]
    return _shared([part.state_bytes(itemsize) for part in parts])


def _shared(shares: list[int]) -> tuple[int, int]:
    return sum(shares), max(1, sum(shares) // max(1, *shares))
