"""What a request may say, refused in words that name the field, its value and what is possible."""

from typing import Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import check_prompt_tokens, check_vocabulary, validate_request


def ask(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"token_ids": pb.TokenIds(ids=[1]), **fields})


def sampling(**fields: Any) -> pb.GenerateRequest:
    return ask(sampling=pb.SamplingParams(**fields))


def stop(**fields: Any) -> pb.GenerateRequest:
    return ask(stop=pb.StopConditions(**fields))


def talk(*messages: pb.Message) -> pb.GenerateRequest:
    return pb.GenerateRequest(messages=pb.Messages(messages=messages))


CALL = pb.ToolCall(id="c", name="f")
BEAM = pb.BeamSearch(width=4)
SEARCH = pb.Samples(beam=BEAM)
INVALID = [
    (pb.GenerateRequest(), "input", "send token_ids, text or messages"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt", "is 0 tokens; possible: 1 to"),
    (pb.GenerateRequest(text=""), "prompt", "at least one character"),
    (talk(), "messages", "1 to 8192 messages"),
    (talk(pb.Message(role="wizard")), "messages[0].role", "is wizard; possible: system, dev"),
    (
        talk(pb.Message(role="user", tool_calls=[CALL])),
        "messages[0].tool_calls",
        "is 1 calls of user; possible: at most 128, and those of an assistant",
    ),
    (talk(pb.Message(role="tool")), "messages[0].tool_call_id", "the id of the call"),
    (sampling(temperature=2.5), "temperature", "is 2.5; possible: from 0 to 2"),
    (sampling(temperature=float("nan")), "temperature", "is nan"),
    (ask(step_limit_s=float("nan")), "step_limit_s", "is nan; possible: a finite number"),
    (ask(step_limit_s=float("inf")), "step_limit_s", "is inf"),
    (ask(step_limit_s=-1.0), "step_limit_s", "is -1.0"),
    (sampling(temperature=-0.1), "temperature", "is -0.1"),
    (sampling(repetition_penalty=float("inf")), "repetition_penalty", "is inf"),
    (sampling(repetition_penalty=0), "repetition_penalty", "is 0.0; possible: from 0.01 to 100"),
    (sampling(repetition_penalty=1e-38), "repetition_penalty", "from 0.01 to 100"),
    (sampling(repetition_penalty=101), "repetition_penalty", "is 101.0"),
    (sampling(top_p=0), "top_p", "above 0 to 1"),
    (sampling(min_p=1.5), "min_p", "from 0 to 1"),
    (sampling(presence_penalty=-3), "presence_penalty", "from -2 to 2"),
    (sampling(frequency_penalty=3), "frequency_penalty", "from -2 to 2"),
    (sampling(logit_bias={7: 101}), "logit_bias[7]", "is 101.0; possible: from -100 to 100"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias", "at most 1024 tokens"),
    (stop(max_tokens=0), "max_tokens", "is 0; possible: at least 1"),
    (stop(max_tokens=3, min_tokens=4), "min_tokens", "at most max_tokens, 3"),
    (stop(stop_strings=["a"] * 17), "stop", "is 17 strings; possible: at most 16 strings"),
    (stop(stop_strings=["\u00e9" * 129]), "stop", "258 bytes; possible: 1 to 256 bytes"),
    (stop(stop_strings=[""]), "stop", "a string of 0 bytes"),
    (stop(stop_token_ids=range(1025)), "stop_token_ids", "at most 1024 tokens"),
    (ask(output=pb.OutputOptions(top_logprobs=21)), "top_logprobs", "is 21; possible: 0 to 20"),
    (ask(request_id="x" * 129), "request_id", "is 129 bytes; possible: at most 128 bytes"),
    (ask(session_id="x" * 257), "session_id", "is 257 bytes; possible: at most 256 bytes"),
    (ask(priority=101), "priority", "is 101; possible: -100 to 100"),
    (ask(priority=-101), "priority", "is -101"),
    (ask(grammar=pb.Grammar(regex="a" * (64 << 10))), "grammar", "at most 65536 bytes"),
    (
        ask(grammar=pb.Grammar(regex="a"), stop=pb.StopConditions(ignore_eos=True)),
        "ignore_eos",
        "false with a grammar",
    ),
    (ask(samples=pb.Samples(n=0)), "n", "is 0; possible: 1 to 16"),
    (ask(samples=pb.Samples(n=17)), "n", "is 17"),
    (ask(samples=pb.Samples(n=3, best_of=2)), "best_of", "is 2; possible: 3 to 16"),
    (ask(samples=pb.Samples(best_of=17)), "best_of", "is 17"),
    (ask(samples=pb.Samples(best_of=4, beam=BEAM)), "best_of", "unset in a beam search"),
    (ask(samples=pb.Samples(beam=pb.BeamSearch())), "beam.width", "is 0; possible: 1 to 8"),
    (ask(samples=pb.Samples(beam=pb.BeamSearch(width=9))), "beam.width", "is 9"),
    (ask(samples=pb.Samples(n=5, beam=BEAM)), "n", "1 to 4, the width of the beam search"),
    (
        ask(samples=pb.Samples(beam=pb.BeamSearch(width=2, length_penalty=float("nan")))),
        "length_penalty",
        "is nan; possible: -10 to 10",
    ),
    (ask(samples=SEARCH, grammar=pb.Grammar(regex="a")), "grammar", "nothing in a beam search"),
    (
        ask(samples=SEARCH, sampling=pb.SamplingParams(logit_bias={1: 1})),
        "logit_bias",
        "nothing in a beam search",
    ),
    (ask(samples=SEARCH, stop=pb.StopConditions(min_tokens=1)), "min_tokens", "nothing in a beam"),
    (
        ask(samples=SEARCH, stop=pb.StopConditions(stop_token_ids=range(17))),
        "stop_token_ids",
        "at most 16 in a beam search",
    ),
]


def test_every_invalid_field_is_named() -> None:
    for request, field, words in INVALID:
        with pytest.raises(ServiceError) as caught:
            validate_request(request)
        error = caught.value
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT, words
        assert error.metadata["field"] == field, words
        assert words in error.message, error.message


def refusal(request: pb.GenerateRequest) -> str | None:
    try:
        validate_request(request)
    except ServiceError as error:
        return error.message
    return None


def test_the_ends_of_every_range_are_allowed() -> None:
    for request in (
        sampling(repetition_penalty=0.01, temperature=0, top_p=1, min_p=0, presence_penalty=-2),
        sampling(repetition_penalty=100, temperature=2, min_p=1, frequency_penalty=2),
        sampling(logit_bias={0: -100, 1: 100}),
        stop(max_tokens=1, min_tokens=1, stop_strings=["a" * 256] * 16),
        ask(samples=pb.Samples(n=4, beam=BEAM)),
        ask(samples=pb.Samples(n=16, best_of=16)),
        ask(priority=-100, request_id="x" * 128, session_id="x" * 256),
        talk(pb.Message(role="assistant", tool_calls=[CALL] * 128)),
    ):
        assert refusal(request) is None, request


def test_a_long_value_is_shown_in_short() -> None:
    with pytest.raises(ServiceError) as caught:
        validate_request(talk(pb.Message(role="x" * 100)))
    assert f"is {'x' * 57}...; possible" in caught.value.message


def test_tokens_are_of_the_vocabulary() -> None:
    check_prompt_tokens([0, 99], 100)
    check_vocabulary("stop_token_ids", [], 100)
    with pytest.raises(ServiceError, match="prompt is token 100; possible: tokens below 100"):
        check_prompt_tokens([1, 100], 100)
    with pytest.raises(ServiceError, match="messages is no token; possible: at least one token"):
        check_prompt_tokens([], 100, "messages")
