"""JSON logs, one object a line: time, level, logger, message and whatever `extra` carries."""

import logging
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TextIO

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ENCODER = msgspec.json.Encoder(enc_hook=repr)


class _LeanRecord(logging.LogRecord):
    """Without what no line shows: the names made of a path take as long as the rest."""

    def __init__(
        self,
        name: str,
        level: int,
        pathname: str,
        lineno: int,
        msg: object,
        args: Any,
        exc_info: Any,
        func: str | None = None,
        sinfo: str | None = None,
        **_: object,
    ) -> None:
        self.name, self.levelno, self.levelname = name, level, logging.getLevelName(level)
        self.pathname = self.filename = self.module = pathname
        self.lineno, self.funcName = lineno, func or ""
        self.msg, self.args = msg, args
        if args and len(args) == 1 and isinstance(args[0], Mapping) and args[0]:
            self.args = args[0]  # `%(name)s`, as logging has it
        self.exc_info, self.exc_text, self.stack_info = exc_info, None, sinfo
        self.created = time.time()
        self.msecs = self.created % 1 * 1000
        self.relativeCreated = 0.0
        self.thread = self.threadName = self.process = self.processName = None


class JsonFormatter(logging.Formatter):
    """Renders a record with its extra fields; values that JSON lacks are rendered by repr."""

    def __init__(self, fields: Mapping[str, object] = MappingProxyType({})) -> None:
        """`fields` are part of every line."""
        super().__init__()
        self._fields = fields
        self._second = 0
        self._second_text = ""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self._time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        fields = vars(record)
        line.update({name: fields[name] for name in fields.keys() - _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _ENCODER.encode(line).decode()

    def _time(self, seconds: float) -> str:
        """RFC 3339, UTC; the whole seconds' text serves all lines of a second."""
        whole = int(seconds)
        if whole != self._second:
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
            self._second = whole
        return f"{self._second_text}.{int(seconds % 1 * 1000):03d}Z"


def configure(
    level: str = "info",
    stream: TextIO = sys.stderr,
    fields: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Sends every log record of this process to `stream` as JSON, with `fields` in each line."""
    # What no line here shows is not looked up for each (logging's own advice).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    vars(logging)["logAsyncioTasks"] = False  # from Python 3.12 on
    logging.setLogRecordFactory(_LeanRecord)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(fields))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
