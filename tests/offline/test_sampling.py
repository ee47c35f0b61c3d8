"""Sampling parameters by vLLM's names, and the requests that they make."""

from typing import Any

import pytest

import ullage
from ullage.inference.v1 import inference_pb2
from ullage_offline.sampling import (
    SamplingParams,
    StructuredOutputsParams,
    chat_request,
    completion_request,
)


def test_the_package_of_the_protos_has_the_library() -> None:
    assert ullage.SamplingParams is SamplingParams
    assert set(ullage.__all__) <= set(dir(ullage))
    assert ullage.__version__
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        ullage.Llm  # noqa: B018


def test_every_field_reaches_the_request() -> None:
    params = SamplingParams(
        n=2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        temperature=0.75,
        top_p=0.5,
        top_k=-1,
        min_p=0.125,
        seed=7,
        stop=["a", "b"],
        stop_token_ids=[3],
        ignore_eos=True,
        max_tokens=9,
        min_tokens=2,
        logprobs=4,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        truncate_prompt_tokens=5,
        logit_bias={8: -1.5},
        allowed_token_ids=[8, 9],
        bad_words=["x"],
        prompt_logprobs=3,
    )
    request = completion_request(params)
    assert request.sampling == inference_pb2.SamplingParams(
        temperature=0.75,
        top_p=0.5,
        top_k=0,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        seed=7,
        logit_bias={8: -1.5},
        allowed_token_ids=[8, 9],
        bad_words=["x"],
    )
    assert request.stop == inference_pb2.StopConditions(
        max_tokens=9, stop_strings=["a", "b"], stop_token_ids=[3], ignore_eos=True, min_tokens=2
    )
    assert request.output == inference_pb2.OutputOptions(
        top_logprobs=4,
        prompt_logprobs=3,
        return_token_ids=True,
        special_tokens=True,
        include_stop=True,
    )
    assert request.samples.n == 2
    assert request.truncate_prompt_tokens == 5

    chat = chat_request(params, [{"role": "user", "content": "Hi"}], {})
    for name in ("sampling", "stop", "output", "samples"):
        assert getattr(chat, name) == getattr(request, name)
    assert chat.messages.messages[0].content == "Hi"


def test_defaults_are_those_of_vllm() -> None:
    """Set explicitly, so that the defaults of a model's files do not change them."""
    request = completion_request(SamplingParams())
    assert request.stop.max_tokens == 16
    assert request.sampling.temperature == 1.0
    assert request.sampling.HasField("top_p")
    assert not request.sampling.HasField("seed")
    assert not request.output.HasField("top_logprobs")
    assert not completion_request(SamplingParams(max_tokens=None)).stop.HasField("max_tokens")

    without = completion_request(None)
    assert without.stop.max_tokens == 16
    assert without.sampling == inference_pb2.SamplingParams()


def test_structured_outputs(subtests: pytest.Subtests) -> None:
    schema = {"type": "object"}
    cases: list[tuple[Any, str]] = [
        (StructuredOutputsParams(json=schema), "json_schema"),
        ({"json": '{"type": "object"}'}, "json_schema"),
        (StructuredOutputsParams(regex="a+"), "regex"),
        (StructuredOutputsParams(choice=["x", "y"]), "choice"),
        (StructuredOutputsParams(grammar='start: "a"'), "lark"),
        (StructuredOutputsParams(json_object=True), "json_object"),
    ]
    for asked, kind in cases:
        with subtests.test(kind):
            request = completion_request(SamplingParams(structured_outputs=asked))
            assert request.grammar.WhichOneof("kind") == kind


def test_invalid_and_unsupported_fields_are_refused_by_name(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"n": 17}, "n is 17; possible: 1 to 16"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; possible: at most max_tokens, 4"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "only one of"),
        ({"bad_words": [""]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"detokenize": False}, "detokenize False is not supported"),
        ({"logits_processors": [print]}, "logits_processors"),
        ({"output_kind": 2}, "output_kind 2 is not supported"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ]
    for fields, message in cases:
        with subtests.test(str(fields)):
            with pytest.raises(ValueError) as raised:
                SamplingParams(**fields)
            assert message in str(raised.value)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    # Values that change nothing are taken, as from programs that were written for vLLM.
    SamplingParams(bad_words=[], logits_processors=None, extra_args={}, detokenize=True)


def test_changed_parameters_are_checked_again() -> None:
    params = SamplingParams()
    params.temperature = -3
    with pytest.raises(ValueError, match="temperature"):
        completion_request(params)


def test_chat_options() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    options = {"tools": tools, "chat_template_kwargs": {"x": 1}, "continue_final_message": None}
    request = chat_request(None, [{"role": "user", "content": "Hi"}], options)
    assert '"name":"f"' in request.messages.tools.functions
    assert request.messages.template_arguments == '{"x":1}'
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\]\.type is image_url"):
        chat_request(None, [{"role": "user", "content": [{"type": "image_url"}]}], {})
