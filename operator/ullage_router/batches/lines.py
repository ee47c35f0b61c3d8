"""The lines of a batch's input, and the lines of its output. The functions do no network I/O."""

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import UNSET, UnsetType

from ullage_router.batches.batch import BatchError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINE_BYTES = 8 << 20
MAX_CUSTOM_ID = 512
MAX_ERRORS = 100
"""Maximum number of errors that are reported. Checking ends there."""
_TEXT = msgspec.json.Decoder(str)
_encode = msgspec.json.Encoder().encode


class _Fields(msgspec.Struct):
    """The fields of a line. Others are skipped, since a line has room for a million of them."""

    custom_id: msgspec.Raw | UnsetType = UNSET
    method: msgspec.Raw | UnsetType = UNSET
    url: msgspec.Raw | UnsetType = UNSET
    body: msgspec.Raw | UnsetType = UNSET


_FIELDS = msgspec.json.Decoder(_Fields)


class _Body(msgspec.Struct):
    stream: bool | None = None


_BODY = msgspec.json.Decoder(_Body, strict=False)
"""As lenient as the endpoints, for which 1 and "true" ask for a stream, too."""


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch."""

    custom_id: str
    body: msgspec.Raw


_LINE = msgspec.json.Decoder(BatchLine)


class _Numbered(msgspec.Struct, frozen=True):
    id: str


_NUMBERED = msgspec.json.Decoder(_Numbered)


class LineChecker:
    """Checks the lines of an input file, one after the other.

    Args:
        endpoint: The endpoint of the batch.
        most: Maximum number of lines, and of blank lines in addition.

    Attributes:
        errors: The errors in the lines so far.
        total: Number of lines so far that are not blank.
    """

    def __init__(self, endpoint: str, most: int) -> None:
        self._endpoint = endpoint
        self._most = most
        self._ids = set[bytes]()
        """Digests of the ids, which take less memory than the ids."""
        self._num_blank = 0
        self.errors: list[BatchError] = []
        self.total = 0

    def add(self, number: int, line: bytes) -> bool:
        """Check a line, and return whether the next one is worth a check."""
        is_long = len(line) > MAX_LINE_BYTES
        if not is_long and not line.strip():
            self._num_blank += 1
            if self._num_blank > self._most:
                message = f"the file has more than {self._most} blank lines; remove them"
                self._note("too_many_lines", message, None, number)
            return self._num_blank <= self._most
        self.total += 1
        if self.total > self._most:
            message = f"the file has more than {self._most} requests; send it in several batches"
            self._note("too_many_requests", message, None, None)
            return False
        if is_long:
            message = f"the line has more than {MAX_LINE_BYTES} bytes; shorten it"
            self._note("line_too_long", message, None, number)
            return False
        if problem := self._problem(line):
            self._note(*problem, number)
        return len(self.errors) < MAX_ERRORS

    def end(self) -> None:
        """Check that there were lines."""
        if not self.total:
            self._note("empty_file", "the file has no requests; write one on each line", None, None)

    def _note(self, code: str, message: str, param: str | None, line: int | None) -> None:
        self.errors.append(BatchError(code=code, message=message, param=param, line=line))

    def _problem(self, line: bytes) -> tuple[str, str, str | None] | None:
        """Return code, message and field of the first problem of a line, or None."""
        try:
            fields = _FIELDS.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return "invalid_json_line", f"the line is not a JSON object: {error}", None
        values = msgspec.structs.asdict(fields)
        for name, value in values.items():
            if value is UNSET:
                return "missing_required_parameter", f"{name} is missing; add it", name

        custom_id = _text(values["custom_id"])
        if not custom_id or len(custom_id) > MAX_CUSTOM_ID:
            message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
            return "invalid_custom_id", message, "custom_id"
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._ids:
            message = f"custom_id {custom_id[:60]!r} is that of an earlier line; change one of them"
            return "duplicate_custom_id", message, "custom_id"
        self._ids.add(digest)

        if _text(values["method"]) != "POST":
            return "invalid_method", "method must be POST", "method"
        if _text(values["url"]) != self._endpoint:
            message = f"url must be {self._endpoint}, the endpoint of the batch"
            return "mismatched_url", message, "url"
        return _body_problem(values["body"])


def _body_problem(body: msgspec.Raw) -> tuple[str, str, str | None] | None:
    try:
        is_streamed = _BODY.decode(body).stream
    except msgspec.ValidationError as error:
        if not bytes(body).lstrip().startswith(b"{"):
            return "invalid_body", f"body must be an object: {error}", "body"
        return None  # the request itself gets an error that names the field
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "invalid_body", f"body must be an object: {error}", "body"
    if is_streamed:
        return "invalid_stream", "a batch has no streams; leave out stream", "body.stream"
    return None


def _text(raw: msgspec.Raw) -> str:
    """Return a JSON string, or an empty text if the JSON is something else."""
    try:
        return _TEXT.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def check_file(path: Path, endpoint: str, most: int) -> LineChecker:
    """Check the lines of a file. This blocks.

    Raises:
        OSError: The file cannot be read.
    """
    checker = LineChecker(endpoint, most)
    with open(path, "rb") as file:
        number = 1
        while line := _next_line(file):
            if not checker.add(number, _content(line)):
                return checker
            number += 1
    checker.end()
    return checker


def _next_line(file: BinaryIO) -> bytes:
    """Return the next line with its line break, or the beginning of a line that is too long."""
    return file.readline(MAX_LINE_BYTES + 2)


def _content(line: bytes) -> bytes:
    """Return a line without its line break."""
    return line.removesuffix(b"\n").removesuffix(b"\r")


class LineIndex:
    """The places of the lines of an input file that are not blank. All methods block.

    Args:
        path: The file, whose lines were checked.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is too long.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q")
        with open(path, "rb") as file:
            start = 0
            while line := _next_line(file):
                if len(_content(line)) > MAX_LINE_BYTES:
                    raise ValueError(f"{path}: the line at byte {start} is too long")
                if line.strip():
                    self._starts.append(start)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, number: int) -> BatchLine:
        """Return a line.

        Raises:
            OSError: The file cannot be read.
        """
        with open(self._path, "rb") as file:
            file.seek(self._starts[number])
            return _LINE.decode(_next_line(file))


@dataclass(frozen=True, slots=True)
class BatchReply:
    """The response to a request of a batch."""

    status: int
    """HTTP status."""
    body: bytes
    """JSON."""
    request_id: str
    retry_after_s: float | None = None

    @property
    def is_success(self) -> bool:
        return self.status == 200


def reply_line(batch: str, number: int, custom_id: str, reply: BatchReply) -> bytes:
    """Return the line of an output file for a request that got a response."""
    response = {
        "status_code": reply.status,
        "request_id": reply.request_id,
        "body": msgspec.Raw(reply.body),
    }
    return _line(batch, number, custom_id, response, None)


def error_line(batch: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """Return the line of an error file for a request without a response."""
    return _line(batch, number, custom_id, None, {"code": code, "message": message})


def _line(batch: str, number: int, custom_id: str, response: object, error: object) -> bytes:
    line = {
        "id": f"batch_req_{batch.removeprefix('batch_')}_{number}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return _encode(line) + b"\n"


def answered_numbers(path: Path) -> Iterator[int]:
    """Yield the numbers of the requests that an output file answers. This blocks.

    Raises:
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        for line in file:
            yield int(_NUMBERED.decode(line).id.rpartition("_")[2])
