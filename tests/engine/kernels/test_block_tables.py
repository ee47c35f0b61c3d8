"""Rows of block tables: those of the chunks' lists, whatever happened in the steps before."""

import random

from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.kernels.block_tables import BlockTables
from ullage_engine.protocol.step_plan import Chunk


def chunk(name: str, block_ids: list[int]) -> Chunk:
    return Chunk(
        request_id=name,
        token_ids=[0],
        start=0,
        block_ids=block_ids,
        sampling=None,
        history=[],
        num_prompt_tokens=1,
    )


class Sequences:
    """Lists of block ids as a scheduler keeps them: they grow, or others take their place."""

    def __init__(self) -> None:
        self.block_ids: dict[str, list[int]] = {}

    def change(self, rng: random.Random) -> None:
        name = f"request {rng.randrange(9)}"
        held = self.block_ids.setdefault(name, [])
        kind = rng.choice(["grow", "grow", "replace", "end"])
        if kind == "grow":
            held += [rng.randrange(1000) for _ in range(rng.choice([1, 1, 2, 200]))]
        elif kind == "replace":
            self.block_ids[name] = [rng.randrange(1000) for _ in range(rng.randrange(90))]
        else:
            del self.block_ids[name]

    def step(self, rng: random.Random) -> list[Chunk]:
        names = [name for name in self.block_ids if rng.random() < 0.7]
        return [chunk(name, self.block_ids[name]) for name in names]


@given(st.randoms(use_true_random=False), st.integers(0, 12))
def test_rows_are_the_lists(rng: random.Random, num_kept: int) -> None:
    tables = BlockTables(num_kept)
    sequences = Sequences()
    for _ in range(30):
        sequences.change(rng)
        chunks = sequences.step(rng)
        rows = tables.update(chunks)
        assert len({*rows}) == len(chunks), "each its own"
        for row, each in zip(rows, chunks, strict=True):
            assert tables.table[row, : len(each.block_ids)].tolist() == each.block_ids
    assert tables.table.flags.c_contiguous


def test_only_new_entries_are_read() -> None:
    class Counted(list[int]):
        num_read = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            entries = super().__getitem__(place)
            self.num_read += len(entries)
            return entries

    tables = BlockTables(4)
    block_ids = Counted(range(100))
    for number in range(10):
        tables.update([chunk("a", block_ids)])
        block_ids.append(number)
    assert block_ids.num_read == 109


def test_a_request_id_that_comes_again_has_its_own_blocks() -> None:
    tables = BlockTables(2)
    [row] = tables.update([chunk("a", [1, 2, 3])])
    [row] = tables.update([chunk("a", [7])])
    assert tables.table[row, :1].tolist() == [7]
    [row] = tables.update([chunk("a", [7, 8, 9])])
    assert tables.table[row, :3].tolist() == [7, 8, 9]
