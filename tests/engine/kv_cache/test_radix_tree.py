"""The prefix tree against a model of it: a dictionary of prefixes."""

import itertools
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kv_cache.radix_tree import Path, RadixTree

SIZE = 2


def grow(tree: RadixTree, tokens: list[int], first_block: int) -> list[int]:
    """Adds a path; its blocks, numbered on from `first_block` where they are new."""
    path: list[int] = []
    for start in range(0, len(tokens), SIZE):
        parent = path[-1] if path else None
        key = tuple(tokens[start : start + SIZE])
        path.append(tree.insert(parent, key, first_block + start // SIZE))
    return path


def release(tree: RadixTree, path: list[int], used: int) -> None:
    for block in path:
        tree.touch(block, used)
        tree.set_reclaimable(block)


def evict_all(tree: RadixTree) -> list[int]:
    order = []
    while (block := tree.evict()) is not None:
        tree.check_integrity()
        order.append(block)
    return order


@given(prompts=st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=8))
@settings(max_examples=100, deadline=None)
def test_it_finds_the_longest_known_beginning(prompts: list[list[int]]) -> None:
    tree = RadixTree(SIZE)
    known: dict[tuple[int, ...], int] = {}
    for number, prompt in enumerate(prompts):
        longest = 0
        for length in range(SIZE, len(prompt), SIZE):
            if tuple(prompt[:length]) not in known:
                break
            longest = length
        found = tree.match(prompt)
        assert found == [known[tuple(prompt[:end])] for end in range(SIZE, longest + 1, SIZE)]
        whole = len(prompt) // SIZE * SIZE
        path = grow(tree, prompt[:whole], 100 * number)
        for index, block in enumerate(path):
            assert known.setdefault(tuple(prompt[: (index + 1) * SIZE]), block) == block
        tree.check_integrity()
    assert tree.num_blocks == len(known)


@given(
    growing=st.lists(st.integers(0, 1), min_size=1, max_size=14),
    others=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=14), max_size=6),
    rng=st.randoms(use_true_random=False),
    window=st.sampled_from([0, 3]),
)
@settings(max_examples=200, deadline=None)
def test_a_match_that_goes_on_from_the_last_one_finds_the_same(
    growing: list[int], others: list[list[int]], rng: Random, window: int
) -> None:
    tree = RadixTree(SIZE, window)
    path: Path = []
    blocks = itertools.count()
    for _ in range(12):
        kind = rng.choice(["grow", "evict", "evict branch", "window"])
        prompt = rng.choice([growing, *others])
        whole = prompt[: rng.randrange(len(prompt) + 1) // SIZE * SIZE]
        if kind == "grow":
            first = next(blocks) * 100
            release(tree, grow(tree, whole, first), first)
        elif kind == "evict":
            tree.evict()
        elif cached := tree.match([*whole, 0]):
            first = cached[0]
            last = cached[-1]
            if kind == "evict branch":
                if rng.random() < 0.5:
                    tree.set_in_use(first)
                tree.evict_branch(first)
            elif window and tree.window_block(last) is None:
                tree.add_window(last, 100_000 + next(blocks))
        seen = growing[: rng.randrange(len(path) * SIZE, len(growing)) + 1]
        assert tree.match(seen, path=path) == tree.match(seen)
        tree.check_integrity()


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), min_size=1, max_size=8),
    pinned=st.integers(0, 7),
    busy=st.integers(0, 7),
)
@settings(max_examples=100, deadline=None)
def test_what_is_idle_and_not_pinned_can_all_be_evicted_leaves_first(
    prompts: list[list[int]], pinned: int, busy: int
) -> None:
    tree = RadixTree(SIZE)
    paths = [
        grow(tree, prompt[: len(prompt) // SIZE * SIZE], 100 * number)
        for number, prompt in enumerate(prompts)
    ]
    for used, path in enumerate(paths):
        release(tree, path, used)
    for block in paths[busy % len(paths)]:
        tree.set_in_use(block)
    for block in paths[pinned % len(paths)]:
        tree.pin(block)
    kept = {*paths[busy % len(paths)], *paths[pinned % len(paths)]}
    every = {block for path in paths for block in path}
    assert tree.num_reclaimable == len(every) - len(set(paths[busy % len(paths)]))
    assert set(evict_all(tree)) == every - kept
    for block in paths[pinned % len(paths)]:
        tree.unpin(block)
    assert set(evict_all(tree)) == kept - set(paths[busy % len(paths)])
    tree.check_integrity()


def test_the_last_token_is_never_found() -> None:
    tree = RadixTree(SIZE)
    path = grow(tree, [1, 2, 3, 4], 0)
    assert tree.match([1, 2, 3, 4]) == path[:1]
    assert tree.match([1, 2, 3, 4, 5]) == path


def test_the_least_recently_used_branch_goes_first_from_its_end() -> None:
    tree = RadixTree(SIZE)
    old = grow(tree, [1, 1, 2, 2], 0)
    new = grow(tree, [3, 3, 4, 4], 10)
    release(tree, old, 1)
    release(tree, new, 2)
    assert evict_all(tree) == [1, 0, 11, 10]


def test_use_makes_a_branch_recent_again() -> None:
    tree = RadixTree(SIZE)
    old = grow(tree, [1, 1, 2, 2], 0)
    new = grow(tree, [3, 3, 4, 4], 10)
    release(tree, old, 1)
    release(tree, new, 2)
    for block in old:
        tree.set_in_use(block)
    release(tree, old, 3)
    assert evict_all(tree) == [11, 10, 1, 0]


def test_a_prefix_used_by_itself_since_outlives_what_is_older() -> None:
    tree = RadixTree(SIZE)
    stem = grow(tree, [1, 1], 0)
    branch = grow(tree, [1, 1, 2, 2], 1)
    other = grow(tree, [5, 5], 10)
    release(tree, branch, 1)
    release(tree, other, 2)
    release(tree, stem, 3)
    assert evict_all(tree) == [2, 10, 0]


def test_the_same_tokens_are_kept_once() -> None:
    tree = RadixTree(SIZE)
    assert tree.insert(None, (1, 2), 7) == 7
    assert tree.insert(None, (1, 2), 8) == 7
    assert 8 not in tree
