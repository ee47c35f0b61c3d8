"""Affinity: the longest known beginning, in tables that never grow past their size."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.config.router import AffinitySection
from ullage_router.policy.affinity import (
    MAX_PREFIX_BLOCKS,
    PREFIX_BLOCK_TOKENS,
    Affinity,
    CacheKey,
    HashRing,
    prefix_hashes,
)

BLOCK = PREFIX_BLOCK_TOKENS


def anyone(_: str) -> bool:
    return True


def tokens(*blocks: int) -> list[int]:
    return [token for block in blocks for token in [block] * BLOCK]


def affinity(sessions: int = 10, prefixes: int = 100) -> Affinity:
    return Affinity(AffinitySection(max_sessions=sessions, max_prefixes=prefixes))


def run(known: Affinity, engine: str, *blocks: int, session: str = "", tenant: str = "") -> None:
    known.on_placed(known.cache_key(session, tokens(*blocks), tenant), engine)


def find(known: Affinity, *blocks: int, session: str = "", tenant: str = "") -> str:
    return known.find(known.cache_key(session, tokens(*blocks), tenant), anyone)


def test_hashes_are_of_whole_beginnings() -> None:
    assert prefix_hashes(tokens(1)[:-1]) == ()
    one, two = prefix_hashes(tokens(1, 2))
    assert prefix_hashes([*tokens(1), 7]) == (one,)
    assert prefix_hashes(tokens(2, 2))[1] != two
    assert len(prefix_hashes(tokens(*range(MAX_PREFIX_BLOCKS + 9)))) == MAX_PREFIX_BLOCKS


def test_the_longest_beginning_wins() -> None:
    known = affinity()
    run(known, "a", 1, 2, 3)
    run(known, "b", 1, 9)
    assert find(known, 1, 2, 3, 4) == "a"
    assert find(known, 1, 2, 8) == "a"
    assert find(known, 1, 9, 9) == "b"
    assert find(known, 1, 8) == "b"  # the last that computed the shared block
    assert find(known, 5) == ""


def test_an_unusable_engine_is_passed_over() -> None:
    known = affinity()
    run(known, "b", 1)
    run(known, "a", 2, 1)
    run(known, "a", 1, 2, session="s")
    run(known, "b", 1)
    origin = known.cache_key("s", tokens(1, 2))
    assert known.find(origin, anyone) == "a"
    assert known.find(origin, lambda engine: engine != "a") == "b"
    assert known.find(origin, lambda _: False) == ""


def test_a_session_comes_before_its_words() -> None:
    known = affinity()
    run(known, "a", 1, session="s")
    run(known, "b", 1, session="t")
    assert find(known, 1, session="s") == "a"
    assert find(known, session="t") == "b"
    assert find(known, 1, session="unknown") == "b"


def test_what_is_gone_is_forgotten() -> None:
    known = affinity()
    run(known, "a", 1, 2, session="s")
    run(known, "b", 3)
    known.remove_engine("a")
    assert (find(known, 1, 2, session="s"), find(known, 3)) == ("", "b")
    assert (known.sessions, known.prefixes) == (0, 1)


def test_the_shared_beginning_is_kept_longest() -> None:
    known = affinity(prefixes=2)
    run(known, "a", 1, 2, 3)
    assert find(known, 1, 5) == "a"
    assert known.prefixes == 2


def test_nothing_is_remembered_when_it_is_off() -> None:
    known = affinity(0, 0)
    run(known, "a", 1, 2, session="s")
    assert (known.sessions, known.prefixes, find(known, 1, session="s")) == (0, 0, "")


def test_tenants_know_nothing_of_one_another() -> None:
    known = affinity()
    run(known, "a", 1, session="s", tenant="x")
    run(known, "b", 2, session="s", tenant="y")
    assert find(known, session="s", tenant="x") == "a" == find(known, 1, tenant="x")
    assert find(known, session="s", tenant="y") == "b" == find(known, 2, tenant="y")
    assert find(known, 2, tenant="x") == find(known, 1, 2, session="s") == ""
    known.remove_engine("a")
    assert (known.sessions, find(known, session="s", tenant="y")) == (1, "b")
    known.check_integrity()


entries = st.tuples(st.sampled_from("xyz"), st.integers(0, 9))


@settings(max_examples=200, deadline=None)
@given(st.integers(3, 12), st.lists(entries, max_size=60))
def test_nobody_takes_anothers_share(size: int, puts: list[tuple[str, int]]) -> None:
    """Who keeps to an equal share loses nothing, whatever the other two do."""
    known = affinity(sessions=size)
    mine = [str(i) for i in range(size // 3)]
    for name in mine:
        run(known, "m", session=name, tenant="me")
    for tenant, name in puts:
        if tenant != "z" or size // 4 >= len(mine):  # four tenants have smaller shares
            run(known, "e", session=str(name), tenant=tenant)
        known.check_integrity()
    assert [find(known, session=name, tenant="me") for name in mine] == ["m"] * len(mine)


def test_many_tenants_fit_as_well_as_few() -> None:
    known = affinity(sessions=4)
    for i in range(20):
        run(known, "a", session="s", tenant=str(i))
        known.check_integrity()
        assert find(known, session="s", tenant=str(i)) == "a"
    assert known.sessions == 4


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(0, 6),
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(("", "s", "t", "u")),
            st.lists(st.integers(0, 3)),
        )
    ),
)
def test_memory_is_bounded_and_answers_were_true_once(
    sessions: int, prefixes: int, runs: list[tuple[str, str, list[int]]]
) -> None:
    known = affinity(sessions, prefixes)
    for engine, session, blocks in runs:
        run(known, engine, *blocks, session=session)
        known.check_integrity()
        if blocks and prefixes:
            assert find(known, *blocks) == engine
        found = find(known, 0, 1, 2)
        assert found in {"", *(e for e, _, b in runs if b[:1] == [0])}


NAMES = [f"stable/single/10.0.0.{i}:9000" for i in range(16)]
POINTS = [CacheKey(f"session {i}", (), "t").point or 0 for i in range(4000)]


@given(st.permutations(NAMES), st.sampled_from(POINTS))
def test_every_process_draws_the_same_two_engines(order: list[str], point: int) -> None:
    nearest = HashRing(order).nearest_two(point)
    assert nearest == HashRing(NAMES).nearest_two(point)
    assert len(set(nearest)) == 2


def test_an_engine_that_goes_moves_only_its_own_requests() -> None:
    before = HashRing(NAMES)
    after = HashRing(NAMES[1:])
    for point in POINTS:
        first, second = before.nearest_two(point)
        now = after.nearest_two(point)[0]
        assert now == (second if first == NAMES[0] else first)


def test_engines_have_about_equal_shares_of_the_ring() -> None:
    ring = HashRing(NAMES)
    counts = Counter(ring.nearest_two(point)[0] for point in POINTS)
    mean = len(POINTS) / len(NAMES)
    assert all(0.5 * mean < counts[name] < 1.7 * mean for name in NAMES), counts


def test_a_ring_of_few() -> None:
    assert HashRing([]).nearest_two(5) == ()
    assert HashRing(["a"]).nearest_two(5) == ("a",)


def test_who_has_a_place_on_the_ring() -> None:
    assert CacheKey("", ()).point is None
    assert CacheKey("s", (), "a").point != CacheKey("s", (), "b").point
    assert CacheKey("s", (1,)).point == CacheKey("s", (2, 3)).point
    assert CacheKey("", (1, 2)).point == CacheKey("", (1, 3)).point != CacheKey("", (2,)).point
