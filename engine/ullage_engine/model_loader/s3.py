"""Models and adapters in buckets: all files of one listing, fetched and checked, or none.

Files lie in the cache in a folder named by the listing they are of, under another name until the
last one is there. A process and those that it starts use one listing of a model, so that the
tokenizer and the weights are of one version, also of a worker that is started anew.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

from ullage_engine.memory.ledger import mib
from ullage_engine.model_loader.gguf_file import gguf_parts
from ullage_engine.model_loader.room import check_room
from ullage_engine.model_loader.s3_client import Bucket, Listed, S3Error, refusal
from ullage_engine.protocol.errors import WeightsError

log = logging.getLogger(__name__)

CACHE = "ULLAGE_S3_CACHE"
"""Variable with the folder that objects are fetched into."""
PINS = "ULLAGE_S3_PINS"
"""Variable by which a process tells those it starts which files its sources are, as JSON."""

_PROGRESS_S = 2.0
_READ_BYTES = 1 << 20
_PART = re.compile(r"\d{5}-of-\d{5}\.gguf$")
_MD5 = re.compile(r'"[0-9a-f]{32}"')


def fetch_model(what: str, source: str, bucket: str, path: str, patterns: Sequence[str]) -> Path:
    """Return a model's files, which this process and those that it starts keep for good.

    Raises:
        WeightsError: they cannot be fetched whole.
    """
    pins = json.loads(os.environ.get(PINS, "{}"))
    if source in pins and Path(pins[source]).exists():
        return Path(pins[source])
    found = fetch(what, bucket, path, patterns)
    os.environ[PINS] = json.dumps(pins | {source: str(found)})
    return found


def fetch(what: str, bucket: str, path: str, patterns: Sequence[str]) -> Path:
    """Return a folder with the files of a prefix that match `patterns`, or a GGUF file beside its
    parts, as they are in the bucket now.

    Raises:
        WeightsError: they cannot be fetched whole.
    """
    key = path.strip("/")
    folder = cache_folder() / bucket
    is_file = key.endswith(".gguf")
    try:
        store = Bucket(bucket)
        slug = _slug(store.endpoint.address, key)
        try:
            items = _list_file(store, key) if is_file else _list_folder(store, key, patterns)
        except S3Error as error:
            kept = _kept(folder, slug) if error.status is None else None
            if kept is None:
                raise
            log.warning("%s: using the files of an earlier start in %s: %s", what, kept, error)
            return kept / key.rpartition("/")[2] if is_file else kept
    except S3Error as error:
        raise refusal(what, bucket, key, error) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{slug}.lock", what):
            found = _fetch_listed(what, bucket, store, items, folder, slug)
    except OSError as error:
        raise WeightsError(
            f"{what}: {folder}: {error.strerror}; check the disk, or name another folder in {CACHE}"
        ) from error
    return found / key.rpartition("/")[2] if is_file else found


def cache_folder() -> Path:
    """Return the folder that objects are fetched into."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "ullage" / "s3"


def _list_folder(store: Bucket, key: str, patterns: Sequence[str]) -> list[Listed]:
    prefix = f"{key}/" if key else ""
    listed = list(store.objects(prefix))
    wanted = [item for item in listed if any(fnmatch(item.name, each) for each in patterns)]
    if any(item.name.endswith(".safetensors") for item in wanted):
        return wanted
    for item in listed:
        if item.name.endswith(".gguf"):
            raise S3Error(f"no *.safetensors is there; name one of its .gguf, such as {item.key!r}")
    if listed:
        raise S3Error("no *.safetensors is there, and no other weights are fetched; convert them")
    raise S3Error("nothing is there; check the prefix, which is that of a model's folder")


def _list_file(store: Bucket, key: str) -> list[Listed]:
    head, slash, name = key.rpartition("/")
    names = [each.name for each in gguf_parts(Path(name))]
    start = name if len(names) == 1 else _PART.sub("", name)
    by_name = {item.name: item for item in store.objects(f"{head}{slash}{start}")}
    missing = [each for each in names if each not in by_name]
    if missing:
        raise S3Error(f"{missing[0]} is not there; check the key, and upload all parts of a file")
    return [by_name[each] for each in names]


def _slug(address: str, key: str) -> str:
    """Return a name for what a source means, which every version of it has."""
    digest = hashlib.sha256(f"{address} {key}".encode()).hexdigest()[:12]
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", key.rpartition("/")[2])[:64]
    return f"{words or 'root'}-{digest}"


def _fetch_listed(
    what: str, bucket: str, store: Bucket, items: Sequence[Listed], folder: Path, slug: str
) -> Path:
    listing = json.dumps([[item.key, item.size, item.etag] for item in items])
    target = folder / f"{slug}-{hashlib.sha256(listing.encode()).hexdigest()[:16]}"
    partial = target.with_name(f"{target.name}.partial")
    if target.exists() and not _is_whole(target, items):
        log.warning("%s: files in %s are not as they were fetched; fetching them", what, target)
        shutil.rmtree(target)
    if not target.exists():
        for other in folder.glob(f"{slug}-*.partial"):
            if other != partial:  # of a listing that is not the bucket's any more
                shutil.rmtree(other)
        partial.mkdir(exist_ok=True)
        present = sum(path.stat().st_size for path in partial.iterdir())
        check_room(
            partial,
            sum(item.size for item in items) - present,
            f"{what}: the cache",
            "the model's files",
        )
        progress = _Progress(what, sum(item.size for item in items), present)
        for item in items:
            try:
                _fetch_object(store, item, partial / item.name, progress)
            except S3Error as error:
                raise refusal(what, bucket, item.key, error) from error
        partial.rename(target)
        progress.end()
    latest = folder / f"{slug}.latest"
    latest.with_suffix(".new").write_text(target.name, encoding="utf-8")
    latest.with_suffix(".new").rename(latest)
    return target


def _is_whole(folder: Path, items: Sequence[Listed]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return all((folder / item.name).stat().st_size == item.size for item in items)
    return False


def _kept(folder: Path, slug: str) -> Path | None:
    """Return the folder of the last files that were fetched whole, if they are still there."""
    with contextlib.suppress(OSError):
        kept = folder / (folder / f"{slug}.latest").read_text(encoding="utf-8")
        return kept if kept.is_dir() else None
    return None


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Hold the right to fetch; the kernel drops the lock of a process that dies."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: waiting for another engine that fetches it into %s", what, path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_object(store: Bucket, item: Listed, path: Path, progress: "_Progress") -> None:
    """Fetch one object, from where an earlier process ended, and compare its checksums."""
    headers = store.head(item)
    if int(headers.get("content-length", item.size)) != item.size:
        raise S3Error("it has another size than it was listed with; start again")
    checks = list(_checks(item, headers))
    with path.open("ab+") as file:
        if file.tell() > item.size:
            file.truncate(0)
        file.seek(0)
        while chunk := file.read(_READ_BYTES):
            for check in checks:
                check.update(chunk)
        start = file.tell()

        def take(chunk: memoryview) -> None:
            file.write(chunk)
            for check in checks:
                check.update(chunk)
            progress.add(len(chunk))

        if start < item.size:
            store.read(item, start, take)
        file.flush()
        os.fsync(file.fileno())
    for check in checks:
        if check.value() != check.wanted:
            path.unlink()
            raise S3Error(
                f"its bytes have another {check.name} than the bucket says; start again, and "
                "upload the object again if that stays"
            )


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


class _Crc:
    """A cyclic redundancy check with the interface of hashlib."""

    def __init__(self, function: Callable[[bytes, int], int], num_bytes: int) -> None:
        self._function = function
        self._num_bytes = num_bytes
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = self._function(bytes(data), self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._num_bytes, "big")


class _Check:
    """A checksum that an object's bytes must have."""

    def __init__(self, name: str, hasher: _Hash, wanted: str, is_hex: bool = False) -> None:
        self.name = name
        self.wanted = wanted
        self._hasher = hasher
        self._is_hex = is_hex
        self.update = hasher.update

    def value(self) -> str:
        digest = self._hasher.digest()
        return digest.hex() if self._is_hex else base64.b64encode(digest).decode()


def _checks(item: Listed, headers: dict[str, str]) -> Iterator[_Check]:
    """Yield what the bucket says of an object's bytes as a whole.

    Checksums of an upload's parts are not of the whole, and an ETag is no MD5 where a key of KMS
    encrypts the object.
    """
    from awscrt import checksums

    hashers: dict[str, Callable[[], _Hash]] = {
        "sha256": hashlib.sha256,
        "sha1": hashlib.sha1,
        "crc32": lambda: _Crc(zlib.crc32, 4),
        "crc32c": lambda: _Crc(checksums.crc32c, 4),
        "crc64nvme": lambda: _Crc(checksums.crc64nvme, 8),
    }
    is_whole = headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT"
    for name, make in hashers.items():
        wanted = headers.get(f"x-amz-checksum-{name}", "")
        if wanted and is_whole and "-" not in wanted:
            yield _Check(name, make(), wanted)
    encryption = headers.get("x-amz-server-side-encryption", "AES256")
    if _MD5.fullmatch(item.etag) and encryption == "AES256":
        md5 = hashlib.md5(usedforsecurity=False)
        yield _Check("MD5", md5, item.etag.strip('"'), is_hex=True)


class _Progress:
    """Lines of log about a download that takes longer than two seconds."""

    def __init__(self, what: str, total: int, present: int) -> None:
        self._what, self._total, self._done = what, total, present
        self._began = self._logged = time.monotonic()
        self._present = present

    def add(self, num_bytes: int) -> None:
        """Count bytes; they come from one thread at a time."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._logged >= _PROGRESS_S:
            self._logged = now
            self._log("fetched")

    def end(self) -> None:
        self._log("fetched all:")

    def _log(self, verb: str) -> None:
        took = max(time.monotonic() - self._began, 1e-3)
        speed = int((self._done - self._present) / took)
        log.info(
            "%s: %s %s of %s, %s/s", self._what, verb, mib(self._done), mib(self._total), mib(speed)
        )
