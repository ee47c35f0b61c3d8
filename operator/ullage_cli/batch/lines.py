"""OpenAI's batch format: lines of requests, lines of answers, and the lines still to be answered.

A line of the output names the request by its `custom_id`. A line of the input that has none, since
it is malformed, is named by its number (`error.line`).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
METHOD = "POST"
ID_CHARS = 24
SHOWN_CHARS = 40
"""Most characters of an invalid value in a message."""
INVALID_LINE = "invalid_line"
SUCCESS = range(200, 300)
"""HTTP statuses of answers without an error."""

Key = str | int
"""The `custom_id` of a line, or the number of a line without one."""


class _Fields(msgspec.Struct):
    """The fields of a line of the input. Their types are checked by hand, for better messages."""

    custom_id: Any = None
    method: Any = METHOD
    url: Any = None
    body: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


class _Body(msgspec.Struct):
    model: Any = None
    stream: Any = None


class _Failure(msgspec.Struct):
    line: int | None = None


class _Response(msgspec.Struct):
    status_code: int = 0


class _Written(msgspec.Struct):
    """The fields of a line of the output that resuming needs."""

    custom_id: str | None
    response: _Response | None
    error: _Failure | None


_BEGIN = b'{"id":"batch_req_'
"""Beginning of every line that `ullage batch` writes."""

_LINE = msgspec.json.Decoder(_Fields)
_BODY = msgspec.json.Decoder(_Body)
_ANSWER = msgspec.json.Decoder(_Written)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of the input."""

    custom_id: str
    url: str
    body: bytes
    """The body as JSON."""
    model: str
    """The model that the body asks for (empty if it names none)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the input: where it is, and why it is malformed, if it is."""

    number: int
    """Number of the line, from 1."""
    offset: int
    """Offset of the line in the file, in bytes."""
    key: Key
    problem: str = ""
    """Why the line is no request (empty if it is one)."""


@dataclass
class BatchPlan:
    """All lines of an input."""

    entries: list[Entry] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    """Models that the requests name."""


@dataclass
class Answered:
    """The lines of an output."""

    keys: set[Key] = field(default_factory=set)
    num_bytes: int = 0
    """Length of all whole lines. A torn line follows if the file is longer."""
    num_failed: int = 0
    """Number of lines with an error, or with an HTTP status other than success."""


class MalformedLine(ValueError):
    """Raised for a line of the input that is no request.

    custom_id
        the id of the line (empty if it has none that can be read)
    """

    def __init__(self, custom_id: str, message: str) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def read_plan(lines: Iterable[bytes]) -> BatchPlan:
    """Read all lines of an input. Empty lines are skipped.

    Raises:
        ValueError: two lines have the same `custom_id`.
    """
    plan = BatchPlan()
    numbers: dict[str, int] = {}
    offset = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            problem = ""
            try:
                request = parse_line(line)
                custom_id = request.custom_id
                if request.model:
                    plan.models.add(request.model)
            except MalformedLine as error:
                custom_id = error.custom_id
                problem = str(error)

            if custom_id:
                first = numbers.setdefault(custom_id, number)
                if first != number:
                    raise ValueError(
                        f"lines {first} and {number} have the custom_id {custom_id!r}; give each "
                        "line its own"
                    )
            plan.entries.append(Entry(number, offset, custom_id or number, problem))
        offset += len(line)
    return plan


def parse_line(line: bytes) -> BatchRequest:
    """Return the request of a line.

    Raises:
        MalformedLine: the line is no request.
    """
    try:
        line.decode()
        fields = _LINE.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedLine("", f"not a JSON object: {error}") from None

    custom_id = fields.custom_id
    if not isinstance(custom_id, str) or not custom_id:
        raise MalformedLine("", f"custom_id is {_shown(custom_id)}; give a text of its own")
    if fields.method != METHOD:
        raise MalformedLine(custom_id, f"method is {_shown(fields.method)}; use POST")
    if fields.url not in URLS:
        raise MalformedLine(custom_id, f"url is {_shown(fields.url)}; use one of {', '.join(URLS)}")
    try:
        body = _BODY.decode(fields.body)
    except msgspec.MsgspecError:
        raise MalformedLine(custom_id, "body is not an object; give a request's body") from None
    if body.stream:
        raise MalformedLine(
            custom_id, f"body.stream is {_shown(body.stream)}; leave it out, as answers are whole"
        )
    model = body.model if isinstance(body.model, str) else ""
    return BatchRequest(custom_id, fields.url, bytes(fields.body), model)


def read_answered(lines: Iterable[bytes]) -> Answered:
    """Read the lines of an output up to a torn last line, which has no end.

    Raises:
        ValueError: a whole line is none that `ullage batch` writes.
    """
    answered = Answered()
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            # What is cut must be a batch's own.
            if line[: len(_BEGIN)] != _BEGIN[: len(line)]:
                raise ValueError(f"line {number} is not an answer of a batch")
            break
        try:
            written = _ANSWER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"line {number} is not an answer of a batch ({error})") from None

        key = written.custom_id or (written.error and written.error.line)
        if not key:
            raise ValueError(f"line {number} names no request")
        answered.keys.add(key)
        answered.num_bytes += len(line)
        response = written.response
        is_failed = response is None or response.status_code not in SUCCESS
        answered.num_failed += bool(written.error) or is_failed
    return answered


def remaining(plan: BatchPlan, answered: Answered) -> Iterator[Entry]:
    """Yield the lines of an input that have no answer yet."""
    return (entry for entry in plan.entries if entry.key not in answered.keys)


def answer_line(custom_id: str, status: int, request_id: str, body: Any) -> bytes:
    """Return the line of an HTTP answer.

    Args:
        custom_id: the request.
        status: the HTTP status.
        request_id: the server's id of the request (empty if it gave none).
        body: the answer's body, parsed.
    """
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _encode(custom_id, custom_id, response, None)


def error_line(entry: Entry) -> bytes:
    """Return the line of a malformed line."""
    error = {
        "code": INVALID_LINE,
        "message": f"line {entry.number}: {entry.problem}",
        "line": entry.number,
    }
    custom_id = entry.key if isinstance(entry.key, str) else None
    return _encode(entry.key, custom_id, None, error)


def _encode(
    key: Key, custom_id: str | None, response: Mapping[str, Any] | None, error: Any
) -> bytes:
    # The same request gets the same id in every run.
    digest = hashlib.sha256(f"{type(key).__name__} {key}".encode(errors="surrogatepass"))
    line = {
        "id": f"batch_req_{digest.hexdigest()[:ID_CHARS]}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:SHOWN_CHARS]
