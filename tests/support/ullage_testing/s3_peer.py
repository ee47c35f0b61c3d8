"""A store that speaks S3, moto's server in a process of its own, and a proxy that breaks answers.

moto needs older packages than Ullage has, so it has an environment of its own: `make install-dev`
makes it in .venv-moto.
"""

import contextlib
import http.client
import os
import re
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

MOTO = Path(
    os.environ.get("ULLAGE_MOTO")
    or Path(__file__).parents[3] / ".venv-moto" / "bin" / "moto_server"
)
"""moto's server."""

needs_moto = pytest.mark.skipif(
    not MOTO.exists() and not os.environ.get("CI"), reason="make install-dev makes .venv-moto"
)
"""Skips a test where moto is missing. It fails in a gate, which sets CI: nobody reads there which
tests were skipped."""

_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=OWNER/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
)
"""Makes an upload the owner's, who may replace objects. Moto does not check signatures."""
Answer = tuple[int, list[tuple[str, str]], bytes]


@dataclass
class S3Peer:
    """A store, as clients of the proxy see it."""

    store: str
    """Host and port of the store itself."""
    address: str = ""
    """URL of the proxy."""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path and headers, in lower case, of what came by the proxy."""
    breaks: Callable[[str, str, dict[str, str], Answer], Answer] | None = None
    """What becomes of an answer, from method, path and headers of its request.

    A body that is shorter than its Content-Length ends the connection.
    """
    is_away: bool = False
    """Whether connections end without an answer."""

    def put(self, path: str, body: bytes = b"", **headers: str) -> None:
        """Create a bucket or an object as its owner."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named["Authorization"] = _SIGNED
        status, _, text = self.ask("PUT", path, named, body)
        assert status == 200, text

    def delete(self, path: str) -> None:
        """Delete an object as its owner."""
        status, _, text = self.ask("DELETE", path, {"Authorization": _SIGNED})
        assert status == 204, text

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Answer:
        connection = http.client.HTTPConnection(self.store, timeout=60)
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def ranges(self, name: str) -> list[int]:
        """Return the first bytes of what was asked of objects of this name."""
        return [
            int(headers["range"].removeprefix("bytes=").partition("-")[0])
            for method, path, headers in self.requests
            if method == "GET" and path.endswith(f"/{name}") and "range" in headers
        ]


@contextlib.contextmanager
def s3_store(log: Path) -> Iterator[str]:
    """Run moto's server, and yield its host and port."""
    assert MOTO.exists(), f"{MOTO} is missing: make install-dev makes it"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [MOTO, "-H", "127.0.0.1", "-p", "0"], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        with log.open(encoding="utf-8") as file:
            text = ""
            waiting = threading.Event()
            while not (found := re.search(r"Running on http://(\S+)", text)):
                assert server.poll() is None, text
                waiting.wait(0.05)
                text += file.read()
        yield found[1]
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def s3_peer(store: str, certificate: Path | None = None) -> Iterator[S3Peer]:
    """Run the proxy before a store, without what it holds from other tests.

    It speaks TLS with the certificate of a folder that has tls.crt and tls.key.
    """
    peer = S3Peer(store)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            peer.requests.append((self.command, self.path, headers))
            if peer.is_away:
                self.close_connection = True
                return
            asked = {name: value for name, value in headers.items() if name != "connection"}
            answer = peer.ask(self.command, self.path, asked)
            if peer.breaks is not None:
                answer = peer.breaks(self.command, urlsplit(self.path).path, headers, answer)
            status, answered, body = answer
            self.send_response_only(status)
            for name, value in answered:
                is_cut = name.lower() == "content-length" and int(value) > len(body)
                self.close_connection |= is_cut and self.command == "GET"
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate / "tls.crt", certificate / "tls.key")
        # Each connection's thread shakes hands, so that no client holds up others.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    scheme = "https" if certificate else "http"
    peer.address = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    peer.ask("POST", "/moto-api/reset", {})
    try:
        yield peer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
