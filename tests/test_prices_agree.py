"""The router prices a request as the engine does, from the profile that it gets over the wire."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.memory.predictor import RequestShape, demand
from ullage_engine.messages import CacheGroupSpec, Profile
from ullage_engine.server.answers import memory_profile
from ullage_router.engine import to_profile
from ullage_router.predict import predict

groups = st.lists(
    st.builds(
        CacheGroupSpec,
        bytes_per_token=st.integers(1, 1 << 20),
        window_tokens=st.sampled_from((0, 128, 4096)),
    ),
    min_size=1,
    max_size=3,
)
profiles = st.builds(
    Profile,
    block_tokens=st.sampled_from((1, 16, 32)),
    groups=groups,
    state_bytes_per_sequence=st.integers(0, 1 << 22),
    activation_bytes_per_token=st.integers(0, 1 << 20),
    sampler_bytes_per_sequence=st.integers(0, 1 << 20),
    prefill_chunk_tokens=st.integers(1, 8192),
    kv_pool_bytes=st.integers(0, 1 << 36),
)
tokens = st.integers(1, 100_000)


@settings(max_examples=100, deadline=None)
@given(profiles, tokens, tokens, st.integers(1, 16))
def test_engine_and_router_agree(profile: Profile, prompt: int, output: int, samples: int) -> None:
    wire = memory_profile(profile)
    told = predict(
        to_profile(type(wire).FromString(wire.SerializeToString())), prompt, output, output, samples
    )
    ours = demand(profile, RequestShape(prompt, output, samples=samples))
    assert (told.kv_bytes, told.total) == (ours.kv_bytes, ours.total)
