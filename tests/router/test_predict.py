"""The router's arithmetic: the engine's formula, in whole blocks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_router.predict import Profile, most_tokens, predict

SMOLLM2 = Profile(block_tokens=16, bytes_per_token=23_040)
profiles = st.builds(Profile, st.integers(1, 64), st.integers(1, 1 << 20))
tokens = st.integers(1, 100_000)
samples = st.integers(1, 16)


def test_smollm2() -> None:
    demand = predict(SMOLLM2, prompt_tokens=180, max_tokens=64, expected_output=256)
    assert demand.tokens == 244
    assert demand.kv_bytes == 256 * 23_040
    assert demand.total == demand.kv_bytes


def test_samples_share_the_whole_blocks_of_their_prompt() -> None:
    demand = predict(SMOLLM2, prompt_tokens=180, max_tokens=64, expected_output=256, samples=4)
    assert demand.kv_bytes == (11 + 4 * 5 + 1) * 16 * 23_040


def test_expected_output_bounds_the_charge() -> None:
    long = predict(SMOLLM2, prompt_tokens=30, max_tokens=32_768, expected_output=98)
    assert long.kv_bytes == 128 * 23_040


def test_an_unknown_expectation_charges_one_token() -> None:
    assert predict(SMOLLM2, 16, 100, expected_output=0).tokens == 17


@settings(max_examples=80, deadline=None)
@given(profiles, tokens, tokens, tokens)
def test_a_demand_is_whole_blocks_and_no_block_too_many(
    profile: Profile, prompt: int, most: int, expected: int
) -> None:
    demand = predict(profile, prompt, most, expected)
    blocks, rest = divmod(demand.kv_bytes, profile.block_bytes)
    assert rest == 0
    assert (blocks - 1) * profile.block_tokens < demand.tokens <= blocks * profile.block_tokens


@settings(max_examples=80, deadline=None)
@given(profiles, st.integers(0, 1 << 40), tokens, samples)
def test_most_tokens_is_the_inverse(
    profile: Profile, available: int, prompt: int, samples: int
) -> None:
    output = most_tokens(profile, available, prompt, samples) - prompt
    if output > 0:
        assert predict(profile, prompt, output, output, samples).total <= available
    longer = max(1, output + 1)
    assert predict(profile, prompt, longer, longer, samples).total > available
