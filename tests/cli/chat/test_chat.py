"""`ullage chat`, against a server whose answers are written here, in pipes and terminals."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ullage_testing.terminal import Terminal

from ullage_cli.chat.client import ChatClient, ChatFailure, ChatPiece
from ullage_cli.chat.conversation import Conversation, Ended

Events = list[str]
DONE = "data: [DONE]"


def delta(text: str, **more: Any) -> str:
    choice = {"index": 0, "delta": {"content": text}} | more
    return "data: " + json.dumps({"choices": [choice]})


class Server(ThreadingHTTPServer):
    """A chat server that answers with the events of `answers`, in turn."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, str], Events | dict[str, Any]]] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.was_closed = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(200, {}, json.dumps({"data": [{"id": "model-a"}]}).encode())

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.server.requests.append(json.loads(self.rfile.read(length)))
        self.server.keys.append(self.headers.get("authorization", ""))
        status, headers, answer = self.server.answers.pop(0)
        if isinstance(answer, dict):
            self._send(status, headers, json.dumps(answer).encode())
            return

        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for event in answer:
                self.wfile.write(f"{event}\n\n".encode())
                self.wfile.flush()
            while not self.server.may_end.wait(0.02):
                self.wfile.write(b": ping\n\n")
                self.wfile.flush()
        except OSError:
            self.server.was_closed.set()

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.may_end.set()
        made.shutdown()
        thread.join()


def pieces(server: Server, answer: Events) -> list[ChatPiece]:
    server.answers.append((200, {}, answer))
    with ChatClient(server.url + "/v1", "k") as client:
        return list(client.answer("model-a", [{"role": "user", "content": "hi"}], {"seed": 1}))


def test_an_answer_comes_in_pieces(server: Server) -> None:
    thought = "data: " + json.dumps({"choices": [{"delta": {"reasoning": "hm"}}]})
    events = [": ping", thought, delta("Hel"), delta("lo"), delta("", finish_reason="stop"), DONE]
    assert pieces(server, events) == [
        ChatPiece(thought="hm"),
        ChatPiece(text="Hel"),
        ChatPiece(text="lo"),
    ]
    [request] = server.requests
    assert (request["model"], request["stream"], request["seed"]) == ("model-a", True, 1)
    assert server.keys == ["Bearer k"]


def test_what_happened_to_an_answer_is_told(server: Server) -> None:
    usage = {"choices": [], "usage": {}, "ullage": {"resumed_on": ["e-1"], "resumed_inexact": True}}
    events = [
        delta("a", finish_reason="length"),
        "data: " + json.dumps(usage),
        ": x-ullage-resumed-inexact: true",
        DONE,
    ]
    notes = [piece.note for piece in pieces(server, events) if piece.note]
    assert notes == [
        "the answer reached its maximum length",
        "continued by e-1",
        "an engine was lost, and another one continued with small differences",
    ]
    server.answers.append((200, {"x-ullage-degraded": "max_tokens=64"}, [DONE]))
    with ChatClient(server.url) as client:
        [piece] = client.answer("m", [], {})
    assert "max_tokens=64" in piece.note


def test_failures_have_a_reason(server: Server) -> None:
    refused = {"error": {"message": "no room for it now"}}
    server.answers = [
        (429, {"retry-after": "7"}, refused),
        (500, {}, {"detail": "?"}),
        (200, {}, [delta("a"), 'data: {"error": {"message": "lost", "retry_after": 2}}']),
        (200, {}, [delta("a")]),
        (200, {}, ["data: {"]),
    ]
    expected = [
        ("no room for it now (status 429)", 7.0),
        ('{"detail": "?"} (status 500)', None),
        ("lost", 2),
        ("the stream ended early; the answer is not complete", None),
        ("the server sent '{', which is not JSON", None),
    ]
    with ChatClient(server.url) as client:
        for message, retry_after_s in expected:
            with pytest.raises(ChatFailure) as failed:
                list(client.answer("m", [], {}))
            assert (str(failed.value), failed.value.retry_after_s) == (message, retry_after_s)


def test_a_server_that_is_not_there() -> None:
    with ChatClient("http://127.0.0.1:1") as client, pytest.raises(ChatFailure) as failed:
        client.models()
    assert "start a service with ullage serve" in str(failed.value)


def test_variables_of_a_proxy_do_not_apply(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with ChatClient(server.url) as client:
        assert client.models() == ["model-a"]


def test_a_conversation_and_its_commands(tmp_path: Path) -> None:
    conversation = Conversation()
    conversation.command("/system Be brief.")
    conversation.ask("a")
    conversation.reply("b")
    conversation.ask("refused")
    conversation.reply("")
    expected = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert conversation.messages == expected

    saved = tmp_path / "chat.json"
    assert "3 messages" in conversation.command(f"/save {saved}")
    assert json.loads(saved.read_text()) == expected
    conversation.command(f"/save {tmp_path / 'chat.md'}")
    assert "**user**\n\na\n" in (tmp_path / "chat.md").read_text()
    assert "choose another file" in conversation.command("/save /nowhere/x")
    assert "name a file" in conversation.command("/save")

    conversation.command("/clear")
    assert conversation.messages == expected[:1]
    assert conversation.command("/system") == "Be brief."
    assert "no such command" in conversation.command("/nothing")
    assert "/system TEXT" in conversation.command("/help")
    with pytest.raises(Ended):
        conversation.command("/exit")


def piped(url: str, text: str, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ullage_cli.main", "chat", url, *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def test_a_pipe_asks_one_question(server: Server) -> None:
    server.answers.append((200, {}, [delta("Hi\x1b[31m"), DONE]))
    done = piped(server.url, "two\nlines\n", "--system", "s", "--max-tokens", "5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hi\x1b[31m\n", "")
    [request] = server.requests
    assert request["max_tokens"] == 5
    assert [each["content"] for each in request["messages"]] == ["s", "two\nlines"]


def test_a_pipe_is_told_of_a_refusal(server: Server) -> None:
    server.answers.append((429, {"retry-after": "3"}, {"error": {"message": "full"}}))
    done = piped(server.url, "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "[full (status 429); try again in 3 s]\n"
    assert piped(server.url, "  ").returncode == 2
    assert piped("http://127.0.0.1:1", "x").returncode == 2


def test_a_chat_in_a_terminal(server: Server, tmp_path: Path) -> None:
    terminal = Terminal(["chat", server.url], tmp_path)
    terminal.wait_for(">>> ")
    server.answers.append((200, {}, [delta("Hel\x1b[31mlo"), DONE]))
    terminal.send("first\n")
    terminal.wait_for("Hel[31mlo")
    terminal.wait_for(">>> ")

    server.answers.append((429, {"retry-after": "9"}, {"error": {"message": "full"}}))
    terminal.send("second\n")
    terminal.wait_for("[full (status 429); try again in 9 s]")
    terminal.wait_for(">>> ")

    server.answers.append((200, {}, [delta("again"), DONE]))
    terminal.send("third \\\n")
    terminal.wait_for("... ")
    terminal.send("line\n")
    terminal.wait_for("again")
    contents = [each["content"] for each in server.requests[-1]["messages"]]
    assert contents == ["first", "Hel\x1b[31mlo", "third \nline"]

    terminal.wait_for(">>> ")
    terminal.send("\x04")
    assert terminal.ended() == 0
    assert "first" in (tmp_path / "ullage" / "chat_history").read_text()


def test_ctrl_c_stops_an_answer_and_not_the_chat(server: Server, tmp_path: Path) -> None:
    terminal = Terminal(["chat", server.url], tmp_path)
    terminal.wait_for(">>> ")
    # At the prompt, Ctrl-C drops the line. Python sees a signal that comes just before it waits for
    # the terminal at the next key only, so that Return follows.
    terminal.send("dropped\x03\n")
    terminal.wait_for(">>> ")

    server.may_end.clear()
    server.answers.append((200, {}, [delta("endless")]))
    terminal.send("go\n")
    terminal.wait_for("endless")
    terminal.send("\x03")
    terminal.wait_for("[stopped]")
    assert server.was_closed.wait(30)

    terminal.wait_for(">>> ")
    server.may_end.set()
    server.answers.append((200, {}, [delta("fine"), DONE]))
    terminal.send("more\n")
    terminal.wait_for("fine")
    assert [each["messages"][0]["content"] for each in server.requests] == ["go", "go"]
    assert server.requests[-1]["messages"][1] == {"role": "assistant", "content": "endless"}
    terminal.wait_for(">>> ")
    terminal.send("/exit\n")
    assert terminal.ended() == 0


FAKE_SERVE = """#!{python}
import json, os, signal, sys

def end(number, frame):
    sys.exit("the service was stopped")

signal.signal(signal.SIGTERM, end)
if "--until-eof" not in sys.argv:
    sys.exit("the service would stay")
state = sys.argv[sys.argv.index("--state-file") + 1]
with open(state + ".tmp", "w") as file:
    file.write(json.dumps({{"http_url": {url!r}}}))
os.replace(state + ".tmp", state)  # as `ullage serve` does: a reader never sees half a file
sys.stdin.read()
sys.exit("the service saw the end of its input")
"""
"""Stands for `ullage serve`, and says why it ends."""

CHAT_WITH_FAKE = """
import sys
from ullage_cli.main import main
python = sys.argv.pop(1)
sys.executable = python
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "status", "last_words"),
    [
        (signal.SIGKILL, -signal.SIGKILL, b"the service saw the end of its input"),
        (signal.SIGTERM, 143, b"the service was stopped"),
        (signal.SIGHUP, 129, b"the service was stopped"),
        (signal.SIGINT, 130, b"the service was stopped"),
    ],
)
def test_a_killed_chat_leaves_no_service(
    server: Server, tmp_path: Path, number: signal.Signals, status: int, last_words: bytes
) -> None:
    fake = tmp_path / "python"
    fake.write_text(FAKE_SERVE.format(python=sys.executable, url=server.url))
    fake.chmod(0o755)
    server.may_end.clear()
    server.answers.append((200, {}, [delta("endless")]))

    command = [sys.executable, "-c", CHAT_WITH_FAKE, str(fake), "chat", "org/name"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(b"go")
        process.stdin.close()
        begun = process.stdout.read(len("endless"))
        assert begun == b"endless", process.stderr.read().decode()
        os.kill(process.pid, number)
        # The service holds this pipe, too, so that its end is the end of both.
        assert last_words in process.stderr.read()
    assert process.returncode == status
