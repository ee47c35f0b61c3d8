"""The options of `ullage batch`, and its way from the input to the output."""

import argparse
import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from tqdm import tqdm

from ullage_cli.background import BackgroundService, StatusLine
from ullage_cli.batch.lines import (
    Answered,
    BatchPlan,
    Entry,
    answer_line,
    error_line,
    parse_line,
    read_answered,
    read_plan,
    remaining,
)
from ullage_cli.batch.sender import LineSender
from ullage_cli.manifest_file import BASE_HELP, read_service
from ullage_cli.offline_manifest import offline_manifest
from ullage_operator.api.errors import LocalFailure

INTERRUPTED = 130
CONCURRENCY = 64
MAX_CONCURRENCY = 4096
QUIET_INTERVAL_S = 10.0
"""Seconds between two updates of the progress if standard error is no terminal."""

T = TypeVar("T")

HELP = """examples:
  ullage batch -i in.jsonl -o out.jsonl --model org/name
  ullage batch -i in.jsonl -o out.jsonl --model ./model.gguf --served-model-name my-model
  ullage batch -i in.jsonl -o out.jsonl -f service.yaml
  ullage batch -i in.jsonl -o out.jsonl --url http://127.0.0.1:8000 --concurrency 128

in.jsonl has one request a line, as OpenAI's batch API has them:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"model": "my-model", "messages": [{"role": "user", "content": "Hello"}]}}
Other urls are /v1/completions, /v1/embeddings and /v1/responses. out.jsonl gets one line for each,
in the order in which they are answered:
  {"id": "batch_req_...", "custom_id": "a",
   "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

Run the same command again to go on: lines of out.jsonl are kept, and only requests without one are
sent. To send failed ones again, remove their lines. Set ULLAGE_API_KEY if the server needs a key.

exit status: 0 all requests are answered with success, 1 some failed, 2 an option is wrong or the
server is lost, 130 interrupted
"""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """The open files of a batch, and what is to be done."""

    source: BinaryIO
    output: BinaryIO
    plan: BatchPlan
    answered: Answered


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage batch`."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests in OpenAI's batch format",
        description="Answer a file of requests in OpenAI's batch format. Stop it and go on at any "
        "time.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, a line each"
    )
    parser.add_argument(
        "-o", "--output-file", type=Path, required=True, metavar="FILE", help="answers, a line each"
    )
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument(
        "--model",
        metavar="SOURCE",
        help="serve this model for the batch: a folder, a GGUF file, org/name of the hub, or an "
        "address as in a manifest",
    )
    server.add_argument("-f", "--file", type=Path, help="serve this manifest for the batch")
    server.add_argument("--url", help="base URL of a running server")
    parser.add_argument("--base", type=Path, action="append", default=[], help=BASE_HELP)
    parser.add_argument(
        "--secrets",
        type=Path,
        metavar="FOLDER",
        help="Secrets that the manifest names: a folder for each, with one file per key",
    )
    parser.add_argument(
        "--served-model-name",
        default="",
        metavar="NAME",
        help="name of --model in requests (default: the last part of its address)",
    )
    parser.add_argument(
        "--concurrency",
        type=count,
        default=CONCURRENCY,
        metavar="N",
        help=f"most requests at a time ({CONCURRENCY})",
    )
    parser.add_argument("--api-key", help="API key (default: $ULLAGE_API_KEY)")
    parser.set_defaults(run=run)


def count(text: str) -> int:
    """Parse a number of requests for argparse, whose errors show this function's name."""
    number = int(text)
    if not 1 <= number <= MAX_CONCURRENCY:
        raise argparse.ArgumentTypeError(f"{text}; use 1 to {MAX_CONCURRENCY}")
    return number


def run(options: argparse.Namespace) -> int:
    """Answer the requests that have no answer yet, and return the exit status.

    Raises:
        LocalFailure: a file is unusable, or the server is lost.
    """
    # As an exception, the signal ends the service that this command started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        batch = _open(options, stack)
        num_left = len(batch.plan.entries) - len(batch.answered.keys)
        print(f"{options.input_file}: {len(batch.plan.entries)} requests, {num_left} to be sent")
        try:
            if num_left:
                _send(batch, options)
        except (KeyboardInterrupt, asyncio.CancelledError):
            print("interrupted; run the same command to go on", file=sys.stderr)
            return INTERRUPTED

        failed = batch.answered.num_failed
        print(f"{options.output_file}: {len(batch.plan.entries)} answers, {failed} of them failed")
    return int(failed > 0)


def _open(options: argparse.Namespace, stack: contextlib.ExitStack) -> BatchRun:
    """Open the files of a batch, and cut a torn last line of the output.

    Raises:
        LocalFailure: a file cannot be opened, or has lines that are no batch.
    """
    if options.base and not options.file:
        raise LocalFailure("--base is for the manifest of -f; leave it out")
    if options.secrets and not options.file:
        raise LocalFailure("--secrets is for the manifest of -f; leave it out")
    if options.served_model_name and not options.model:
        raise LocalFailure("--served-model-name is for --model; leave it out")

    source_path = options.input_file
    output_path = options.output_file
    try:
        source = stack.enter_context(source_path.open("rb"))
        if not source.seekable():
            raise LocalFailure(f"-i {source_path}: is no regular file; write the requests to one")
        output = stack.enter_context(output_path.open("a+b", buffering=0))
        if os.path.samestat(os.fstat(source.fileno()), os.fstat(output.fileno())):
            raise LocalFailure(f"-o {output_path}: is the input, too; choose another file")
        _lock(output, output_path)
        plan = _read(source_path, read_plan, source)
        output.seek(0)
        with open(os.dup(output.fileno()), "rb") as written:
            answered = _read(output_path, read_answered, written)
        _check_same(plan, answered, source_path, output_path)
        output.truncate(answered.num_bytes)
    except OSError as error:
        raise LocalFailure(
            f"{error.filename or output_path}: {error.strerror}; choose another file"
        ) from None
    return BatchRun(source, output, plan, answered)


def _check_same(plan: BatchPlan, answered: Answered, source_path: Path, output_path: Path) -> None:
    """Refuse an output that belongs to another input.

    Raises:
        LocalFailure: the output answers a request that the input does not have.
    """
    strangers = answered.keys - {entry.key for entry in plan.entries}
    if strangers:
        first = min(strangers, key=str)
        shown = repr(first) if isinstance(first, str) else f"malformed line {first}"
        raise LocalFailure(
            f"-o {output_path}: has an answer to {shown}, which {source_path} does not have; "
            "remove that line, or choose another file"
        )


def _lock(output: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LocalFailure(f"-o {path}: another ullage batch writes it; wait for its end") from None


def _read(path: Path, read: Callable[[BinaryIO], T], file: BinaryIO) -> T:
    try:
        return read(file)
    except ValueError as error:
        raise LocalFailure(f"{path}: {error}") from None


def _send(batch: BatchRun, options: argparse.Namespace) -> None:
    key = options.api_key or os.environ.get("ULLAGE_API_KEY", "")
    with _server(options) as (url, failure):
        asyncio.run(_answer_all(batch, url, key, options.concurrency, failure))


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the URL of the server, and a function that returns why it has ended.

    A service that the command starts ends with the block.
    """
    if options.url:
        yield options.url, lambda: ""
        return

    if options.file:
        read_service(options.file, options.base)  # reports problems before anything starts
        manifest = options.file
    else:
        manifest = offline_manifest(options.model, name=options.served_model_name)
    with StatusLine() as status:
        service = BackgroundService(manifest, options.base, status.show, options.secrets)
        service.start()
    with contextlib.closing(service):
        yield service.state["http_url"], lambda: service.failure


async def _answer_all(
    batch: BatchRun, url: str, key: str, concurrency: int, failure: Callable[[], str]
) -> None:
    """Send all requests without an answer, and write a line for each answer.

    Raises:
        LocalFailure: the server is lost, or the output cannot be written.
        CancelledError: SIGINT or SIGTERM arrived. Only whole lines have been written.
    """
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)

    async with LineSender(url, key, concurrency, failure) as sender:
        _check_models(batch.plan.models, await sender.models())
        entries = remaining(batch.plan, batch.answered)
        with _progress(batch) as bar:
            writer = _Writer(batch, bar)
            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(concurrency):
                        workers.create_task(_work(entries, sender, writer))
            except ExceptionGroup as group:
                if failures := group.subgroup(LocalFailure):
                    raise failures.exceptions[0] from None
                raise


def _check_models(asked: set[str], served: set[str]) -> None:
    """Refuse a batch if the server would answer every request with 404.

    Raises:
        LocalFailure: the server serves none of the models.
    """
    if asked and served and not asked & served:
        raise LocalFailure(
            f"the requests ask for the model {', '.join(sorted(asked))}, but the server has "
            f"{', '.join(sorted(served))}; change body.model, or set --served-model-name with "
            "--model"
        )


def _progress(batch: BatchRun) -> "tqdm[None]":
    return tqdm(
        total=len(batch.plan.entries),
        initial=len(batch.answered.keys),
        desc="Answered",
        unit="request",
        dynamic_ncols=True,
        mininterval=0.1 if sys.stderr.isatty() else QUIET_INTERVAL_S,
    )


class _Writer:
    """Appends lines to the output, and shows the progress."""

    def __init__(self, batch: BatchRun, bar: "tqdm[None]") -> None:
        self._batch = batch
        self._bar = bar

    def read(self, entry: Entry) -> bytes:
        """Return a line of the input."""
        self._batch.source.seek(entry.offset)
        return self._batch.source.readline()

    def write(self, line: bytes, *, is_failed: bool) -> None:
        """Append a line. Nothing interrupts this, so that no line is torn.

        Raises:
            LocalFailure: the line cannot be written, for example to a full disk.
        """
        pending = memoryview(line)
        try:
            while pending:
                pending = pending[self._batch.output.write(pending) :]
        except OSError as error:
            raise LocalFailure(
                f"the output cannot be written: {error.strerror}; make room, and run the same "
                "command to go on"
            ) from None
        self._batch.answered.num_failed += is_failed
        if self._batch.answered.num_failed:
            self._bar.set_postfix(failed=self._batch.answered.num_failed, refresh=False)
        self._bar.update(1)


async def _work(entries: Iterator[Entry], sender: LineSender, writer: _Writer) -> None:
    """Answer one request after another, until none is left."""
    for entry in entries:
        if entry.problem:
            writer.write(error_line(entry), is_failed=True)
            continue
        request = parse_line(writer.read(entry))
        answer = await sender.send(request)
        line = answer_line(request.custom_id, answer.status, answer.request_id, answer.body)
        writer.write(line, is_failed=answer.is_failed)
