"""The HTTP endpoint on which every process serves its metrics for Prometheus."""

import contextlib
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer

from ullage_common.process.addresses import listen
from ullage_common.process.metrics import exposition

_NOT_READY = "503 Service Unavailable"


IDLE_TIMEOUT_S = 10.0
"""Seconds without data after which a connection is closed, because its client may be gone."""
_ACCEPT_RETRY_S = 0.5
"""Seconds until connections are accepted again, for example after open files ran out."""
MAX_CONNECTIONS = 64
"""Maximum number of open connections, each of which has a thread. A newer one ends the oldest."""


class _Handler(WSGIRequestHandler):
    def handle(self) -> None:
        """Answer the request. A client that is gone needs no answer."""
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because Prometheus and the kubelet send requests every few seconds."""


class _Server(ThreadingWSGIServer):
    """A server with a bounded number of connections.

    It accepts connections at most twice a second while that fails.
    """

    stopping: threading.Event

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._open: OrderedDict[socket.socket, None] = OrderedDict()
        """The open connections, the oldest first."""
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, and end the oldest if there are too many."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MAX_CONNECTIONS else None
            if oldest:
                with contextlib.suppress(OSError):  # the client has closed it already
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread's wait for the client
                self._open.move_to_end(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            self.stopping.wait(_ACCEPT_RETRY_S)
            raise


def serve_metrics(
    registry: CollectorRegistry,
    port: int,
    host: str | None,
    is_ready: Callable[[], bool] | None = None,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
) -> Callable[[], None]:
    """Serve metrics at http://host:port/metrics from a thread.

    Args:
        registry: the metrics to serve.
        host: the address to listen on, or None for all addresses.
        is_ready: returns whether /readyz answers with status 200 instead of 503. With None,
            /readyz is not served.
        idle_timeout_s: seconds without data after which a connection is closed.

    Returns:
        A function that stops the server.

    Raises:
        OSError: the port cannot be used.
    """
    listener = listen(host, port)
    address, number = listener.getsockname()[:2]
    handler = type("Handler", (_Handler,), {"timeout": idle_timeout_s})
    server = _Server((address, number), handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name = address
    server.server_port = number
    server.setup_environ()
    server.set_app(_pages(registry, is_ready))
    stopping = server.stopping = threading.Event()

    # `serve_forever` looks twice a second whether to stop, and `shutdown` waits for the next look.
    def serve() -> None:
        while not stopping.is_set():
            server.handle_request()

    thread = threading.Thread(target=serve, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        if stopping.is_set():
            return
        stopping.set()
        listener.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection
        thread.join()
        server.server_close()

    return stop


def _pages(registry: CollectorRegistry, is_ready: Callable[[], bool] | None) -> Any:
    # Many threads that render at one time would leave the process's other threads no GIL.
    rendering = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        status = "200 OK"
        kind = CONTENT_TYPE_LATEST
        if environ["PATH_INFO"] != "/readyz" or is_ready is None:
            with rendering:
                body = exposition(registry)
        else:
            kind = "text/plain"
            status, body = ("200 OK", b"ready\n") if is_ready() else (_NOT_READY, b"not ready\n")
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    return answer
