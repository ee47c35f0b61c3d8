"""The fields of a GenerateRequest that servers of different versions know.

A server ignores fields that it does not know, so that an answer would lack what the client asked
for. Servers therefore announce their fields (`GetModelResponse.request_fields`), and nobody sends a
field that the server has not announced. A field's path names the fields in which it is, for example
`sampling.bad_words`.
"""

import functools
from collections.abc import Collection, Iterable, Iterator

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from ullage.inference.v1 import inference_pb2

_REQUEST = inference_pb2.DESCRIPTOR.message_types_by_name["GenerateRequest"]
_LAST_NUMBERS = {
    "GenerateRequest": 16,
    "TokenIds": 1,
    "Messages": 3,
    "Message": 6,
    "ToolCall": 3,
    "Tools": 4,
    "SamplingParams": 9,
    "StopConditions": 5,
    "OutputOptions": 5,
    "Samples": 3,
    "BeamSearch": 2,
    "Grammar": 5,
    "JsonObject": 0,
    "Choice": 1,
    "Continuation": 3,
    "PartialAnswer": 3,
}
"""The highest field number of each message in 0.2.0, the last version that announces no fields."""
_Tree = dict[str, "_Tree"]
_END = ""
"""Key of a node of a tree of fields at which a path ends."""
_CLIENT_NAMES = {
    "output.include_stop": "include_stop_str_in_output",
    "output.omit_special_stop": "include_stop_str_in_output",
}
"""Names that clients have for fields, where these are not the last part of the path."""
_AFTER_REASONING = "response_format or stop after reasoning"
"""The reason why a router sets `reasoning`, which clients do not set."""
_OF_THE_PROMPT = ("messages", "text", "truncate_prompt_tokens", "omit_special_tokens")
"""Fields that a router turns into token ids, so that its engines never get them."""


@functools.cache
def known_fields() -> frozenset[str]:
    """Return the paths of all fields that this version knows."""
    return frozenset(path for path, _ in _fields(_REQUEST))


@functools.cache
def later_fields() -> frozenset[str]:
    """Return the paths of the fields that this version knows and 0.2.0 does not."""
    fields = _fields(_REQUEST)
    return frozenset(path for path, is_later in fields if is_later)


def unknown_fields(announced: Collection[str]) -> frozenset[str]:
    """Return the paths of the fields that this version knows and another server does not.

    Args:
        announced: the server's `GetModelResponse.request_fields`.
    """
    return known_fields().difference(announced) if announced else later_fields()


def router_fields(unknown_to_engines: Iterable[str]) -> list[str]:
    """Return the paths of the fields that a router announces, in alphabetical order.

    Args:
        unknown_to_engines: paths of the fields that at least one of its engines does not know.
    """
    lacking = (path for path in unknown_to_engines if path.split(".")[0] not in _OF_THE_PROMPT)
    return sorted(known_fields().difference(lacking))


def set_fields(request: inference_pb2.GenerateRequest, paths: frozenset[str]) -> frozenset[str]:
    """Return those of the paths whose fields are set in a request."""
    return frozenset(_set_paths(request, _tree(paths), ""))


def client_names(paths: Iterable[str]) -> str:
    """Return the fields as clients name them, for error messages."""
    return ", ".join(sorted(set(map(_client_name, paths))))


def _fields(message: Descriptor, is_later: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the path of each field of a message type, and whether 0.2.0 does not know the field.

    Args:
        message: the message type.
        is_later: whether 0.2.0 does not know the message itself.
    """
    last = 0 if is_later else _LAST_NUMBERS.get(message.name, 0)
    for field in message.fields:
        is_new = field.number > last
        yield field.name, is_new
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            for path, is_new_inside in _fields(inner, is_new):
                yield f"{field.name}.{path}", is_new_inside


def _client_name(path: str) -> str:
    if path.partition(".")[0] == "reasoning":
        return _AFTER_REASONING
    return _CLIENT_NAMES.get(path, path.rpartition(".")[2])


@functools.lru_cache(maxsize=16)
def _tree(paths: frozenset[str]) -> _Tree:
    """Return the paths as nested mappings by the names of fields."""
    root: _Tree = {}
    for path in paths:
        node = root
        for name in path.split("."):
            node = node.setdefault(name, {})
        node[_END] = {}
    return root


def _set_paths(message: Message, tree: _Tree, before: str) -> Iterator[str]:
    """Yield the paths of the fields in a tree that are set in a message.

    Args:
        message: the message.
        tree: the fields to look for.
        before: path of the message, with a dot at its end.
    """
    for field, value in message.ListFields():
        node = tree.get(field.name)
        if node is None:
            continue
        if _END in node:
            yield before + field.name
        if len(node) > (_END in node):
            for item in value if field.is_repeated else (value,):
                yield from _set_paths(item, node, f"{before}{field.name}.")
