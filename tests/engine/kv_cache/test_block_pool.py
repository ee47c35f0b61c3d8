"""The block pool against a model of it: sets of ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kv_cache.block_pool import BlockPool, PoolExhaustedError

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 9)), max_size=60
)


@given(num_blocks=st.integers(0, 24), operations=OPERATIONS)
@settings(max_examples=100, deadline=None)
def test_blocks_are_never_lost_doubled_or_freed_early(
    num_blocks: int, operations: list[tuple[str, int]]
) -> None:
    pool = BlockPool(num_blocks, 16)
    tables: list[list[int]] = []
    for name, number in operations:
        if name == "allocate" and number <= pool.num_free:
            tables.append(pool.allocate(number))
        elif name == "share" and tables:
            tables.append(list(tables[number % len(tables)]))
            pool.share(tables[-1])
        elif name == "free" and tables:
            pool.free(tables.pop(number % len(tables)))
        pool.check_integrity(tables)
    assert pool.num_blocks - pool.num_free == len({block for table in tables for block in table})


def test_a_growing_sequence_keeps_a_consecutive_run() -> None:
    pool = BlockPool(16, 16)
    first = pool.allocate(3)
    second = pool.allocate(2)
    pool.free(second)
    assert pool.allocate(2, after=first[-1]) == [3, 4]


def test_a_block_in_the_middle_is_taken_when_it_follows() -> None:
    pool = BlockPool(8, 16)
    table = pool.allocate(8)
    pool.free([6, 2, 5])
    assert pool.allocate(1, after=4) == [5]
    assert pool.allocate(2, after=5) == [6, 2]
    pool.check_integrity([table])


def test_asking_for_too_much_takes_nothing() -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(2)
    with pytest.raises(PoolExhaustedError, match="3 KV blocks requested, 2 free"):
        pool.allocate(3)
    pool.check_integrity([table])
