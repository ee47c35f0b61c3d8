"""JSON logs, one object a line, and the Prometheus endpoint that every process serves.

A line holds time, level, logger, message and the fields of `extra`; where `extra` has a mapping
`MORE_FIELDS`, also what is in that, which costs a third where there are many.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TextIO
from wsgiref.simple_server import WSGIRequestHandler

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer

from ullage_common.process.addresses import listen
from ullage_common.process.log_writer import new_handler
from ullage_common.process.metrics import exposition

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
MORE_FIELDS = "more_fields"
_ENCODER = msgspec.json.Encoder(enc_hook=repr)


class _LeanRecord(logging.LogRecord):
    """A log record without the names made of a path, which no line shows and which cost as much as
    the rest."""

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
        self.lineno = lineno
        self.funcName = func or ""
        self.msg = msg
        self.args = args
        if args and len(args) == 1 and isinstance(args[0], Mapping) and args[0]:
            self.args = args[0]  # `%(name)s`, as logging has it
        self.exc_info = exc_info
        self.exc_text = None
        self.stack_info = sinfo
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
        more: Any = line.pop(MORE_FIELDS, {})
        line.update(more)
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
    """Send every log record of this process to `stream` as JSON, with `fields` in each line.

    A slow reader of the stream delays nobody (`log_writer`).
    """
    # What no line here shows is not looked up for each (logging's own advice).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    vars(logging)["logAsyncioTasks"] = False  # from Python 3.12 on
    logging.setLogRecordFactory(_LeanRecord)
    handler = new_handler(stream)
    handler.setFormatter(JsonFormatter(fields))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: Prometheus and the kubelet ask every few seconds."""


_NOT_READY = "503 Service Unavailable"


def serve_metrics(
    registry: CollectorRegistry,
    port: int,
    host: str | None,
    is_ready: Callable[[], bool] | None = None,
) -> Callable[[], None]:
    """Serve `registry` at http://host:port/metrics from a thread; return the function that stops
    it.

    With `is_ready` also /readyz, 200 or 503.

    Args:
        host: None: every address.

    Raises:
        OSError: the port cannot be used.
    """
    listener = listen(host, port)
    address, number = listener.getsockname()[:2]
    server = ThreadingWSGIServer((address, number), _QuietHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name = address
    server.server_port = number
    server.setup_environ()
    server.set_app(_pages(registry, is_ready))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _pages(registry: CollectorRegistry, is_ready: Callable[[], bool] | None) -> Any:
    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        status = "200 OK"
        kind = CONTENT_TYPE_LATEST
        if environ["PATH_INFO"] != "/readyz" or is_ready is None:
            body = exposition(registry)
        else:
            kind = "text/plain"
            status, body = ("200 OK", b"ready\n") if is_ready() else (_NOT_READY, b"not ready\n")
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    return answer
