"""What a request is priced: whole blocks, shared where samples share them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage_common.request_cost import (
    UNBOUNDED_TOKENS,
    CacheGroup,
    MemoryProfile,
    charged_output,
    most_tokens,
    predict,
    request_blocks,
    sample_blocks,
)
from ullage_common.wire import memory_profile

SMOLLM2 = MemoryProfile(16, (CacheGroup(23_040),))
sizes = st.integers(0, 1 << 30)
token_bytes = st.integers(1, 1 << 20)
growing = st.builds(CacheGroup, token_bytes)
sliding = st.builds(CacheGroup, token_bytes, st.sampled_from((128, 4096)))
states = st.builds(CacheGroup, token_bytes, state_blocks=st.integers(1, 4))


def profiles_of(groups: st.SearchStrategy[list[CacheGroup]]) -> st.SearchStrategy[MemoryProfile]:
    return st.builds(MemoryProfile, st.integers(1, 64), groups.map(tuple), *[sizes] * 6)


native_profiles = profiles_of(
    st.builds(lambda group, windows: [group, *windows], growing, st.lists(sliding, max_size=1))
)
"""Of the engine's own models: one group that grows, and at most one that slides."""
profiles = native_profiles | st.builds(
    replace,
    profiles_of(st.lists(growing | sliding | states, min_size=1, max_size=6)),
    copies_shared_block=st.booleans(),
    decode_tokens=st.integers(0, 4),
)
tokens = st.integers(1, 100_000)
samples = st.integers(1, 16)


def test_smollm2() -> None:
    demand = predict(SMOLLM2, prompt_tokens=180, max_tokens=64, expected_output=256)
    assert demand.tokens == 244
    assert demand.kv_bytes == 256 * 23_040


def test_samples_share_the_whole_blocks_of_their_prompt() -> None:
    demand = predict(SMOLLM2, prompt_tokens=180, max_tokens=64, expected_output=256, samples=4)
    assert demand.kv_bytes == (11 + 4 * 5 + 1) * 16 * 23_040


def test_expected_output_bounds_the_charge() -> None:
    long = predict(SMOLLM2, prompt_tokens=30, max_tokens=32_768, expected_output=98)
    assert long.kv_bytes == 128 * 23_040


def test_an_unknown_expectation_charges_one_token_more_than_there_is() -> None:
    assert predict(SMOLLM2, 16, 100, expected_output=0).tokens == 17
    assert charged_output(100, expected_output=0, produced=7) == 8
    assert charged_output(7, expected_output=0, produced=7) == 7


HALF = 12 * 2 * 8 * 64 * 2
"""Bytes of a token in the 12 layers of gpt-oss-20b with a window of 128 tokens, as in the rest."""
GPT_OSS = MemoryProfile(
    16, (CacheGroup(HALF), CacheGroup(HALF, window_tokens=128)), prefill_chunk_tokens=512
)


def test_a_window_is_priced_as_what_it_and_a_chunk_hold() -> None:
    """512 blocks of the layers that see everything, 41 of the others: 207 MiB of 384."""
    demand = predict(GPT_OSS, 8191, 1, 1)
    assert demand.kv_bytes == (512 + 41) * 16 * HALF
    assert demand.kv_bytes >> 20 == 207
    assert GPT_OSS.growing_bytes_per_token == HALF
    # What is no longer than a window is held whole in both.
    assert predict(GPT_OSS, 100, 28, 28).kv_bytes == 2 * 8 * 16 * HALF


def test_samples_have_windows_of_their_own() -> None:
    whole = predict(GPT_OSS, 1000, 100, 100).kv_bytes // GPT_OSS.block_bytes
    assert whole == 69 + 41
    both = predict(GPT_OSS, 1000, 100, 100, samples=2).kv_bytes // GPT_OSS.block_bytes
    # 7 blocks after the shared ones, a window, and in each table the original of a copied block.
    assert both == whole + 7 + 41 + 2


@settings(max_examples=80, deadline=None)
@given(native_profiles, tokens, tokens, tokens)
def test_a_demand_is_whole_blocks_and_no_block_too_many(
    profile: MemoryProfile, prompt: int, most: int, expected: int
) -> None:
    demand = predict(profile, prompt, most, expected)
    blocks, rest = divmod(demand.kv_bytes, profile.block_bytes)
    assert rest == 0
    blocks -= min(sum(most for _, most in profile.windows), blocks // 2)
    assert (blocks - 1) * profile.block_tokens < demand.tokens <= blocks * profile.block_tokens


@settings(max_examples=80, deadline=None)
@given(native_profiles, tokens, tokens, samples)
def test_the_price_is_that_of_one_growing_and_one_sliding_table(
    profile: MemoryProfile, prompt: int, output: int, samples: int
) -> None:
    """The formula of the module's docstring, written out."""
    size = profile.block_tokens
    chunk = profile.prefill_chunk_tokens
    length = prompt + output
    shared = (prompt - 1) // size
    original = 1 if samples > 1 and prompt > 1 else 0
    grown = shared + samples * (-(-length // size) - shared) + original
    sliding = 0
    for window in (group.window_tokens for group in profile.groups if group.window_tokens):
        most = -(-(window + chunk - 2) // size) + 1
        slid = samples * min(most, -(-length // size)) + original
        sliding = slid if length > window else grown
    assert request_blocks(profile, prompt, length, samples) == grown + sliding


def most_held(profile: MemoryProfile, prompt: int, length: int) -> int:
    """Most blocks of a sequence over all ways to split its prompt into steps, tried one by one.

    A step gives back what lies before the window of its first token, then takes the blocks of its
    tokens.
    """
    size = profile.block_tokens
    most = 0
    windows = [each.window_tokens for each in profile.groups if not each.state_blocks]
    for start in range(length):
        skipped = sum(max(0, start - window + 1) // size for window in windows if window)
        end = length
        step = profile.decode_tokens
        if start < prompt:
            end = prompt
            step = profile.prefill_chunk_tokens
        for stored in range(start + 1, min(start + step, end) + 1):
            most = max(most, len(windows) * -(-stored // size) - skipped)
    return most + profile.state_blocks


@settings(max_examples=100, deadline=None)
@given(
    size=st.sampled_from((1, 2, 3, 4, 8, 16)),
    groups=st.lists(
        st.builds(CacheGroup, st.just(1), st.just(0) | st.integers(1, 60))
        | st.builds(CacheGroup, st.just(1), state_blocks=st.integers(1, 3)),
        min_size=1,
        max_size=4,
    ),
    chunk=st.integers(1, 40),
    prompt=st.integers(1, 100),
    output=st.integers(0, 60),
)
def test_the_price_is_the_most_held_over_all_ways_to_split_a_prompt(
    size: int, groups: list[CacheGroup], chunk: int, prompt: int, output: int
) -> None:
    profile = MemoryProfile(
        size,
        tuple(groups),
        prefill_chunk_tokens=chunk,
        copies_shared_block=False,
        decode_tokens=1,
    )
    length = prompt + output
    assert request_blocks(profile, prompt, length) == most_held(profile, prompt, length)
    # One that goes on after it was preempted has all its tokens as a prompt.
    assert sample_blocks(profile, length) == most_held(profile, length, length)
    assert sample_blocks(profile, length, 0) <= request_blocks(profile, prompt, length)


@settings(max_examples=80, deadline=None)
@given(profiles, tokens, tokens, samples)
def test_every_group_takes_blocks_of_the_pool(
    profile: MemoryProfile, prompt: int, output: int, samples: int
) -> None:
    alone = [
        request_blocks(replace(profile, groups=(group,)), prompt, prompt + output, samples)
        for group in profile.groups
    ]
    price = request_blocks(profile, prompt, prompt + output, samples)
    if profile.decode_tokens:
        # Those with windows may hold most before those that grow do.
        assert max(alone) <= price <= sum(alone)
    else:
        assert price == sum(alone)


def test_five_sliding_groups_and_states_beside_one_that_grows() -> None:
    """Sequences of 1,100 tokens: 69 blocks of one group, 41 of each that slides, 2 of states."""
    sliding = (CacheGroup(HALF, window_tokens=128),) * 5
    profile = MemoryProfile(
        16,
        (CacheGroup(HALF), *sliding, CacheGroup(0, state_blocks=2)),
        prefill_chunk_tokens=512,
        copies_shared_block=False,
    )
    assert request_blocks(profile, 1000, 1100) == 69 + 5 * 41 + 2
    # 7 blocks of its own behind those of the prompt, and no original of a copied block.
    assert request_blocks(profile, 1000, 1100, 2) == 69 + 7 + 2 * (5 * 41 + 2)
    assert profile.growing_bytes_per_token == HALF


@pytest.mark.parametrize(
    "groups", [(), (CacheGroup(64, state_blocks=3),), (CacheGroup(64, window_tokens=128),)]
)
def test_a_sequence_without_a_growing_group_is_bounded_by_what_it_always_holds(
    groups: tuple[CacheGroup, ...],
) -> None:
    profile = MemoryProfile(16, groups, prefill_chunk_tokens=96)
    whole = request_blocks(profile, 1, 100_000) * profile.block_bytes
    assert request_blocks(profile, 1, 1_000_000) * profile.block_bytes == whole
    assert most_tokens(profile, whole) == UNBOUNDED_TOKENS
    if whole:
        assert most_tokens(profile, whole - 1) < 1000


@settings(max_examples=80, deadline=None)
@given(profiles, st.integers(0, 1 << 40), tokens, samples)
def test_most_tokens_is_the_inverse(
    profile: MemoryProfile, available: int, prompt: int, samples: int
) -> None:
    longest = most_tokens(profile, available, prompt, samples)
    output = longest - prompt
    if output > 0:
        assert predict(profile, prompt, output, output, samples).kv_bytes <= available
    if longest == UNBOUNDED_TOKENS:
        return
    longer = max(1, output + 1)
    assert predict(profile, prompt, longer, longer, samples).kv_bytes > available


@settings(max_examples=80, deadline=None)
@given(profiles, tokens, tokens, samples, tokens)
def test_more_tokens_or_samples_never_cost_less(
    profile: MemoryProfile, prompt: int, output: int, samples: int, more: int
) -> None:
    block = profile.block_tokens
    price = request_blocks(profile, prompt, prompt + output, samples)
    # Each sample has the prompt's last block for itself until it is full: grow by whole blocks.
    longer = more if samples == 1 else more * block
    assert price <= request_blocks(profile, prompt, prompt + output + more, samples)
    assert price <= request_blocks(profile, prompt + longer, prompt + longer + output, samples)
    assert price <= request_blocks(profile, prompt, prompt + output, samples + more)


@given(profiles)
def test_a_profile_survives_the_wire(profile: MemoryProfile) -> None:
    assert memory_profile.from_wire(memory_profile.to_wire(profile)) == profile
