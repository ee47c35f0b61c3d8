"""Fetches models and adapters from buckets, taking all files of a download from one listing.

The cache has one folder per listing. The folder has a temporary name until all of its files have
been fetched and verified, so that incomplete models are never used. A process and its children keep
using the same listing of a model, so that the versions of the tokenizer and the weights always
match, even after a worker restarts.
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
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

from ullage_engine.memory.ledger import mib
from ullage_engine.model_loader.gguf_file import gguf_parts
from ullage_engine.model_loader.room import check_room
from ullage_engine.model_loader.s3_client import (
    Bucket,
    BucketError,
    Listed,
    S3Error,
    endpoint_of,
)
from ullage_engine.protocol.errors import WeightsError

log = logging.getLogger(__name__)

CACHE = "ULLAGE_S3_CACHE"
"""Environment variable that sets the cache folder of fetched objects."""
PINS = "ULLAGE_S3_PINS"
"""Environment variable that tells child processes which cached files to use for each source, as
JSON."""

_LOG_S = 10.0
"""Seconds between log lines about a download's progress."""
_READ_BYTES = 1 << 20
_PART = re.compile(r"\d{5}-of-\d{5}\.gguf$")
_MD5 = re.compile(r'"[0-9a-f]{32}"')


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which objects to fetch from a bucket folder, and the file that the folder must contain."""

    patterns: tuple[str, ...]
    """Name patterns of the objects to fetch."""
    config: str
    """Name of the configuration file that must be in the folder."""


@dataclass(slots=True)
class Download:
    """A download and its progress, which any thread may read."""

    total_bytes: int = 0
    """Total size of the files in bytes, or 0 until the bucket has listed the files."""
    bytes: int = 0
    """Number of bytes in the cache so far."""
    version: str = ""
    """Version of the source: a hash of the keys, sizes and ETags in the bucket listing."""


def fetch_model(what: str, source: str, bucket: str, path: str, wanted: Wanted) -> Path:
    """Fetch a model, and return its path.

    This process and its children use the same path from then on.

    Raises:
        WeightsError: not all files could be fetched.
    """
    pins = json.loads(os.environ.get(PINS, "{}"))
    if source in pins and Path(pins[source]).exists():
        return Path(pins[source])
    snapshot = fetch(what, bucket, path, wanted)
    os.environ[PINS] = json.dumps(pins | {source: str(snapshot)})
    return snapshot


def pinned(source: str) -> str:
    """Return the version of a source that this process uses, or "" if it has not been fetched.

    The version identifies the bucket listing, so it is the same on all machines.
    """
    path = json.loads(os.environ.get(PINS, "{}")).get(source, "")
    return "/".join(Path(path).parts[-2:])


def fetch(what: str, bucket: str, path: str, wanted: Wanted) -> Path:
    """Fetch the requested files under a prefix, and return the folder or GGUF file.

    The bucket's current files are used if possible. If the store does not answer or fails during
    the download, the function falls back to the last complete download.

    Raises:
        WeightsError: not all files could be fetched.
    """
    key = path.strip("/")
    try:
        return fetch_now(what, bucket, key, wanted, Download())
    except BucketError as error:
        kept = _kept(bucket, key) if error.is_outage else None
        if kept is None:
            raise
        log.warning("%s: using the files of an earlier start in %s: %s", what, kept, error)
        return kept


def fetch_now(what: str, bucket: str, path: str, wanted: Wanted, download: Download) -> Path:
    """Fetch a source's current files from its bucket, and return their path.

    Raises:
        WeightsError: not all files could be fetched. The error is a `BucketError` if the bucket is
            the cause.
    """
    key = path.strip("/")
    store, items = _listing(what, bucket, key, wanted)
    return _fetch(what, store, key, items, download)


def _listing(what: str, bucket: str, key: str, wanted: Wanted) -> tuple[Bucket, list[Listed]]:
    try:
        store = Bucket(bucket)
        log.info("%s: listing bucket %s at %s", what, bucket, store.endpoint.address)
        if _is_file(key):
            return store, _list_file(store, key)
        return store, _list_folder(store, key, wanted)
    except S3Error as error:
        raise BucketError(what, bucket, key, error) from error


def _is_file(key: str) -> bool:
    return key.endswith(".gguf")


def _fetch(what: str, store: Bucket, key: str, items: Sequence[Listed], download: Download) -> Path:
    folder = cache_folder() / store.name
    slug = _slug(store.endpoint.address, key)
    download.total_bytes = sum(item.size for item in items)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{slug}.lock", what):
            fetched = _fetch_listed(what, store, items, folder, slug, download)
    except OSError as error:
        raise WeightsError(
            f"{what}: {folder}: {error.strerror}; check the disk, or name another folder in {CACHE}"
        ) from error
    return _named(fetched, key)


def _named(folder: Path, key: str) -> Path:
    """Return the path of the fetched file if a source names a single file, otherwise the folder."""
    return folder / key.rpartition("/")[2] if _is_file(key) else folder


def cache_folder() -> Path:
    """Return the folder in which fetched models and adapters are cached."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "ullage" / "s3"


def _list_folder(store: Bucket, key: str, wanted: Wanted) -> list[Listed]:
    prefix = f"{key}/" if key else ""
    listed = list(store.objects(prefix))
    if not listed:
        raise _absence("nothing is there; check the prefix, which must be that of a model's folder")
    items = [item for item in listed if any(fnmatch(item.name, each) for each in wanted.patterns)]
    names = {item.name for item in items}
    if not any(name.endswith(".safetensors") for name in names):
        for item in listed:
            if _is_file(item.key):
                words = f"name one of its .gguf, such as {item.key!r}"
                raise _absence(f"no *.safetensors is there; {words}")
        raise _absence("no *.safetensors is there, and no other weights are fetched; convert them")
    if wanted.config not in names:
        raise _absence(f"no {wanted.config} is there; upload it next to the *.safetensors")
    return items


def _list_file(store: Bucket, key: str) -> list[Listed]:
    head, slash, name = key.rpartition("/")
    names = [each.name for each in gguf_parts(Path(name))]
    start = name if len(names) == 1 else _PART.sub("", name)
    by_name = {item.name: item for item in store.objects(f"{head}{slash}{start}")}
    missing = [each for each in names if each not in by_name]
    if missing:
        raise _absence(f"{missing[0]} is not there; check the key, and upload all parts of a file")
    return [by_name[each] for each in names]


def _absence(text: str) -> S3Error:
    return S3Error(text, is_final=True)


def _slug(address: str, key: str) -> str:
    """Return the name under which the cache stores all versions of a source."""
    digest = hashlib.sha256(f"{address} {key}".encode()).hexdigest()[:12]
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", key.rpartition("/")[2])[:64]
    return f"{words or 'root'}-{digest}"


def _fetch_listed(
    what: str, store: Bucket, items: Sequence[Listed], folder: Path, slug: str, download: Download
) -> Path:
    listing = json.dumps([[item.key, item.size, item.etag] for item in items])
    download.version = hashlib.sha256(listing.encode()).hexdigest()[:16]
    target = folder / f"{slug}-{download.version}"
    partial = target.with_name(f"{target.name}.partial")
    if target.exists() and not _is_whole(target, items):
        log.warning("%s: files in %s have changed; fetching them again", what, target)
        shutil.rmtree(target)

    if target.exists():
        download.bytes = download.total_bytes
    else:
        for other in folder.glob(f"{slug}-*.partial"):
            if other != partial:  # of a listing that the bucket no longer has
                shutil.rmtree(other)
        partial.mkdir(exist_ok=True)
        _fetch_objects(what, store, items, partial, download)
        partial.rename(target)

    latest = folder / f"{slug}.latest"
    latest.with_suffix(".new").write_text(target.name, encoding="utf-8")
    latest.with_suffix(".new").rename(latest)
    return target


def _fetch_objects(
    what: str, store: Bucket, items: Sequence[Listed], folder: Path, download: Download
) -> None:
    download.bytes = sum(path.stat().st_size for path in folder.iterdir())
    missing = download.total_bytes - download.bytes
    check_room(folder, missing, f"{what}: the cache", "the model's files")
    report = _Log(what, download)
    for item in items:
        try:
            _fetch_object(store, item, folder / item.name, report)
        except S3Error as error:
            raise BucketError(what, store.name, item.key, error) from error
    report.line("fetched all:")


def _is_whole(folder: Path, items: Sequence[Listed]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return all((folder / item.name).stat().st_size == item.size for item in items)
    return False


def _kept(bucket: str, key: str) -> Path | None:
    """Return the path of a source's last complete download, or None if there is none."""
    folder = cache_folder() / bucket
    slug = _slug(endpoint_of(bucket, os.environ).address, key)
    with contextlib.suppress(OSError):
        kept = folder / (folder / f"{slug}.latest").read_text(encoding="utf-8")
        return _named(kept, key) if kept.is_dir() else None
    return None


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock for fetching a source. The kernel releases the lock if the process dies."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: waiting for another engine, which fetches it to %s", what, path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_object(store: Bucket, item: Listed, path: Path, report: "_Log") -> None:
    """Fetch one object, resuming an interrupted download, and verify its checksums."""
    headers = store.head(item)
    if headers.get("content-length", str(item.size)) != str(item.size):
        raise S3Error("it has another size than it was listed with; start again")
    checks = list(_checks(item, headers))
    with path.open("ab+") as file:
        if file.tell() > item.size:
            report.add(-file.tell())
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
            report.add(len(chunk))

        if start < item.size:
            store.read(item, start, take)
        file.flush()
        os.fsync(file.fileno())
    for check in checks:
        if check.value() != check.wanted:
            path.unlink()
            report.add(-item.size)
            raise S3Error(
                f"the {check.name} of its bytes is not the bucket's; start again, and upload the "
                "object again if that repeats"
            )


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


class _Crc:
    """A cyclic redundancy check (CRC) with the interface of hashlib."""

    def __init__(self, function: Callable[[bytes | memoryview, int], int], num_bytes: int) -> None:
        self._function = function
        self._num_bytes = num_bytes
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._num_bytes, "big")


class _Check:
    """An object's expected checksum, and the running checksum of the downloaded bytes."""

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
    """Yield the checksum to verify, or nothing if the store has none for the whole object.

    The checksums of a multipart upload cover its parts instead of the whole object. The ETag of an
    object that is encrypted with a KMS key is not an MD5. MD5 is slower than the network, so it is
    only used if there is no other checksum.
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
            return
    encryption = headers.get("x-amz-server-side-encryption", "AES256")
    if _MD5.fullmatch(item.etag) and encryption == "AES256":
        md5 = hashlib.md5(usedforsecurity=False)
        yield _Check("MD5", md5, item.etag.strip('"'), is_hex=True)


class _Log:
    """Counts the bytes of a running download, and regularly logs its progress and speed."""

    def __init__(self, what: str, download: Download) -> None:
        self._what = what
        self._download = download
        self._present = download.bytes
        self._began = self._logged = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Add to the byte count. Only one thread at a time may call this method."""
        self._download.bytes += num_bytes
        now = time.monotonic()
        if now - self._logged >= _LOG_S:
            self._logged = now
            self.line("fetched")

    def line(self, verb: str) -> None:
        took = max(time.monotonic() - self._began, 1e-3)
        done = self._download.bytes
        total = self._download.total_bytes
        speed = int((done - self._present) / took)
        log.info("%s: %s %s of %s, %s/s", self._what, verb, mib(done), mib(total), mib(speed))
