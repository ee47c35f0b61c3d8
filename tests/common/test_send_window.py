"""What a call of a stream sends: all of it, in order, within its window, in few pieces."""

import asyncio
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from ullage_testing import jumping_clock

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.flow_control import SendWindow, merge_deltas, next_tick

NEVER_MS = (1 << 32) - 1
"""No machine has been up for so long."""
ACCEPTED = pb.GenerateResponse(accepted=pb.Accepted(engine="e"))
FINISHED = pb.GenerateResponse(finished=pb.Finished())
DELTAS = st.lists(
    st.builds(
        lambda text, tokens, sample: pb.GenerateResponse(
            delta=pb.Delta(
                text=text,
                num_tokens=tokens,
                sample=sample,
                token_ids=range(tokens),
                logprobs=[pb.TokenLogprob(logprob=-float(n)) for n in range(tokens)],
            )
        ),
        st.text(max_size=3),
        st.integers(1, 3),
        st.integers(0, 1),
    ),
    max_size=30,
)


def call(window: int, pause_ms: int = NEVER_MS, together: int = 4) -> pb.MultiplexCall:
    return pb.MultiplexCall(window=window, coalesce_ms=pause_ms, coalesce_tokens=together)


async def write_all(sender: SendWindow, responses: list[pb.GenerateResponse]) -> None:
    for response in responses:
        await sender.write(response)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def texts(sent: list[pb.GenerateResponse]) -> list[str]:
    return [response.delta.text for response in sent if response.HasField("delta")]


def of_sample(responses: list[pb.GenerateResponse], sample: int) -> tuple[str, list[int], Any]:
    deltas = [r.delta for r in responses if r.HasField("delta") and r.delta.sample == sample]
    return (
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        [entry.logprob for delta in deltas for entry in delta.logprobs],
    )


@given(DELTAS, st.integers(1, 6), st.sampled_from([0, NEVER_MS]), st.integers(0, 6))
def test_all_arrives_in_order_and_within_the_window(
    deltas: list[pb.GenerateResponse], window: int, pause_ms: int, together: int
) -> None:
    async def scenario() -> None:
        written = [ACCEPTED, *deltas, FINISHED]
        kept = deepcopy(written)
        sent: list[pb.GenerateResponse] = []
        sender = SendWindow(call(window, pause_ms, together), sent.append)
        task = asyncio.create_task(write_all(sender, written))
        granted = window
        while not sender.is_finished:
            await turns()
            assert len(sent) <= granted
            sender.grant(1)
            granted += 1
        await task
        assert (sent[0], sent[-1]) == (ACCEPTED, FINISHED)
        for sample in (0, 1):
            assert of_sample(sent, sample) == of_sample(written, sample)
        most = max(3, together)  # a delta is never cut
        assert all(response.delta.num_tokens <= most for response in sent)
        assert written == kept, "what others may share stays as it is"

    asyncio.run(scenario())


async def wait(seconds: float) -> None:
    """Lets the time pass, and whoever waited for it go on."""
    await jumping_clock.clock().jump(seconds)


def run(scenario: Callable[[], Any]) -> None:
    jumping_clock.run(scenario(), jumping_clock.StandingLoop)


def word(text: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text, num_tokens=1))


def test_a_first_token_leaves_at_once_and_those_behind_it_together() -> None:
    async def scenario() -> None:
        sent: list[pb.GenerateResponse] = []
        sender = SendWindow(call(10), sent.append)
        await write_all(sender, [word(c) for c in "abcdefg"])
        assert texts(sent) == ["a", "bcde"]
        await sender.write(FINISHED)
        assert texts(sent) == ["a", "bcde", "fg"]
        assert sender.is_finished

    run(scenario)


def test_what_waits_leaves_when_the_pause_is_over() -> None:
    async def scenario() -> None:
        sent: list[pb.GenerateResponse] = []
        sender = SendWindow(call(10, pause_ms=10, together=100), sent.append)
        await write_all(sender, [word(c) for c in "abc"])
        await wait(0.009)
        assert texts(sent) == ["a"]
        await wait(0.002)
        assert texts(sent) == ["a", "bc"]
        await wait(0.01)
        await sender.write(word("d"))
        assert texts(sent) == ["a", "bc", "d"], "nothing left for a pause"

    run(scenario)


def test_what_calls_have_to_say_leaves_at_one_time() -> None:
    async def scenario() -> None:
        sent: list[pb.GenerateResponse] = []
        senders = [SendWindow(call(10, pause_ms=10, together=100), sent.append) for _ in "ab"]
        for sender in senders:
            await write_all(sender, [word(c) for c in "ab"])
            await wait(0.004)
        assert texts(sent) == ["a", "a"]
        await wait(0.003)
        assert texts(sent) == ["a", "a", "b", "b"]

    run(scenario)


@given(st.floats(0.0, 1e7), st.floats(0.0, 1e7), st.floats(0.001, 1.0))
@example(1000.0, 1000.004, 0.01)
def test_ticks_are_the_same_for_all_calls(one: float, other: float, pause_s: float) -> None:
    for now in (one, other):
        assert now < next_tick(now, pause_s)
        assert next_tick(now, pause_s) - now <= pause_s + 1e-6
    between = (next_tick(one, pause_s) - next_tick(other, pause_s)) / pause_s
    assert abs(between - round(between)) < 1e-3
    assert next_tick(one, 0.0) == one, "without a pause nothing waits"


def test_what_is_due_while_the_window_is_shut_leaves_when_it_opens() -> None:
    async def scenario() -> None:
        sent: list[pb.GenerateResponse] = []
        sender = SendWindow(call(1, pause_ms=1, together=100), sent.append)
        await write_all(sender, [word(c) for c in "abc"])
        await wait(0.002)
        assert texts(sent) == ["a"]
        sender.grant(1)
        assert texts(sent) == ["a", "bc"]

    run(scenario)


def test_an_end_sends_what_waits_and_a_drop_forgets_it() -> None:
    async def scenario() -> None:
        for ends in (True, False):
            sent: list[pb.GenerateResponse] = []
            sender = SendWindow(call(10), sent.append)
            await write_all(sender, [word(c) for c in "abc"])
            sender.end() if ends else sender.drop()
            sender.end()
            assert texts(sent) == (["a", "bc"] if ends else ["a"])

    run(scenario)


def test_a_merged_delta_keeps_the_tool_calls_of_its_first() -> None:
    piece = pb.ToolCallPiece(id="c", name="f")
    first = pb.GenerateResponse(delta=pb.Delta(text="a", num_tokens=1, tool_calls=[piece]))
    merged = merge_deltas([first, word("b")]).delta
    assert (merged.text, merged.num_tokens, list(merged.tool_calls)) == ("ab", 2, [piece])
    assert first.delta.text == "a"
