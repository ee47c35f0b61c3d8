"""The common beginning of two lists of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.scheduler.common_prefix import common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=200)


@given(TOKENS, TOKENS, TOKENS)
def test_it_is_as_long_as_the_lists_agree(
    shared: list[int], one: list[int], two: list[int]
) -> None:
    first = shared + one
    second = shared + two
    agree = [a == b for a, b in zip(first, second, strict=False)]
    wanted = agree.index(False) if False in agree else len(agree)
    assert common_prefix(first, second) == wanted
    assert common_prefix(second, first) == wanted
    assert common_prefix(first, first) == len(first)


def test_prompts_that_part_early_are_not_read_to_their_ends() -> None:
    class Counted(list[int]):
        num_read = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            tokens = super().__getitem__(place)
            self.num_read += len(tokens)
            return tokens

    one = Counted([*range(50), 7, *range(100_000)])
    assert common_prefix(one, [*range(50), 8, *range(100_000)]) == 50
    assert one.num_read < 250
