"""Decode attention cut into splits of context, as arithmetic: how many, and what they take.

A split's result is a head's worth of float32 and the logarithm of its softmax's sum.
"""

from ullage_engine.models.geometry import ModelGeometry

TARGET_PROGRAMS = 1024
"""Programs that keep a large GPU busy: 132 multiprocessors of an H200 with 4 to 8 each."""

MAX_SPLITS = 64
"""Results of one head that are merged in registers."""

SPLIT_TOKENS = 128
"""Context below which a split costs more than it saves."""


def num_splits(rows: int, num_kv_heads: int, context: int) -> int:
    """Splits of the context of `rows` sequences with room for `context` tokens; a power of two.

    It depends on shapes alone, not on lengths, so that a captured graph stays valid.
    """
    wanted = min(MAX_SPLITS, TARGET_PROGRAMS // (rows * num_kv_heads), -(-context // SPLIT_TOKENS))
    return 1 << (max(1, wanted).bit_length() - 1)


def partial_elements(geometry: ModelGeometry) -> int:
    """Elements of float32 for the splits of any step.

    Split decodes are at most TARGET_PROGRAMS programs of `group_size` query heads each; a decode in
    one piece writes its result directly.
    """
    return TARGET_PROGRAMS * geometry.group_size * (geometry.head_dim + 1)
