"""What loads are predicted to take, and which blocks are loaded rather than computed."""

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.kv_tiers import cost
from ullage_engine.kv_tiers.cost import LoadSpeed, Needed, seconds_to_load, split

TIERS = ("file", "remote")
BLOCKS = st.lists(
    st.one_of(
        st.sampled_from([Needed(tier) for tier in TIERS]),
        st.floats(0, 20).map(lambda seconds: Needed(ready_s=seconds)),
    ),
    max_size=30,
)
SPEEDS = st.fixed_dictionaries(
    {tier: st.tuples(st.floats(0, 5), st.floats(0, 3)) for tier in TIERS}
)
SECONDS = st.floats(0, 10)


def loads(blocks: list[Needed], speeds: dict[str, tuple[float, float]]) -> list[float]:
    def predict(tier: str) -> Callable[[int], float]:
        latency_s, block_s = speeds[tier]
        return lambda num_blocks: latency_s + num_blocks * block_s

    return seconds_to_load(blocks, predict)


@given(BLOCKS, SPEEDS, SECONDS, SECONDS)
def test_the_request_is_never_later_than_if_it_computed_all(
    blocks: list[Needed],
    speeds: dict[str, tuple[float, float]],
    compute_s: float,
    start_s: float,
) -> None:
    load_s = loads(blocks, speeds)
    num_computed = split(load_s, compute_s, start_s)
    assert 0 <= num_computed <= len(blocks)
    done_s = max(start_s + num_computed * compute_s, load_s[num_computed])
    assert done_s <= start_s + len(blocks) * compute_s
    if num_computed:  # one block more to load would have been waited for
        earlier = num_computed - 1
        assert load_s[earlier] > start_s + earlier * compute_s


@given(BLOCKS, SPEEDS, SECONDS, SECONDS, st.floats(1, 10))
def test_a_faster_tier_never_computes_more(
    blocks: list[Needed],
    speeds: dict[str, tuple[float, float]],
    compute_s: float,
    start_s: float,
    factor: float,
) -> None:
    slower = {tier: (latency * factor, block * factor) for tier, (latency, block) in speeds.items()}
    fast = loads(blocks, speeds)
    slow = loads(blocks, slower)
    assert split(fast, compute_s, start_s) <= split(slow, compute_s, start_s)
    assert split(slow, compute_s, start_s + 1) <= split(slow, compute_s, start_s)


@given(BLOCKS, SPEEDS)
def test_less_to_load_takes_no_longer(
    blocks: list[Needed], speeds: dict[str, tuple[float, float]]
) -> None:
    seconds = loads(blocks, speeds)
    assert seconds == sorted(seconds, reverse=True)
    assert len(seconds) == len(blocks) + 1
    assert seconds[-1] == 0


def test_what_is_needed_beside_the_last_blocks_is_loaded_with_any() -> None:
    blocks = [Needed("file")] * 4
    load_s = seconds_to_load(blocks, lambda _: float, [Needed("file")] * 2)
    assert load_s == [6, 5, 4, 3, 0]
    assert split(load_s, 1.0) == 3
    assert split(load_s, 0.5) == 4, "nothing is loaded"


class Clock:
    """A clock that is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def load(speed: LoadSpeed, clock: Clock, num_bytes: int, seconds: float) -> None:
    number = speed.begin(num_bytes)
    clock.now += seconds
    speed.finish(number, num_bytes)


@given(
    st.floats(1e6, 1e10),
    st.floats(0, 0.5),
    st.lists(st.integers(1, 1000), min_size=40, max_size=40),
)
def test_the_prediction_comes_to_what_loads_take(
    bytes_per_s: float, latency_s: float, sizes: list[int]
) -> None:
    clock = Clock()
    speed = LoadSpeed(clock)
    for size in [*sizes, *[500] * 40]:
        num_bytes = size * 100_000
        load(speed, clock, num_bytes, latency_s + num_bytes / bytes_per_s)
    expected = latency_s + 50_000_000 / bytes_per_s
    assert math.isclose(speed.predict().seconds(50_000_000), expected, rel_tol=0.02)


def test_loads_wait_for_those_before_them() -> None:
    clock = Clock()
    speed = LoadSpeed(clock)
    one = speed.predict().seconds(1_000_000)
    number = speed.begin(1_000_000)
    assert math.isclose(speed.predict().seconds(1_000_000), 2 * one)
    clock.now += one / 2
    assert math.isclose(speed.predict().seconds(1_000_000), 1.5 * one)
    clock.now += one / 2
    speed.finish(number, 1_000_000)
    assert math.isclose(speed.predict().seconds(1_000_000), one)


def test_loads_at_a_time_are_measured_one_behind_the_other() -> None:
    clock = Clock()
    speed = LoadSpeed(clock)
    numbers = [speed.begin(1_000_000) for _ in range(50)]
    for number in numbers:
        clock.now += 0.5
        speed.finish(number, 1_000_000)
    assert math.isclose(speed.predict().seconds(1_000_000), 0.5, rel_tol=0.05)


@given(st.floats(0.1, 3600))
def test_a_load_that_hangs_makes_others_wait(seconds: float) -> None:
    clock = Clock()
    speed = LoadSpeed(clock)
    speed.begin(1)
    own = speed.latency_s
    clock.now += seconds
    assert speed.predict().seconds(1) >= seconds - own


def test_what_was_not_loaded_from_for_long_is_to_be_measured() -> None:
    clock = Clock()
    speed = LoadSpeed(clock)
    assert speed.is_to_measure, "it never was"
    number = speed.begin(1_000_000)
    assert not speed.is_to_measure, "it is about to be"
    clock.now += 5
    speed.finish(number, 0)
    assert speed.predict().seconds(1_000_000) > 4
    assert not speed.is_to_measure
    clock.now += cost.PROBE_S
    assert speed.is_to_measure
    load(speed, clock, 1_000_000, 0.002)
    assert not speed.is_to_measure
    assert speed.predict().seconds(1_000_000) < 0.5


@given(st.floats(0, 1), st.integers(0, 999_999))
def test_what_fails_at_once_is_not_quick(seconds: float, num_loaded: int) -> None:
    clock = Clock()
    speed = LoadSpeed(clock)
    load(speed, clock, 1_000_000, 1.0)
    before = speed.predict().seconds(1_000_000)
    number = speed.begin(1_000_000)
    clock.now += seconds
    speed.finish(number, num_loaded)
    assert speed.predict().seconds(1_000_000) >= before - 1e-9


@given(st.integers(1000, 10**9), st.integers(2, 3))
def test_loads_of_one_size_are_seen_as_such(num_bytes: int, factor: int) -> None:
    clock = Clock()
    speed = LoadSpeed(clock)
    for _ in range(3):
        load(speed, clock, num_bytes, 1.0)
        load(speed, clock, factor * num_bytes, 1.0)
        assert speed.is_of_one_size
    load(speed, clock, 8 * num_bytes, 1.0)
    assert not speed.is_of_one_size
    for _ in range(12):
        load(speed, clock, 8 * num_bytes, 1.0)
    assert speed.is_of_one_size, "the others have faded"
