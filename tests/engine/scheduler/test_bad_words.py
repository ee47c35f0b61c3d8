"""No answer has the tokens of a bad word one after another."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

MakeRig = Callable[..., Any]

PROMPT = [50, 51, 52]


def banned(rig: Any) -> list[int]:
    """The tokens that the next step may not choose."""
    [chunk] = rig.scheduler.schedule().chunks
    return list(chunk.banned)


def test_the_last_token_is_banned_behind_the_others(make_rig: MakeRig) -> None:
    rig = make_rig(speculative=4)
    output = rig.undisturbed(PROMPT, 0, 5)
    words = ((7,), (output[0], 8), (output[0], output[1], 9), (*PROMPT, 10), (52, output[0], 11))
    rig.submit(replace(rig.request("a", PROMPT), bad_words=words))
    bans = []
    for _ in range(3):
        plan = rig.scheduler.schedule()
        bans.append(plan.chunks[0].banned)
        rig.finish(plan)
    # The prompt is no output. A word of one token is banned everywhere.
    assert bans == [[7], [7, 8], [7, 9]]


def test_output_of_an_earlier_worker_counts(make_rig: MakeRig) -> None:
    rig = make_rig()
    request = rig.request("a", [*PROMPT, 60, 61], num_prompt_tokens=3)
    rig.submit(replace(request, bad_words=((61, 8), (60, 61, 9), (52, 60, 61, 10))), resumed=True)
    assert banned(rig) == [8, 9]


def test_stop_tokens_are_banned_in_addition(make_rig: MakeRig) -> None:
    rig = make_rig()
    request = rig.request("a", PROMPT, stop=[2, 7])
    rig.submit(replace(request, bad_words=((7,), (1,)), min_tokens=3))
    assert banned(rig) == [1, 2, 7]
