"""What is priced is what the block pool and the scheduler hand out, for any model."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ullage_engine.core.pace import Pace
from ullage_engine.core.plan import SampledToken
from ullage_engine.core.request import EngineRequest, SamplingParams
from ullage_engine.core.scheduler import Scheduler, SchedulerLimits
from ullage_engine.kv.blocks import BlockPool
from ullage_engine.memory.expected import ExpectedOutput
from ullage_engine.memory.predictor import (
    Demand,
    RequestShape,
    block_bytes,
    demand,
    group_blocks,
    num_blocks,
    state_pool_bytes,
)
from ullage_engine.messages import CacheGroupSpec, Profile

POOL_BLOCKS = 600
LONGEST = 1000
BLOCK = 16


def make_profile(groups: list[CacheGroupSpec], state: int = 0, chunk: int = 64) -> Profile:
    per_token = sum(group.bytes_per_token for group in groups)
    return Profile(
        block_tokens=BLOCK,
        groups=groups,
        state_bytes_per_sequence=state,
        activation_bytes_per_token=7,
        sampler_bytes_per_sequence=11,
        prefill_chunk_tokens=chunk,
        kv_pool_bytes=POOL_BLOCKS * BLOCK * per_token,
    )


@st.composite
def groups_of_a_model(draw: st.DrawFn) -> list[CacheGroupSpec]:
    """Full and sliding attention layers of one geometry."""
    kv_heads, head_dim = draw(st.integers(1, 16)), draw(st.sampled_from((32, 64, 80, 128)))
    layer = 2 * kv_heads * head_dim * draw(st.sampled_from((1, 2, 4)))
    full, sliding = draw(st.integers(1, 48)), draw(st.integers(0, 48))
    windowed = CacheGroupSpec(
        bytes_per_token=sliding * layer, window_tokens=draw(st.integers(1, 600))
    )
    return [CacheGroupSpec(bytes_per_token=full * layer), *([windowed] if sliding else [])]


profiles = st.builds(
    make_profile, groups_of_a_model(), st.integers(0, 1 << 20), st.integers(1, 512)
)
lengths = st.integers(1, LONGEST // 2)


@settings(max_examples=60, deadline=None)
@given(profiles, lengths, lengths, st.booleans())
def test_the_scheduler_promises_and_allocates_the_price(
    profile: Profile, prompt: int, output: int, is_chunked: bool
) -> None:
    price = demand(profile, RequestShape(prompt, output))
    assume(demand(profile, RequestShape(prompt + output)).total <= profile.kv_pool_bytes)
    limits = SchedulerLimits(LONGEST, 8, 512 if not is_chunked else 96, is_chunked, 8192)
    scheduler = Scheduler(profile, limits, Pace(), ExpectedOutput(LONGEST, start=LONGEST))
    request = EngineRequest(
        request_id="a",
        token_ids=[1] * prompt,
        num_prompt_tokens=prompt,
        max_tokens=output,
        sampling=SamplingParams(),
    )
    assert scheduler.submit(request) is None
    assert profile.kv_pool_bytes - scheduler.available_bytes == price.kv_bytes
    held = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        held = max(held, profile.kv_pool_bytes - scheduler.free_bytes)
        sampled = [SampledToken("a", 2, 0.0, [], []) for chunk in plan.chunks if chunk.sampling]
        scheduler.commit(sampled)
    # The last token is priced and produced, but no further one needs its KV.
    assert held == num_blocks(profile, prompt + output - 1) * block_bytes(profile)
    assert 0 <= price.kv_bytes - held <= block_bytes(profile)


@settings(max_examples=60, deadline=None)
@given(profiles, lengths, st.integers(1, 200), st.integers(1, 16), st.integers(0, LONGEST))
def test_samples_and_a_prefix_hit_take_the_blocks_that_are_priced(
    profile: Profile, prompt: int, output: int, samples: int, prefix: int
) -> None:
    """Every sample takes references to the whole blocks before the prompt's last token, and writes
    to copies of the block after them, whose original goes last."""
    shape = RequestShape(prompt, output, min(prefix, prompt), samples)
    pool = BlockPool(POOL_BLOCKS * 32, BLOCK)
    cached = pool.allocate(min(shape.prefix_tokens, prompt - 1) // BLOCK)
    before = pool.num_allocated
    whole = cached + pool.allocate((prompt - 1) // BLOCK - len(cached))
    tables = []
    for _ in range(samples):
        pool.share(whole)
        own = pool.allocate(num_blocks(profile, prompt + output) - len(whole))
        tables.append(whole + own)
    pool.free(whole)
    if samples > 1 and prompt > 1:
        tables.append(pool.allocate(1))
    pool.check_integrity(tables)
    price = demand(profile, shape)
    assert price.num_blocks == pool.num_allocated - before
    assert price.kv_bytes == price.num_blocks * block_bytes(profile)
    assert price.state_bytes == samples * profile.state_bytes_per_sequence


shapes = st.builds(
    lambda prompt, output, prefix, samples: RequestShape(prompt, output, prefix % prompt, samples),
    lengths,
    lengths,
    st.integers(0, LONGEST),
    st.integers(1, 16),
)


def figures(price: Demand) -> tuple[int, ...]:
    kv = (price.num_blocks, price.kv_bytes, price.rank_kv_bytes)
    return (
        *kv,
        price.state_bytes,
        price.rank_state_bytes,
        price.activation_bytes,
        price.sampler_bytes,
        price.total,
    )


@settings(max_examples=80, deadline=None)
@given(profiles, shapes, lengths)
def test_more_tokens_or_samples_never_cost_less(
    profile: Profile, shape: RequestShape, more: int
) -> None:
    price = demand(profile, shape)
    # Each sample has the prompt's last block for itself until it is full: grow by whole blocks.
    longer = more if shape.samples == 1 else more * BLOCK
    for larger in (
        replace(shape, output_tokens=shape.output_tokens + more),
        replace(shape, prompt_tokens=shape.prompt_tokens + longer),
        replace(shape, samples=shape.samples + more),
    ):
        rises = zip(figures(price), figures(demand(profile, larger)), strict=True)
        assert all(before <= after for before, after in rises), larger
    cached = demand(profile, replace(shape, prefix_tokens=shape.prefix_tokens + more))
    assert 0 < cached.total <= price.total


@settings(max_examples=80, deadline=None)
@given(profiles, lengths, st.integers(1, 64))
def test_a_window_caps_what_its_group_needs(profile: Profile, length: int, chunk: int) -> None:
    for group in profile.groups:
        needed = group_blocks(profile, group, length, chunk)
        if not group.window_tokens:
            assert needed == num_blocks(profile, length)
            continue
        # A chunk that ends at the last token: the window of its first token up to that last one,
        # wherever it lies in its blocks.
        first = max(0, length - chunk - (group.window_tokens - 1))
        touched = (length - 1) // BLOCK - first // BLOCK + 1
        assert touched <= needed <= num_blocks(profile, length)
        assert needed <= -(-(group.window_tokens - 1 + chunk) // BLOCK) + 1


def test_what_a_window_would_save() -> None:
    """gpt-oss-20b in bf16, as the module says."""
    half = 12 * 2 * 8 * 64 * 2
    groups = [CacheGroupSpec(bytes_per_token=half)]
    groups.append(CacheGroupSpec(bytes_per_token=half, window_tokens=128))
    price = demand(make_profile(groups, chunk=512), RequestShape(8192))
    assert price.kv_bytes == 384 << 20
    assert (price.kv_bytes - price.unread_bytes) // (1 << 20) == 207


@pytest.mark.parametrize(("num_ranks", "share"), [(1, 1.0), (2, 0.5), (4, 0.25)])
def test_ranks_divide_a_group(num_ranks: int, share: float) -> None:
    group = CacheGroupSpec(bytes_per_token=12_288, num_ranks=num_ranks)
    price = demand(make_profile([group]), RequestShape(100, 28))
    assert price.rank_kv_bytes == share * price.kv_bytes == share * 128 * 12_288


@pytest.mark.parametrize(("state_ranks", "share"), [(1, 3000), (2, 1500), (3, 1002)])
def test_ranks_divide_a_state(state_ranks: int, share: int) -> None:
    profile = make_profile([CacheGroupSpec(bytes_per_token=10)], state=1000)
    profile = msgspec.structs.replace(profile, state_ranks=state_ranks)
    price = demand(profile, RequestShape(100, 28, samples=3))
    assert (price.state_bytes, price.rank_state_bytes) == (3000, share)


def test_a_pool_of_states_holds_what_a_step_reads_and_writes() -> None:
    assert state_pool_bytes(147_456, 64) == 2 * 64 * 147_456


def test_what_is_reserved_beside_the_kv_is_priced_but_not_charged() -> None:
    profile = make_profile([CacheGroupSpec(bytes_per_token=10)], state=1000, chunk=64)
    long = demand(profile, RequestShape(prompt_tokens=200, output_tokens=8, samples=3))
    assert (long.activation_bytes, long.sampler_bytes) == (64 * 7, 3 * 11)
    assert demand(profile, RequestShape(200, prefix_tokens=160)).activation_bytes == 40 * 7
    assert long.state_bytes == 3000
    assert long.total == long.kv_bytes


def test_a_state_larger_than_the_free_kv_keeps_nobody_out() -> None:
    profile = make_profile([CacheGroupSpec(bytes_per_token=10)], state=1 << 40)
    limits = SchedulerLimits(LONGEST, 8, 96, True, 8192)
    scheduler = Scheduler(profile, limits, Pace(), ExpectedOutput(LONGEST, start=LONGEST))
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
    profile = make_profile([CacheGroupSpec(bytes_per_token=10)])
    price = demand(profile, RequestShape(prompt, output, samples=samples))
    assume(price.total <= profile.kv_pool_bytes)
    limits = SchedulerLimits(LONGEST, 32, 96, True, 8192)
    scheduler = Scheduler(profile, limits, Pace(), ExpectedOutput(LONGEST, start=LONGEST))
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
    assert profile.kv_pool_bytes - scheduler.available_bytes == price.kv_bytes
