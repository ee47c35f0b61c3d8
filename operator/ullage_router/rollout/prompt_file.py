"""Reads the prompts that users supply to compare the answers of a canary."""

from pathlib import Path
from typing import Any

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.canary_answers import MIN_PROMPTS
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import validate_request

MAX_FILE_BYTES = 1 << 20
"""Maximum size of the file in bytes, which is also that of a ConfigMap."""


class PromptFileError(Exception):
    """Raised for an unusable file. The message names the line and a remedy."""


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[_Message] | None = None


def read_prompts(path: Path) -> list[inference_pb2.GenerateRequest]:
    """Read a JSONL file whose lines are `{"prompt": TEXT}` or `{"messages": [...]}`.

    Raises:
        PromptFileError: the file cannot be read, a line is invalid, or there are too few prompts.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise PromptFileError(f"{path}: longer than {MAX_FILE_BYTES} bytes; leave prompts out")
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        reason = f"{path}: {error.strerror}; create the ConfigMap with the key {path.name}"
        raise PromptFileError(reason) from error
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path}: not UTF-8; save it as UTF-8") from error

    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_request(msgspec.json.decode(line, type=_Line)))
            except (msgspec.DecodeError, ServiceError) as error:
                # The message must not quote the prompt, because it is logged.
                reason = f"{path}: line {number}: {error}"
                raise PromptFileError(reason) from None
    if len(requests) < MIN_PROMPTS:
        raise PromptFileError(f"{path}: {len(requests)} prompts; give at least {MIN_PROMPTS}")
    return requests


def _request(line: _Line) -> inference_pb2.GenerateRequest:
    given: dict[str, Any] = {}
    if line.messages is not None:
        turns = [inference_pb2.Message(role=m.role, content=m.content) for m in line.messages]
        given["messages"] = inference_pb2.Messages(messages=turns)
    if line.prompt is not None:
        given["text"] = line.prompt
    if len(given) != 1:
        raise msgspec.ValidationError("has both or neither of prompt and messages; give one")

    request = inference_pb2.GenerateRequest(**given)
    validate_request(request)
    return request
