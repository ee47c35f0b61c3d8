"""Slots of convolution states: whose they are, and where a state may be gone on from."""

import pytest

from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.scheduler.batch_plan import make_chunk
from ullage_engine.scheduler.conv_states import ConvStatePool
from ullage_engine.scheduler.sequence import ConvState, Rank, Sequence
from ullage_engine.scheduler.sequence_table import SequenceTable

REPLAY = 8
COMPUTED = 100


def make_sequence(name: str, num_computed: int = COMPUTED, serial: int = 0) -> Sequence:
    tokens = list(range(num_computed + 20))
    request = EngineRequest(
        request_id=name,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        max_tokens=9,
        sampling=SamplingParams(),
    )
    sequence = Sequence(request, Rank(0, 0, serial), 200, 8, tokens, num_computed)
    sequence.is_running = True
    return sequence


def make_states(*sequences: Sequence, max_sequences: int = 4) -> ConvStatePool:
    roster = SequenceTable()
    for sequence in sequences:
        roster.add(sequence)
    return ConvStatePool(REPLAY, max_sequences, roster)


def compute(states: ConvStatePool, sequence: Sequence, count: int) -> None:
    start = states.next_position(sequence)
    chunk = make_chunk(sequence, start, count, states.assign_slots(sequence))
    sequence.num_computed = max(sequence.num_computed, chunk.end)
    states.commit(sequence, chunk)
    states.check_integrity()


@pytest.mark.parametrize(
    ("state", "start"),
    [
        (None, 92),
        (ConvState(0, num_tokens=100, since=0), 100),
        (ConvState(0, num_tokens=97, since=0), 97),
        (ConvState(0, num_tokens=97, since=92), 97),
        # It has seen too few tokens to be exact at 100.
        (ConvState(0, num_tokens=97, since=93), 92),
        # Zero state needs fewer tokens.
        (ConvState(0, num_tokens=91, since=0), 92),
        (ConvState(0, num_tokens=101, since=0), 92),
    ],
)
def test_a_state_is_used_where_it_is_exact_and_saves_work(
    state: ConvState | None, start: int
) -> None:
    sequence = make_sequence("a")
    sequence.conv.state = state
    assert make_states(sequence).next_position(sequence) == start


def test_a_state_remembers_where_it_began_from_zero() -> None:
    sequence = make_sequence("a")
    states = make_states(sequence)
    for count, reached in ((3, 95), (5, 100), (10, 110)):
        compute(states, sequence, count)
        assert sequence.conv.state is not None
        assert (sequence.conv.state.num_tokens, sequence.conv.state.since) == (reached, 92)
    # At an earlier position it would not be exact.
    sequence.num_computed = 99
    assert states.next_position(sequence) == 91


@pytest.mark.parametrize(("shared", "is_shared"), [(104, False), (105, True), (120, True)])
def test_only_states_of_shared_tokens_are_shared(shared: int, is_shared: bool) -> None:
    parent = make_sequence("parent")
    child = make_sequence("child", shared, serial=1)
    states = make_states(parent, child)
    compute(states, parent, REPLAY + 5)
    states.share(parent, child)
    states.check_integrity()
    assert (child.conv.state is not None) == is_shared
    states.release(parent)
    states.check_integrity()


def test_sequences_that_wait_give_up_their_states_the_least_important_first() -> None:
    running, early, late = [
        make_sequence(name, serial=at) for at, name in enumerate(("running", "early", "late"))
    ]
    states = make_states(running, early, late, max_sequences=2)
    for sequence in (early, late):
        compute(states, sequence, REPLAY)
        sequence.is_running = False
    compute(states, running, REPLAY)
    assert early.conv.state
    assert late.conv.state
    compute(states, running, 1)
    assert early.conv.state
    assert late.conv.state
    states.assign_slots(running)
    early.is_running = True
    states.assign_slots(early)
    assert early.conv.state
    assert late.conv.state is None
    states.check_integrity()


def test_without_convolutions_there_are_no_slots() -> None:
    sequence = make_sequence("a")
    states = ConvStatePool(0, 4, SequenceTable())
    assert states.next_position(sequence) == COMPUTED
    assert states.assign_slots(sequence) == (None, 0)
    assert sequence.conv.next_slot is None
