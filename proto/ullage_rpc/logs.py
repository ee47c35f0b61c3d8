"""JSON logs, one object a line: time, level, logger, message and whatever `extra` carries."""

import logging
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TextIO

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Renders a record with its extra fields; values that JSON lacks are rendered by repr."""

    def __init__(self, fields: Mapping[str, object] = MappingProxyType({})) -> None:
        """`fields` are part of every line."""
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        line.update({k: v for k, v in vars(record).items() if k not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=repr).decode()


def configure(
    level: str = "info",
    stream: TextIO = sys.stderr,
    fields: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Sends every log record of this process to `stream` as JSON, with `fields` in each line."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(fields))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _rfc3339(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
