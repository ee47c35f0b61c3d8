"""A hub of models with one repository, org/name, as `huggingface_hub` asks for it.

usage: python3 hub.py FOLDER PORT BYTES_PER_S
Serves the files of a folder to everybody. Needs nothing but Python.
"""

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40
PIECES = 20
"""In so many pieces each file is sent."""


class Hub(ThreadingHTTPServer):
    """The repository's files, and which of them were fetched."""

    daemon_threads = True

    def __init__(
        self,
        files: dict[str, bytes],
        host: str = "127.0.0.1",
        port: int = 0,
        bytes_per_s: float | None = None,
    ) -> None:
        super().__init__((host, port), HubHandler)
        self.files = files
        self.bytes_per_s = bytes_per_s
        self.fetched: list[str] = []
        self.may_send = threading.Event()
        self.may_send.set()
        self.has_sent_half = threading.Event()


class HubHandler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/tree/"):
            self._json([self._entry(name) for name in self.server.files])
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": n, "size": len(d)} for n, d in self.server.files.items()]
            self._json({"id": "org/name", "sha": COMMIT, "siblings": siblings})
        elif path.startswith("/org/name/resolve/"):
            self._file(path.rpartition("/")[2], has_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _entry(self, name: str) -> dict[str, object]:
        data = self.server.files[name]
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(data)}
        entry["oid"] = hashlib.sha1(data).hexdigest()
        if name.endswith(".safetensors"):
            lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
            entry["lfs"] = lfs
        return entry

    def _json(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, name: str, has_body: bool) -> None:
        data = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        if not has_body:
            return

        self.server.fetched.append(name)
        size = -(-len(data) // PIECES) or 1
        for start in range(0, len(data), size):
            if name.endswith(".safetensors") and start >= len(data) // 2:
                self.server.has_sent_half.set()
                self.server.may_send.wait()
            self.wfile.write(data[start : start + size])
            if self.server.bytes_per_s is not None:
                time.sleep(size / self.server.bytes_per_s)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def main() -> None:
    folder, port, bytes_per_s = sys.argv[1:]
    files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    with Hub(files, "0.0.0.0", int(port), float(bytes_per_s)) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
