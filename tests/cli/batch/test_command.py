"""`ullage batch` from the command line to its files, against a server on a real socket."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ullage_cli.batch.sender import MAX_FAULTS, MAX_REFUSED_S, Tries, pause_s, seconds_of
from ullage_cli.main import main

Respond = Callable[[int, dict[str, Any]], tuple[int, dict[str, str], bytes]]
"""Makes the status, headers and body of the answer to a request with a number and a body."""


class Server:
    """A server whose answers a function makes."""

    def __init__(self) -> None:
        self.respond: Respond = lambda number, body: (200, {}, json.dumps({"asked": body}).encode())
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = 0
        self.is_open = threading.Event()
        """Set while answers may leave."""
        self.is_open.set()
        self.on_probe: Callable[[], object] = lambda: None
        """Called before each answer to a GET."""
        self.arrived = threading.Semaphore(0)
        self._running = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self.is_open.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        with self._lock:
            self.bodies.append(body)
            number = len(self.bodies)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        self.arrived.release()
        self.is_open.wait()
        with self._lock:
            self._running -= 1
        return self.respond(number, body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.on_probe()
                if "wrong" in self.headers.get("authorization", ""):
                    self._send(401, {}, b"no such key")
                else:
                    self._send(200, {}, b'{"data": [{"id": "m"}]}')

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                body = json.loads(self.rfile.read(length))
                self._send(*server.answer({"path": self.path, **body}))

            def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    pass  # the client is gone

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def write_input(folder: Path, count: int = 20, **body: Any) -> Path:
    path = folder / "in.jsonl"
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": f"p{number}", **body},
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def arguments(folder: Path, url: str, *more: str) -> list[str]:
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return ["batch", *files, "--url", url, *more]


def outputs(folder: Path) -> dict[str, Any]:
    documents = [json.loads(each) for each in (folder / "out.jsonl").read_text().splitlines()]
    by_id = {each["custom_id"]: each for each in documents}
    assert len(by_id) == len(documents), "a request has two answers"
    return by_id


def test_each_request_gets_its_answer(server: Server, tmp_path: Path) -> None:
    write_input(tmp_path)
    server.respond = lambda number, body: (
        200,
        {"x-request-id": f"id-{body['prompt']}"},
        json.dumps({"asked": body}, indent=1).encode(),
    )
    assert main(arguments(tmp_path, f"{server.url}/v1", "--concurrency", "3")) == 0
    assert server.most_at_once <= 3
    answered = outputs(tmp_path)
    assert len(answered) == 20
    for number in range(20):
        assert answered[f"r{number}"]["error"] is None
        assert answered[f"r{number}"]["response"] == {
            "status_code": 200,
            "request_id": f"id-p{number}",
            "body": {"asked": {"path": "/v1/completions", "model": "m", "prompt": f"p{number}"}},
        }


def test_a_second_run_sends_what_is_left(server: Server, tmp_path: Path) -> None:
    write_input(tmp_path, 10)
    assert main(arguments(tmp_path, server.url)) == 0
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()

    server.bodies.clear()
    assert main(arguments(tmp_path, server.url)) == 0
    assert not server.bodies
    assert path.read_bytes() == whole

    path.write_bytes(whole[:-20])
    assert main(arguments(tmp_path, server.url)) == 0
    assert len(server.bodies) == 1
    assert sorted(path.read_bytes().split(b"\n")) == sorted(whole.split(b"\n"))


def test_refusals_are_obeyed(server: Server, tmp_path: Path) -> None:
    write_input(tmp_path, 4)
    server.respond = lambda number, body: (
        (429, {"retry-after": "0"}, b"{}") if number <= 9 else (200, {}, b"{}")
    )
    assert main(arguments(tmp_path, server.url)) == 0
    assert len(server.bodies) == 13


def test_failures_are_lines_too(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_input(tmp_path, 2)
    path.write_text(path.read_text() + "nonsense\n")
    server.respond = lambda number, body: (
        (400, {}, b'{"error": {"message": "no"}}')
        if body["prompt"] == "p1"
        else (403, {}, b"<html>")
    )
    assert main(arguments(tmp_path, server.url)) == 1
    answered = outputs(tmp_path)
    assert answered["r1"]["response"]["status_code"] == 400
    assert answered["r1"]["response"]["body"] == {"error": {"message": "no"}}
    assert answered["r0"]["response"]["status_code"] == 403
    assert answered["r0"]["response"]["body"]["error"]["message"] == "<html>"
    assert answered[None]["error"]["line"] == 3
    assert "3 answers, 3 of them failed" in capsys.readouterr().out
    # The failures of the first run decide the status of the second one.
    assert main(arguments(tmp_path, server.url)) == 1


def test_a_page_is_no_answer(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_cli.batch.sender.FIRST_PAUSE_S", 0.01)
    write_input(tmp_path, 2)
    server.respond = lambda number, body: (
        (200, {}, b"<html>") if body["prompt"] == "p1" else (200, {}, b"{}")
    )
    assert main(arguments(tmp_path, server.url)) == 1
    response = outputs(tmp_path)["r1"]["response"]
    assert response["status_code"] == 502
    assert (
        "answers 200 with a body that is not JSON: <html>" in response["body"]["error"]["message"]
    )
    assert len(server.bodies) == 1 + MAX_FAULTS
    assert main(arguments(tmp_path, server.url)) == 1


def test_a_redirect_stops_a_batch_without_lines(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path, 2)
    server.respond = lambda number, body: (307, {"location": "https://elsewhere/login"}, b"")
    assert main(arguments(tmp_path, server.url)) == 2
    assert "/v1/completions answers 307 (https://elsewhere/login)" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").read_bytes()


def test_what_stops_a_batch(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    write_input(tmp_path, 2)
    (tmp_path / "other.jsonl").write_text("hello")
    (tmp_path / "stranger.jsonl").write_text(
        '{"custom_id": "zz", "response": {"status_code": 200}, "error": null}\n'
    )
    twice = tmp_path / "twice.jsonl"
    twice.write_text((tmp_path / "in.jsonl").read_text() * 2)
    pipe, other_end = os.pipe()
    os.close(other_end)
    cases = {
        "answers 401: no such key; set --api-key": ["--api-key", "wrong"],
        "in.jsonl: is the input, too": ["-o", str(tmp_path / "in.jsonl")],
        "line 1 is not an answer of a batch": ["-o", str(tmp_path / "other.jsonl")],
        "has an answer to 'zz', which": ["-o", str(tmp_path / "stranger.jsonl")],
        "lines 1 and 3 have the custom_id 'r0'": ["-i", str(twice)],
        "No such file or directory": ["-i", str(tmp_path / "none.jsonl")],
        "--secrets is for the manifest of -f": ["--secrets", str(tmp_path)],
        "is no regular file": ["-i", f"/dev/fd/{pipe}"],
        "--served-model-name is for --model": ["--served-model-name", "x"],
        "--url http://127.0.0.1:9: ": ["--url", "http://127.0.0.1:9"],
    }
    for message, more in cases.items():
        with subtests.test(message):
            assert main(arguments(tmp_path, server.url, *more)) == 2
            assert message in capsys.readouterr().err
    os.close(pipe)
    assert not server.bodies
    assert (tmp_path / "other.jsonl").read_text() == "hello"


def test_another_model_is_refused_before_anything_is_sent(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path, 2, model="gpt-4o")
    assert main(arguments(tmp_path, server.url)) == 2
    assert "ask for the model gpt-4o, but the server has m" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").read_bytes()


def test_a_key_that_ends_stops_the_batch_without_lines(server: Server, tmp_path: Path) -> None:
    write_input(tmp_path, 8)
    server.respond = lambda number, body: (200, {}, b"{}") if number <= 3 else (401, {}, b"over")
    assert main(arguments(tmp_path, server.url, "--concurrency", "1")) == 2
    assert len(outputs(tmp_path)) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_batch_goes_on(server: Server, tmp_path: Path, number: int) -> None:
    write_input(tmp_path, 40)
    holds = 10

    def respond(count: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if count >= holds:
            server.is_open.clear()
        return 200, {}, b"{}"

    server.respond = respond
    command = [sys.executable, "-m", "ullage_cli.main"]
    command += arguments(tmp_path, server.url, "--concurrency", "4")
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ}) as process:
        for _ in range(holds + 1):
            assert server.arrived.acquire(timeout=120)
        with (tmp_path / "in.jsonl").open("rb"):
            assert main(arguments(tmp_path, server.url)) == 2, "two write one output"
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    if number != signal.SIGKILL:
        assert process.returncode == 130, err
        assert b"interrupted; run the same command to go on" in err
        assert (tmp_path / "out.jsonl").read_bytes().endswith(b"\n")

    server.respond = lambda number, body: (200, {}, b"{}")
    server.is_open.set()
    assert main(arguments(tmp_path, server.url)) == 0
    assert set(outputs(tmp_path)) == {f"r{n}" for n in range(40)}


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ullage_cli.batch.sender.PROBE_INTERVAL_S", 0.02)
    monkeypatch.setattr("ullage_cli.batch.sender.PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("ullage_cli.batch.sender.MAX_LOST_S", 0.5)


@pytest.mark.usefixtures("_impatient")
def test_a_hung_server_stops_a_batch(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path, 3)
    server.is_open.clear()

    def hang() -> None:
        if server.bodies:
            server.is_open.wait()

    server.on_probe = hang
    assert main(arguments(tmp_path, server.url, "--concurrency", "2")) == 2
    assert "has not answered for 0 s (ReadTimeout)" in capsys.readouterr().err
    assert len(server.bodies) == 2


@pytest.mark.usefixtures("_impatient")
def test_a_slow_server_that_answers_probes_is_waited_for(server: Server, tmp_path: Path) -> None:
    write_input(tmp_path, 3)
    server.is_open.clear()
    began_at = time.monotonic()

    def open_late() -> None:
        if time.monotonic() - began_at > 1.5:  # three times as long as a lost server is waited for
            server.is_open.set()

    server.on_probe = open_late
    assert main(arguments(tmp_path, server.url)) == 0
    assert len(server.bodies) == 3


def test_when_a_request_is_sent_again(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Tries, int, float | None, float, float | None]] = [
        (Tries(0, count=1), 200, None, 0, None),
        (Tries(0, count=1), 400, 5.0, 0, None),
        (Tries(0, count=1), 429, 7.0, 0, 7.0),
        (Tries(0, count=1), 503, None, 0, 1.0),
        (Tries(0, count=4), 503, None, 0, 8.0),
        (Tries(0, count=99), 503, None, 0, 30.0),
        (Tries(0, count=99), 429, 7.0, MAX_REFUSED_S - 7, 7.0),
        (Tries(0, count=99), 429, 7.0, MAX_REFUSED_S - 6, None),
        (Tries(0, count=1, faults=1), 500, None, 0, 1.0),
        (Tries(0, count=3, faults=MAX_FAULTS), 502, None, 0, None),
    ]
    for tries, status, retry_after, now, pause in cases:
        with subtests.test(f"{status} at {now}", tries=tries):
            assert pause_s(tries, status, retry_after, now) == pause


def test_retry_after_headers() -> None:
    headers = ("3", "0.5", "", "-1", "inf", "nan", "Wed, 21 Oct 2026 07:28:00 GMT")
    assert [seconds_of(each) for each in headers] == [3, 0.5, None, None, None, None, None]
