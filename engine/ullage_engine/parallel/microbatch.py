"""Splits a step into micro-batches that flow through the stages one behind the other. Pure."""

from collections.abc import Sequence

from ullage_engine.core.plan import SampledToken, StepPlan

LEAST_TOKENS = {"cpu": 8, "cuda": 192}
"""Tokens below which another micro-batch costs more than it hides.

Every micro-batch reads a stage's weights once more. That is free while its products take longer
than reading does, from about this many tokens on: 788 TFLOP/s against 4.3 TB/s on an H200, and a
bfloat16 product of 16 rows takes 1.4 times as long as one of a single row on a processor."""


def micro_batches(plan: StepPlan, most: int, least_tokens: int) -> list[StepPlan]:
    """At most `most` plans of about equally many tokens, of `least_tokens` where there are enough.

    Each chunk is in one of them, whole: its sequence's convolution state and KV are in order. The
    same plan is split the same way on every rank. Moves are left out; they are done before.
    """
    count = max(1, min(most, len(plan.chunks), plan.num_tokens // least_tokens))
    if count == 1:
        return [StepPlan(plan.chunks)]
    # The longest first, each to the emptiest; their order within a micro-batch is the plan's.
    sizes = [len(chunk.token_ids) for chunk in plan.chunks]
    loads = [0] * count
    dealt: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        emptiest = min(range(count), key=lambda each: (loads[each], each))
        loads[emptiest] += sizes[index]
        dealt[emptiest].append(index)
    return [StepPlan([plan.chunks[index] for index in sorted(indices)]) for indices in dealt]


def in_plan_order(plan: StepPlan, tokens: Sequence[SampledToken]) -> list[SampledToken]:
    """Tokens of all micro-batches in the order of the plan's chunks."""
    known = {token.request_id: token for token in tokens}
    return [known[chunk.request_id] for chunk in plan.chunks if chunk.sampling is not None]
