"""The HTTP endpoint on which every process serves its metrics for Prometheus."""

import socket
import threading
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer

from ullage_common.process.addresses import listen
from ullage_common.process.metrics import exposition

_NOT_READY = "503 Service Unavailable"


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because Prometheus and the kubelet send requests every few seconds."""


def serve_metrics(
    registry: CollectorRegistry,
    port: int,
    host: str | None,
    is_ready: Callable[[], bool] | None = None,
) -> Callable[[], None]:
    """Serve metrics at http://host:port/metrics from a thread.

    Args:
        registry: the metrics to serve.
        host: the address to listen on, or None for all addresses.
        is_ready: returns whether /readyz answers with status 200 instead of 503. With None,
            /readyz is not served.

    Returns:
        A function that stops the server.

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
    stopping = threading.Event()

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
