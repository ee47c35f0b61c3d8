"""The request fields that servers of different versions know."""

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.request_fields import (
    client_names,
    known_fields,
    later_fields,
    router_fields,
    set_fields,
    unknown_fields,
)

OF_0_2_0 = {
    "token_ids.ids",
    "messages.messages.tool_calls.arguments",
    "messages.tools.single_call",
    "sampling.logit_bias",
    "stop.min_tokens",
    "output.delta_token_ids",
    "samples.beam.length_penalty",
    "grammar.choice.texts",
    "continuation.answers.reason",
    "embed",
}
LATER = {
    "messages.end",
    "messages.tools.several_forced_calls",
    "sampling.allowed_token_ids",
    "sampling.bad_words",
    "output.include_stop",
    "output.omit_special_stop",
    "output.prompt_logprobs",
    "reasoning",
    "reasoning.begin",
    "truncate_prompt_tokens",
    "omit_special_tokens",
}


def test_fields_that_0_2_0_knows_and_those_that_came_later() -> None:
    assert known_fields() >= OF_0_2_0
    assert not OF_0_2_0 & later_fields()
    assert known_fields() > later_fields() >= LATER


def test_a_server_that_announces_nothing_knows_the_fields_of_0_2_0() -> None:
    assert unknown_fields([]) == later_fields()
    assert not unknown_fields(known_fields())
    assert not unknown_fields([*known_fields(), "sampling.of_the_future"])
    assert unknown_fields(known_fields() - {"sampling.bad_words"}) == {"sampling.bad_words"}


def test_a_router_announces_what_its_engines_know_and_what_it_does_itself() -> None:
    assert set(router_fields(())) == known_fields()
    lacking = known_fields() - set(router_fields(later_fields()))
    assert "sampling.bad_words" in lacking
    assert not lacking & {"messages.end", "truncate_prompt_tokens", "omit_special_tokens"}


def test_set_fields() -> None:
    request = pb.GenerateRequest(
        messages=pb.Messages(messages=[pb.Message(), pb.Message(tool_calls=[pb.ToolCall(id="a")])]),
        sampling=pb.SamplingParams(logit_bias={1: 2.0}, temperature=0.0),
        output=pb.OutputOptions(prompt_logprobs=0),
    )
    assert set_fields(request, known_fields()) == {
        "messages",
        "messages.messages",
        "messages.messages.tool_calls",
        "messages.messages.tool_calls.id",
        "sampling",
        "sampling.temperature",
        "sampling.logit_bias",
        "output",
        "output.prompt_logprobs",
    }
    assert not set_fields(pb.GenerateRequest(), known_fields())


def test_names_for_clients() -> None:
    paths = ["sampling.bad_words", "output.include_stop", "output.omit_special_stop"]
    assert client_names(paths) == "bad_words, include_stop_str_in_output"
    assert client_names(["reasoning", "reasoning.end"]) == "response_format or stop after reasoning"
