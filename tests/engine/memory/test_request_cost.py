"""What is priced is what the block pool and the scheduler hand out, for any model."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage_common.request_cost import CacheGroup, MemoryProfile, request_blocks
from ullage_engine.kv_cache.block_pool import BlockPool
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.protocol.step_plan import SampledToken, state_slots
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler, SchedulerLimits

POOL_BLOCKS = 600
LONGEST = 1000
BLOCK = 16
CHUNK = 96


def make_profile(*groups: CacheGroup, state: int = 0) -> MemoryProfile:
    per_token = max(group.bytes_per_token for group in groups)
    return MemoryProfile(
        block_tokens=BLOCK,
        groups=groups,
        state_bytes_per_sequence=state,
        prefill_chunk_tokens=CHUNK,
        kv_pool_bytes=POOL_BLOCKS * BLOCK * per_token,
    )


@st.composite
def groups_of_a_model(draw: st.DrawFn) -> list[CacheGroup]:
    """Full and sliding attention layers of one geometry."""
    kv_heads = draw(st.integers(1, 16))
    head_dim = draw(st.sampled_from((32, 64, 80, 128)))
    layer = 2 * kv_heads * head_dim * draw(st.sampled_from((1, 2, 4)))
    full = draw(st.integers(1, 48))
    sliding = draw(st.integers(0, 48))
    windowed = CacheGroup(bytes_per_token=sliding * layer, window_tokens=draw(st.integers(1, 600)))
    return [CacheGroup(bytes_per_token=full * layer), *([windowed] if sliding else [])]


profiles = groups_of_a_model().map(lambda groups: make_profile(*groups))
lengths = st.integers(1, LONGEST // 2)


PLAIN = make_profile(CacheGroup(bytes_per_token=10))


def price_of(prompt: int, output: int = 0, samples: int = 1, profile: MemoryProfile = PLAIN) -> int:
    return request_blocks(profile, prompt, prompt + output, samples)


@settings(max_examples=60, deadline=None)
@given(profiles, lengths, lengths, st.booleans())
def test_the_scheduler_promises_and_allocates_the_price(
    profile: MemoryProfile, prompt: int, output: int, is_chunked: bool
) -> None:
    chunk = CHUNK if is_chunked else LONGEST // 2
    profile = replace(profile, prefill_chunk_tokens=chunk)
    price = price_of(prompt, output, profile=profile) * profile.block_bytes
    assume(price <= profile.kv_pool_bytes)
    limits = SchedulerLimits(LONGEST, 8, chunk, is_chunked, 8192)
    scheduler = Scheduler(
        profile, limits, ThroughputEstimator(), OutputLengthEstimator(LONGEST, start=LONGEST)
    )
    request = EngineRequest(
        request_id="a",
        token_ids=[1] * prompt,
        num_prompt_tokens=prompt,
        max_tokens=output,
        sampling=SamplingParams(),
    )
    assert scheduler.submit(request) is None
    assert profile.kv_pool_bytes - scheduler.stats().headroom_bytes == price
    held = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        held = max(held, scheduler.stats().kv_held_bytes)
        sampled = [SampledToken("a", 2, 0.0, [], []) for chunk in plan.chunks if chunk.sampling]
        scheduler.commit(sampled)
    # The last token is priced and produced, but no further one needs its KV.
    if not profile.windows:
        assert held == price_of(prompt + output - 1) * profile.block_bytes
        assert 0 <= price - held <= profile.block_bytes
    else:
        # Where a window begins within a block, and where chunks end, saves some of its blocks.
        grown = -(-(prompt + output - 1) // BLOCK)
        windows = held // profile.block_bytes - grown
        assert held <= price
        [(window_tokens, most)] = profile.windows
        assert min(grown, window_tokens // BLOCK) <= windows <= most


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 200), st.integers(1, 16), st.integers(0, LONGEST))
def test_samples_and_a_prefix_hit_take_the_blocks_that_are_priced(
    prompt: int, output: int, samples: int, prefix: int
) -> None:
    """Every sample takes references to the whole blocks before the prompt's last token, and writes
    to copies of the block after them, whose original goes last."""
    pool = BlockPool(POOL_BLOCKS * 32, BLOCK)
    cached = pool.allocate(min(prefix, prompt - 1) // BLOCK)
    before = pool.num_free
    whole = cached + pool.allocate((prompt - 1) // BLOCK - len(cached))
    tables = []
    for _ in range(samples):
        pool.share(whole)
        own = pool.allocate(price_of(prompt + output) - len(whole))
        tables.append(whole + own)
    pool.free(whole)
    if samples > 1 and prompt > 1:
        tables.append(pool.allocate(1))
    pool.check_integrity(tables)
    assert price_of(prompt, output, samples) - len(cached) == before - pool.num_free


def test_a_pool_of_states_holds_what_a_step_reads_and_writes() -> None:
    assert state_slots(64) == 2 * 64


def test_a_state_larger_than_the_free_kv_keeps_nobody_out() -> None:
    profile = make_profile(CacheGroup(bytes_per_token=10), state=1 << 40)
    limits = SchedulerLimits(LONGEST, 8, 96, True, 8192)
    scheduler = Scheduler(
        profile, limits, ThroughputEstimator(), OutputLengthEstimator(LONGEST, start=LONGEST)
    )
    request = EngineRequest(
        request_id="a",
        token_ids=[1] * 500,
        num_prompt_tokens=500,
        max_tokens=400,
        sampling=SamplingParams(),
    )
    assert scheduler.submit(request) is None


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 200), st.sampled_from((1, 2, 4, 8, 16)))
def test_samples_are_promised_their_price(prompt: int, output: int, samples: int) -> None:
    profile = make_profile(CacheGroup(bytes_per_token=10))
    price = price_of(prompt, output, samples) * profile.block_bytes
    assume(price <= profile.kv_pool_bytes)
    limits = SchedulerLimits(LONGEST, 32, 96, True, 8192)
    scheduler = Scheduler(
        profile, limits, ThroughputEstimator(), OutputLengthEstimator(LONGEST, start=LONGEST)
    )
    requests = [
        EngineRequest(
            request_id=str(i),
            token_ids=[1] * prompt,
            num_prompt_tokens=prompt,
            max_tokens=output,
            sampling=SamplingParams(seed=i),
        )
        for i in range(samples)
    ]
    assert not scheduler.submit_group(requests)
    assert profile.kv_pool_bytes - scheduler.stats().headroom_bytes == price
