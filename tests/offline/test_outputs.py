"""The answers that responses make."""

import pytest

from ullage.inference.v1 import inference_pb2
from ullage_offline.outputs import IncompleteAnswer, Logprob, ToolCall, read_answer

Response = inference_pb2.GenerateResponse
Delta = inference_pb2.Delta
Finished = inference_pb2.Finished
STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH


def accepted(**fields: object) -> Response:
    return Response(
        accepted=inference_pb2.Accepted(request_id="7", prompt_token_ids=[4, 5], **fields)
    )


def entry(token_id: int, logprob: float, *top: tuple[int, float]) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token_id=token_id,
        token=f"t{token_id}",
        logprob=logprob,
        top=[inference_pb2.Alternative(token_id=i, token=f"t{i}", logprob=p) for i, p in top],
    )


def test_logprobs_have_ranks_and_a_sum() -> None:
    request = inference_pb2.GenerateRequest(output={"top_logprobs": 2})
    responses = [
        accepted(),
        Response(
            delta=Delta(text="a", token_ids=[1], logprobs=[entry(1, -0.5, (1, -0.5), (2, -1))])
        ),
        Response(delta=Delta(text="b", token_ids=[9], logprobs=[entry(9, -4, (1, -0.5), (2, -1))])),
        Response(finished=Finished(reason=LENGTH, usage={"cached_tokens": 1})),
    ]
    answer = read_answer(request, responses, "p")
    [output] = answer.outputs
    assert (output.text, output.token_ids, output.finish_reason) == ("ab", [1, 9], "length")
    assert output.cumulative_logprob == -4.5
    assert output.logprobs == [
        {1: Logprob(-0.5, 1, "t1"), 2: Logprob(-1, 2, "t2")},
        {9: Logprob(-4, None, "t9"), 1: Logprob(-0.5, 1, "t1"), 2: Logprob(-1, 2, "t2")},
    ]
    assert (answer.prompt, answer.prompt_token_ids) == ("p", [4, 5])
    assert (answer.num_cached_tokens, answer.finished, output.finished()) == (1, True, True)


def test_several_answers_are_kept_apart() -> None:
    request = inference_pb2.GenerateRequest(samples={"n": 2}, stop={"stop_token_ids": [3]})
    responses = [
        accepted(degraded=["max_tokens=4"]),
        Response(delta=Delta(text="x", token_ids=[1], sample=1)),
        Response(delta=Delta(text="y", token_ids=[3])),
        Response(sample_finished={"sample": 1, "reason": STOP, "stop_string": "x"}),
        Response(sample_finished={"sample": 0, "reason": STOP}),
        Response(finished=Finished(reason=STOP)),
    ]
    answer = read_answer(request, responses, None)
    assert [(o.index, o.text, o.stop_reason) for o in answer.outputs] == [
        (0, "y", 3),
        (1, "x", "x"),
    ]
    assert [output.logprobs for output in answer.outputs] == [None, None]
    assert answer.degraded == ["max_tokens=4"]


def test_tool_calls_are_joined() -> None:
    pieces = [
        {"index": 0, "id": "c", "name": "f", "arguments": '{"a'},
        {"index": 0, "arguments": '": 1}'},
        {"index": 1, "id": "d", "name": "g", "arguments": "{}"},
    ]
    responses = [
        accepted(),
        *(Response(delta=Delta(tool_calls=[piece])) for piece in pieces),
        Response(finished=Finished(reason=inference_pb2.FINISH_REASON_TOOL_CALLS)),
    ]
    [output] = read_answer(inference_pb2.GenerateRequest(), responses, None).outputs
    assert output.tool_calls == [ToolCall("c", "f", '{"a": 1}'), ToolCall("d", "g", "{}")]
    assert output.finish_reason == "tool_calls"


def test_an_answer_without_its_end_is_none(subtests: pytest.Subtests) -> None:
    cut = [
        inference_pb2.FINISH_REASON_TIMEOUT,
        inference_pb2.FINISH_REASON_CANCELLED,
        inference_pb2.FINISH_REASON_UNSPECIFIED,
    ]
    for reason in cut:
        responses = [accepted(), Response(finished=Finished(reason=reason))]
        with subtests.test(reason), pytest.raises(IncompleteAnswer):
            read_answer(inference_pb2.GenerateRequest(), responses, None)
    with subtests.test("no end"), pytest.raises(IncompleteAnswer):
        read_answer(inference_pb2.GenerateRequest(), [accepted()], None)
    with subtests.test("nothing"), pytest.raises(IncompleteAnswer):
        read_answer(inference_pb2.GenerateRequest(), [], None)


def test_log_probabilities_of_a_prompt_are_those_of_vllm() -> None:
    def scored(token_id: int, rank: int, *top: int) -> inference_pb2.TokenLogprob:
        alternatives = [
            inference_pb2.Alternative(token_id=each, token=f"t{each}", logprob=-1) for each in top
        ]
        return inference_pb2.TokenLogprob(
            token_id=token_id, token=f"t{token_id}", logprob=-2, rank=rank, top=alternatives
        )

    first = inference_pb2.TokenLogprob(token_id=5, token="t5")
    parts = [
        inference_pb2.PromptLogprobs(tokens=[first, scored(6, 9, 7)]),
        inference_pb2.PromptLogprobs(start=2, tokens=[scored(7, 1, 7)]),
    ]
    responses = [
        accepted(),
        *(Response(delta=Delta(prompt_logprobs=part)) for part in parts),
        Response(delta=Delta(text="a", token_ids=[1])),
        Response(finished=Finished(reason=inference_pb2.FINISH_REASON_STOP)),
    ]
    request = inference_pb2.GenerateRequest()
    assert read_answer(request, responses, None).prompt_logprobs is None

    request.output.prompt_logprobs = 1
    assert read_answer(request, responses, None).prompt_logprobs == [
        None,
        {6: Logprob(-2, 9, "t6"), 7: Logprob(-1, 1, "t7")},
        {7: Logprob(-1, 1, "t7")},
    ]
