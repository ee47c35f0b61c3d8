"""Kinds of requests, such as greedy ones, whose responses must stay the same despite faults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_NO_STREAM = {"stream": False, "stream_options": None}


@dataclass(frozen=True, eq=False)
class RequestKind:
    """A kind of request, defined by its question and by fields such as sampling parameters."""

    name: str
    question: str
    fields: Mapping[str, Any]
    """Fields of the request in addition to the question and the number of tokens."""
    is_read_slowly: bool = False
    """Whether the client pauses while it reads, so that the server's buffers fill up."""

    @property
    def is_streamed(self) -> bool:
        """Return whether the response comes as a stream."""
        return bool(self.fields.get("stream", True))


KINDS = (
    RequestKind("greedy", "Why is the sky blue?", {"ignore_eos": True}),
    RequestKind("greedy", "What is gravity?", {"ignore_eos": True}),
    RequestKind("greedy", "Tell me about the sea.", {"ignore_eos": True}),
    RequestKind(
        "sampled",
        "Write a story about a harbour.",
        {"temperature": 0.8, "seed": 7, "ignore_eos": True},
    ),
    RequestKind(
        "schema",
        "Describe a person.",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": _PERSON, "strict": True},
            }
        },
    ),
    RequestKind(
        "tools",
        "How is the weather in Paris?",
        {"tools": [_WEATHER], "tool_choice": "required"},
    ),
    RequestKind(
        "choices",
        "Write a line about winter.",
        {"n": 4, "temperature": 0.8, "seed": 11, "ignore_eos": True},
    ),
    # Beams change until they end, so servers do not stream them.
    RequestKind("beams", "Name a colour.", {"use_beam_search": True, "n": 3, **_NO_STREAM}),
    RequestKind(
        "slow reader",
        "Describe a long journey.",
        {"ignore_eos": True},
        is_read_slowly=True,
    ),
)
