"""Reports a follower's liveness and readiness to kubelet probes.

A separate thread answers over HTTP. The follower records a heartbeat whenever it polls its
connection to the leader, so that a hung follower fails its probe even though the HTTP thread is
still running.
"""

import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket

LIVE_PATH = "/healthz"
READY_PATH = "/readyz"
HUNG_AFTER_S = 60.0
"""Seconds without a heartbeat after which a follower counts as hung."""
_READ_TIMEOUT_S = 5.0


class FollowerHealth:
    """A follower's liveness and readiness, which any thread may read."""

    def __init__(self) -> None:
        self.is_computing = False
        """Whether the group is complete and the model is loaded on this node."""
        self._looked_at = time.monotonic()

    def on_look(self) -> None:
        """Record the follower's heartbeat."""
        self._looked_at = time.monotonic()

    @property
    def is_live(self) -> bool:
        """Whether the follower's latest heartbeat is less than `HUNG_AFTER_S` seconds old."""
        return time.monotonic() - self._looked_at < HUNG_AFTER_S

    def status(self, path: str) -> int:
        """Return the HTTP status code for a probe of `path`."""
        holds = {LIVE_PATH: self.is_live, READY_PATH: self.is_live and self.is_computing}
        if path not in holds:
            return HTTPStatus.NOT_FOUND
        return HTTPStatus.OK if holds[path] else HTTPStatus.SERVICE_UNAVAILABLE

    def serve(self, listener: socket) -> None:
        """Start a thread that answers probes on a listening socket until this process exits."""
        health = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _READ_TIMEOUT_S

            def do_GET(self) -> None:
                self.send_response(health.status(self.path))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing, because the kubelet probes every few seconds."""

        server = ThreadingHTTPServer(listener.getsockname()[:2], Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = listener
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
