"""The steps of the probe fit whatever a runner is made for."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels.arena import StepLimits
from ullage_engine.runner.warm_up_plans import probe_plans


@settings(max_examples=300, deadline=None)
@given(
    prompt_tokens=st.integers(1, 600),
    rows=st.integers(1, 8),
    max_model_len=st.integers(2, 5000),
    block_tokens=st.sampled_from([4, 16, 32]),
    num_blocks=st.integers(1, 40),
    vocab=st.integers(1, 50_000),
    windowed=st.booleans(),
)
def test_every_step_fits(
    prompt_tokens: int,
    rows: int,
    max_model_len: int,
    block_tokens: int,
    num_blocks: int,
    vocab: int,
    windowed: bool,
) -> None:
    limits = StepLimits(
        max_tokens=prompt_tokens + rows,
        max_rows=rows,
        max_model_len=max_model_len,
        gather_tokens=max_model_len,
        itemsize=4,
        block_tokens=block_tokens,
        windowed=windowed,
    )
    computed: dict[str, int] = {}
    states: dict[str, int] = {}
    tables: dict[str, list[int]] = {}
    plans = probe_plans(limits, num_blocks, vocab)
    for plan in plans:
        assert plan.num_tokens <= limits.max_tokens
        assert len(plan.chunks) <= rows
        read = {chunk.state_slot for chunk in plan.chunks}
        written = [chunk.next_state_slot for chunk in plan.chunks]
        assert not read.intersection(written)
        assert len(set(written)) == len(written)
        assert max(written) < 2 * rows
        for chunk in plan.chunks:
            name = chunk.request_id
            assert chunk.start == computed.get(name, 0)
            assert chunk.state_slot == states.get(name)
            assert chunk.end <= min(max_model_len, len(chunk.block_ids) * block_tokens)
            assert all(0 <= token < vocab for token in chunk.token_ids)
            assert chunk.window_block_ids == (chunk.block_ids if windowed else [])
            computed[name], states[name] = chunk.end, chunk.next_state_slot
            tables[name] = chunk.block_ids
    blocks = [block for table in tables.values() for block in table]
    assert sorted(blocks) == list(range(len(blocks)))
    assert len(blocks) <= num_blocks
    assert any(len(chunk.token_ids) == 1 for chunk in plans[-1].chunks) or max_model_len == 2


def test_usual_limits_have_prompts_and_decodes_side_by_side() -> None:
    limits = StepLimits(
        max_tokens=520, max_rows=8, max_model_len=2048, gather_tokens=8192, itemsize=4
    )
    plans = probe_plans(limits, 100, 49_152)
    assert [[len(chunk.token_ids) for chunk in plan.chunks] for plan in plans] == [
        [24],
        [1, 8],
        [1, 1],
    ]
