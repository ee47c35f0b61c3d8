"""`ullage-engine fetch`: downloads a model from a hub or bucket to the cache and verifies it.

If several engines share a cache, the operator runs this command as a Job. The command serves its
progress over HTTP, and prints the result as JSON on the last line of its output.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from ullage_common.process.addresses import listen
from ullage_engine.model_loader.digest import Digests
from ullage_engine.model_loader.source import (
    CONFIG,
    MODEL_FILES,
    bucket_and_key,
    hub_repository,
    is_of_bucket,
    resolve_source,
)
from ullage_engine.protocol.errors import WeightsError

PATH = "/progress"
MISUSE = 2
"""Exit status for errors in the source itself, such as a wrong name, which a retry cannot fix."""
FAILED = 1
_SHA256_DIGITS = 64
_READ_TIMEOUT_S = 5.0
_REPORT_S = 10.0
"""Seconds between progress lines."""
EXAMPLES = """\
examples:
  ullage-engine fetch --source hf://LiquidAI/LFM2-8B-A1B
  ullage-engine fetch --source hf://org/name@revision --port 8081   answer /progress
  ullage-engine fetch --source s3://bucket/prefix

The cache of the hub is HF_HOME; HF_TOKEN opens gated models. The cache of buckets is
ULLAGE_S3_CACHE; endpoint, region and credentials are those of AWS's SDKs (AWS_ENDPOINT_URL_S3).
exit status: 0 fetched, 1 another try may help, 2 the source is wrong or may not be read
"""


class Misuse(WeightsError):
    """Raised for an error that a retry cannot fix, such as a wrong name in the source."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One of the model's files, as listed by the hub, with its path in the cache."""

    name: str
    size: int
    path: Path
    """Where the cache stores the file once it is complete."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """The progress of a download."""

    state: str
    """One of `listing`, `fetching`, `verifying`, `fetched` or `failed`."""
    bytes: int = 0
    total_bytes: int = 0
    """Total size of the files in bytes, or 0 until the files are listed."""
    revision: str = ""
    """Commit being fetched from the hub, or a hash of the bucket listing."""
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Fetch(Protocol):
    """Protocol for the download of one model, from the hub or from a bucket."""

    @property
    def progress(self) -> FetchProgress:
        """The current progress. Any thread may read it."""

    def run(self) -> None:
        """Download and verify the model.

        Raises:
            WeightsError: listing, downloading or verifying the files failed. The error is a
                `Misuse` if a retry would not help.
        """


class BucketFetch:
    """Downloads a model from a bucket, and verifies the data as it arrives."""

    def __init__(self, source: str) -> None:
        from ullage_engine.model_loader.s3 import Download

        self._source = source
        self._state = "listing"
        self._download = Download()

    @property
    def progress(self) -> FetchProgress:
        download = self._download
        is_listed = self._state == "listing" and download.version
        state = "fetching" if is_listed else self._state
        return FetchProgress(state, download.bytes, download.total_bytes, download.version)

    def run(self) -> None:
        from ullage_engine.model_loader.s3 import Wanted, fetch_now
        from ullage_engine.model_loader.s3_client import BucketError

        what = f"model.source {self._source!r}"
        try:
            bucket, key = bucket_and_key(what, self._source)
        except WeightsError as error:
            raise Misuse(str(error)) from error
        try:
            fetch_now(what, bucket, key, Wanted(MODEL_FILES, CONFIG), self._download)
        except BucketError as error:
            if error.is_final:
                raise Misuse(str(error)) from error
            raise
        self._state = "fetched"


class HubFetch:
    """Downloads a model from the hub."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._state = "listing"
        self._revision = ""
        self._files: list[RemoteFile] = []
        self._blobs = Path()

    @property
    def progress(self) -> FetchProgress:
        """The current progress, measured by the sizes of the files in the cache."""
        total = sum(file.size for file in self._files)
        done = sum(file.size for file in self._files if file.path.exists())
        if self._state == "fetching":
            done = min(total, done + _incomplete_bytes(self._blobs))
        return FetchProgress(self._state, done, total, self._revision)

    def run(self) -> None:
        repository, revision = _checked_source(self._source)
        self._list(repository, revision)
        self._state = "fetching"
        self._download()
        self._state = "verifying"
        verify(self._files)
        self._state = "fetched"

    def _list(self, repository: str, revision: str) -> None:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.file_download import repo_folder_name

        with _explained(self._source):
            info = HfApi().model_info(repository, revision=revision or None, files_metadata=True)
        self._revision = str(info.sha)
        folder = repo_folder_name(repo_id=repository, repo_type="model")
        root = Path(constants.HF_HUB_CACHE, folder)
        self._blobs = root / "blobs"
        snapshot = root / "snapshots" / self._revision
        self._files = [
            RemoteFile(each.rfilename, each.size or 0, snapshot / each.rfilename)
            for each in info.siblings or ()
            if any(fnmatch(each.rfilename, pattern) for pattern in MODEL_FILES)
        ]
        if not any(file.name.endswith(".safetensors") for file in self._files):
            raise Misuse(
                f"model.source {self._source!r}: it has no *.safetensors, and no other weights "
                "are downloaded; name a revision that has"
            )

    def _download(self) -> None:
        try:
            resolve_source(self._source)
        except WeightsError as error:
            if _is_refused(error.__cause__):
                raise Misuse(str(error)) from error
            raise


def verify(files: Sequence[RemoteFile]) -> None:
    """Check the cached files' sizes, and the checksums of files that are named by their SHA-256.

    Damaged files are deleted, so that the next attempt downloads them again.

    Raises:
        WeightsError: a file is missing or damaged.
    """
    with tempfile.TemporaryDirectory() as folder:
        digests = Digests(Path(folder))
        for file in files:
            _verify(file, digests)


def _verify(file: RemoteFile, digests: Digests) -> None:
    if not file.path.exists():
        raise WeightsError(
            f"{file.path}: missing after the download, since the repository changed meanwhile; "
            "fetch it again, or name a commit as the revision"
        )
    blob = file.path.resolve()
    size = blob.stat().st_size
    damage = f"it has {size} bytes instead of {file.size}" if size != file.size else ""
    if not damage and len(blob.name) == _SHA256_DIGITS:
        digest = digests.of(blob, reads_again=True)
        damage = f"its SHA-256 is {digest}, not {blob.name}" if digest != blob.name else ""
    if damage:
        blob.unlink()
        file.path.unlink(missing_ok=True)
        raise WeightsError(
            f"{file.path}: {damage}; the file was removed, and the next try downloads it again: "
            "check the volume if that repeats"
        )


def _incomplete_bytes(blobs: Path) -> int:
    """Return the number of bytes downloaded so far in files that are not complete yet."""
    sizes = []
    for path in blobs.glob("*.incomplete"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # complete by now
            continue
    return sum(sizes)


def _checked_source(source: str) -> tuple[str, str]:
    try:
        return hub_repository(source)
    except WeightsError as error:
        raise Misuse(str(error)) from error


@contextmanager
def _explained(source: str) -> Iterator[None]:
    """Turn exceptions of the hub client within the `with` block into errors that suggest a fix."""
    try:
        yield
    except Exception as error:  # connection errors come from the client's HTTP library
        reason = " ".join(str(error).split())
        kind = Misuse if _is_refused(error) else WeightsError
        raise kind(
            f"model.source {source!r}: the hub does not list it: {reason}; check the name, the "
            "revision, HF_TOKEN for a gated model, and the network"
        ) from error


def _is_refused(error: BaseException | None) -> bool:
    """Return whether the hub rejected the request because the model is missing or inaccessible."""
    from huggingface_hub.errors import (
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    return isinstance(error, RepositoryNotFoundError | RevisionNotFoundError | HFValidationError)


def serve(fetch: Fetch, host: str | None, port: int) -> None:
    """Serve the download's progress at `/progress` until this process exits.

    Raises:
        OSError: the port is unavailable.
    """

    class StatusHandler(BaseHTTPRequestHandler):
        timeout = _READ_TIMEOUT_S

        def do_GET(self) -> None:
            is_known = self.path == PATH
            body = fetch.progress.to_json().encode() if is_known else b""
            self.send_response(HTTPStatus.OK if is_known else HTTPStatus.NOT_FOUND)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Suppress access logs, because the operator polls every few seconds."""

    listener = listen(host, port)
    server = ThreadingHTTPServer(listener.getsockname()[:2], StatusHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="progress", daemon=True).start()


def main(arguments: Sequence[str]) -> int:
    """Run `ullage-engine fetch` and return the exit status."""
    options = _parser().parse_args(arguments)
    # Without a handler, the process with PID 1 ignores the signal.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    kind = BucketFetch if is_of_bucket(options.source) else HubFetch
    fetch: Fetch = kind(options.source)
    ended = threading.Event()
    reporter = threading.Thread(target=_report, args=(fetch, ended), daemon=True)
    try:
        if options.port is not None:
            serve(fetch, options.host, options.port)
        reporter.start()
        fetch.run()
    except (WeightsError, OSError) as error:
        status = MISUSE if isinstance(error, Misuse) else FAILED
        result = _failed(fetch, " ".join(str(error).split()))
        print(f"error: {result.error}", file=sys.stderr)
    else:
        status = 0
        result = fetch.progress
    ended.set()
    _finish(result, options.report)
    return status


def _failed(fetch: Fetch, message: str) -> FetchProgress:
    fields: dict[str, Any] = asdict(fetch.progress)
    return FetchProgress(**fields | {"state": "failed", "error": message})


def _finish(result: FetchProgress, report: Path | None) -> None:
    """Print the result as the last line, and write it to the report file that Kubernetes reads."""
    line = result.to_json()
    print(line, flush=True)
    if report is not None:
        report.write_text(line, encoding="utf-8")


def _report(fetch: Fetch, ended: threading.Event) -> None:
    """Print progress lines until the download ends."""
    while not ended.wait(_REPORT_S):
        now = fetch.progress
        print(f"{now.state}: {now.bytes} of {now.total_bytes} bytes", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ullage-engine fetch",
        description="Download a model of the hub or a bucket into its cache, verify it and end.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--source", required=True, help="hf://org/name@revision or s3://bucket/prefix"
    )
    parser.add_argument("--host", help="address of --port (default: all, of IPv4 and IPv6)")
    parser.add_argument("--port", type=int, help=f"port that answers {PATH} (default: none)")
    parser.add_argument("--report", type=Path, help="file that gets the last line, too")
    return parser
