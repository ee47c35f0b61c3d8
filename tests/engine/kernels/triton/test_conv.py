"""A step's gated convolutions equal those of each sequence by itself."""

import torch

from ullage_engine.kernels.batch import build_batch
from ullage_engine.kernels.triton import Put
from ullage_engine.protocol.step_plan import Chunk, StepPlan

CHANNELS = 40
KERNEL = 3
SLOTS = 8
CHUNKS = [(5, 1, 3), (0, 1, None), (0, 7, None), (9, 4, 0), (30, 2, 5)]
"""(earlier tokens, tokens, slot of the state before) of each sequence."""


def step_plan() -> StepPlan:
    free = [1, 2, 4, 6, 7]
    return StepPlan([
        Chunk(str(number), [0] * tokens, start, [number, 10 + number, 20 + number], None, [], 0,
              state_slot=slot, next_state_slot=free[number])
        for number, (start, tokens, slot) in enumerate(CHUNKS)
    ])  # fmt: skip


def test_rows_and_states(device: torch.device, put: Put) -> None:
    from ullage_engine.kernels.triton.conv import FusedConvolution

    plan = step_plan()
    batch = build_batch(plan, 16, conv_kernel=KERNEL)
    assert batch.conv is not None
    tokens = len(batch.token_ids)
    projected = torch.randn(tokens + 2, 3 * CHANNELS, device=device)
    weights = torch.randn(KERNEL, CHANNELS, device=device)
    state = torch.randn(SLOTS, KERNEL - 1, CHANNELS, device=device)
    before = state.clone()
    out = torch.full((tokens + 2, CHANNELS), torch.nan, device=device)
    FusedConvolution(batch.conv, put, projected, out[:tokens]).run(weights, state)

    b, c, u = projected[:tokens].chunk(3, dim=1)
    # Rows of decodes come first, the later in its sequence the earlier in the step.
    decodes = [chunk for chunk in plan.chunks if len(chunk.token_ids) == 1]
    prompts = [chunk for chunk in plan.chunks if len(chunk.token_ids) > 1]
    ordered = sorted(decodes, key=lambda chunk: -chunk.start) + prompts
    row = 0
    for chunk in ordered:
        rows = slice(row, row + len(chunk.token_ids))
        earlier = torch.zeros(KERNEL - 1, CHANNELS, device=device)
        if chunk.state_slot is not None:
            earlier = before[chunk.state_slot]
        columns = torch.cat([earlier, (b * u)[rows]])
        wanted = c[rows] * sum(
            columns[tap : tap + len(chunk.token_ids)] * weights[tap] for tap in range(KERNEL)
        )
        torch.testing.assert_close(out[rows], wanted)
        torch.testing.assert_close(state[chunk.next_state_slot], columns[1 - KERNEL :])
        row = rows.stop
    untouched = [slot for slot in range(SLOTS) if slot not in (1, 2, 4, 6, 7)]
    assert torch.equal(state[untouched], before[untouched])
    assert out[tokens:].isnan().all()
