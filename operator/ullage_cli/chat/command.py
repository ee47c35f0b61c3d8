"""The command `ullage chat`, which reads questions and shows answers as they arrive."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ullage_cli.chat.client import ChatClient, ChatFailure, ChatPiece
from ullage_cli.chat.conversation import COMMANDS, Conversation, Ended
from ullage_cli.processes.state import STATE_FILE, read_state
from ullage_cli.server_url import server_url, tokens
from ullage_operator.api.errors import LocalFailure

LOCAL_URL = "http://127.0.0.1:8000"
"""URL of the router that `ullage serve` and `ullage up` start on their default port."""
KEY_ENV = "ULLAGE_API_KEY"

INTERRUPTED = 130
"""Exit status after Ctrl-C outside of an answer."""
SIGNAL_STATUS = 128
"""Exit status after another signal, less the signal's number."""

PROMPT = ">>> "
CONTINUATION = "... "
POLL_S = 0.1
"""Seconds between two checks whether a service that this command started is ready."""
STOP_S = 30.0
"""Seconds that such a service has to stop, before it is killed."""
HISTORY_LINES = 1000

HELP = f"""examples:
  ullage chat                                      the service on {LOCAL_URL}
  ullage chat http://127.0.0.1:8080 --system "Answer in one sentence."
  ullage chat smollm2 --namespace prod             a service of a cluster, through kubectl
  ullage chat Qwen/Qwen3-0.6B                      serve the model first, until the chat ends
  echo "What is a ledger?" | ullage chat           one question; only the answer is on stdout

Set {KEY_ENV} if the server needs a key. In the chat:

{COMMANDS}

exit status: 0 ended, 1 the question of a pipe was not answered, 2 the server cannot be used,
130 interrupted, 129 and 143 ended by SIGHUP and SIGTERM
"""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Matches characters that could control the terminal."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage chat`."""
    parser = commands.add_parser(
        "chat",
        help="chat with a service in the terminal",
        description="Chat with a running service, or with a model that is served meanwhile.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target",
        nargs="?",
        default=LOCAL_URL,
        metavar="URL|SERVICE|SOURCE",
        help=f"base URL, LLMService with --namespace, or a model ({LOCAL_URL})",
    )
    parser.add_argument("-n", "--namespace", help="namespace of the LLMService, through kubectl")
    parser.add_argument("--model", help="name of the model (default: the first one)")
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions for the model")
    parser.add_argument("--max-tokens", type=tokens, help="maximum length of an answer")
    parser.add_argument("--temperature", type=float, help="randomness of the answers")
    parser.add_argument("--api-key", help=f"API key (default: ${KEY_ENV})")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Chat until the end of the input, or answer the question on standard input.

    Raises:
        LocalFailure: the server cannot be used.
        SystemExit: SIGHUP or SIGTERM arrived.
    """
    # As an exception, a signal ends the service that this command started.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return INTERRUPTED


def _end(number: int, frame: FrameType | None) -> None:
    """End the chat. The exception is no KeyboardInterrupt, which ends an answer only."""
    raise SystemExit(SIGNAL_STATUS + number)


def _run(options: argparse.Namespace) -> int:
    key = options.api_key or os.environ.get(KEY_ENV, "")
    with _url(options) as url, ChatClient(url, key) as client:
        try:
            models = client.models()
        except ChatFailure as error:
            raise LocalFailure(str(error)) from error
        if not models and not options.model:
            raise LocalFailure(f"{url}: lists no model; wait until it is ready, or pass --model")

        chat = Chat(client, options.model or models[0], options)
        if sys.stdin.isatty():
            chat.converse()
            return 0
        return chat.answer_one(sys.stdin.read())


@contextlib.contextmanager
def _url(options: argparse.Namespace) -> Iterator[str]:
    """Yield the URL of the server, which is started first if the target is a model."""
    target = options.target
    is_url = target.startswith(("http://", "https://"))
    is_model = not is_url and ("/" in target or target.endswith(".gguf") or Path(target).exists())
    if is_url or options.namespace or not is_model:
        with server_url(options) as url:
            yield url
        return
    with _served(target) as url:
        yield url


@contextlib.contextmanager
def _served(source: str) -> Iterator[str]:
    """Serve a model while the block runs, and yield the URL of its router.

    Raises:
        LocalFailure: the model cannot be served. `ullage serve` has printed the reason.
    """
    with tempfile.TemporaryDirectory(prefix="ullage-chat-") as folder:
        state = Path(folder, STATE_FILE)
        command = [sys.executable, "-m", "ullage_cli.main", "serve", source]
        command += ["--port", "0", "--grpc-port", "0", "--state-file", str(state)]
        # The service ends with this pipe, even if the chat is killed.
        command += ["--until-eof"]
        # Ctrl-C stops an answer. It must not reach the service, so the service has its own session.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True
        ) as process:
            try:
                while not state.exists():
                    if process.poll() is not None:
                        raise LocalFailure(f"{source} is not served, for the reason above")
                    time.sleep(POLL_S)
                yield str(read_state(state)["http_url"])
            finally:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)  # the second one kills what still runs


class Chat:
    """A conversation with one model, and its input and output.

    Args:
        client: client of the server.
        model: name of the model.
        options: options of `ullage chat`.
    """

    def __init__(self, client: ChatClient, model: str, options: argparse.Namespace) -> None:
        self._client = client
        self._model = model
        self._conversation = Conversation(options.system)
        self._settings: dict[str, Any] = {}
        if options.max_tokens is not None:
            self._settings["max_tokens"] = options.max_tokens
        if options.temperature is not None:
            self._settings["temperature"] = options.temperature
        self._is_terminal = sys.stdout.isatty()

    def answer_one(self, question: str) -> int:
        """Answer one question, and return the exit status."""
        if not question.strip():
            print("error: standard input has no question", file=sys.stderr)
            return 2
        return 0 if self._answer(question.strip()) else 1

    def converse(self) -> None:
        """Read questions and commands from the terminal until Ctrl-D or /exit."""
        print(f"{self._model} at {self._client.url}; /help lists commands, Ctrl-D ends")
        with _history():
            while True:
                try:
                    line = _read_line()
                except KeyboardInterrupt:
                    print()
                    continue
                except EOFError:
                    print()
                    return
                try:
                    self._take(line.strip())
                except Ended:
                    return

    def _take(self, line: str) -> None:
        """Answer a question, or carry out a command."""
        if line.startswith("/"):
            print(self._conversation.command(line))
        elif line:
            try:
                self._answer(line)
            except KeyboardInterrupt:
                print()

    def _answer(self, question: str) -> bool:
        """Show the answer to a question, and return whether it is complete."""
        self._conversation.ask(question)
        texts: list[str] = []
        pieces = self._client.answer(self._model, self._conversation.messages, self._settings)
        failure = ""
        try:
            # Closing the stream tells the server to stop, so that an answer that nobody reads
            # holds no memory.
            with contextlib.closing(pieces):  # type: ignore[type-var]
                for piece in pieces:
                    texts.append(piece.text)
                    self._show(piece)
        except ChatFailure as error:
            failure = _explained(error)
        except KeyboardInterrupt:
            failure = "stopped"
            if not self._is_terminal:
                raise
        finally:
            self._conversation.reply("".join(texts))
            if any(texts):
                print(flush=True)

        if failure:
            _note(failure)
        return not failure

    def _show(self, piece: ChatPiece) -> None:
        if piece.note:
            _note(piece.note)
        if piece.thought and self._is_terminal:
            sys.stdout.write(f"\033[2m{_printable(piece.thought)}\033[0m")
        sys.stdout.write(_printable(piece.text) if self._is_terminal else piece.text)
        sys.stdout.flush()


def _printable(text: str) -> str:
    """Remove characters that could control the terminal, since a model may write any."""
    return _CONTROL.sub("", text)


def _explained(error: ChatFailure) -> str:
    if error.retry_after_s is None:
        return str(error)
    return f"{error}; try again in {error.retry_after_s:g} s"


def _note(text: str) -> None:
    sys.stdout.flush()
    print(f"[{_printable(text)}]", file=sys.stderr, flush=True)


def _read_line() -> str:
    """Read a line from the terminal, and the lines that continue it.

    Raises:
        EOFError: the input has ended.
    """
    line = input(PROMPT)
    while line.endswith("\\"):
        line = line.removesuffix("\\") + "\n" + input(CONTINUATION)
    return line


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Let the arrow keys recall lines of this chat and of earlier ones while the block runs."""
    try:
        import readline
    except ImportError:  # Python without readline still reads lines
        yield
        return

    state = Path(os.environ.get("XDG_STATE_HOME", "~/.local/state")).expanduser()
    path = state / "ullage" / "chat_history"
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
