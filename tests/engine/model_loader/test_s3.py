"""Models in buckets: what is fetched, resumed, checked and refused, against moto's server."""

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ullage_testing.s3_peer import MOTO, Answer, S3Peer, s3_peer, s3_store

from ullage_engine.model_loader.room import Room
from ullage_engine.model_loader.s3_client import S3Error, endpoint_of
from ullage_engine.model_loader.source import resolve_adapter, resolve_source
from ullage_engine.protocol.errors import WeightsError

needs_moto = pytest.mark.skipif(not MOTO.exists(), reason="make install-dev makes .venv-moto")
WEIGHTS = random.Random(3).randbytes(20 << 20)
PART = 8 << 20
SOURCE = "s3://models/teams/llama"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_store(tmp_path_factory.mktemp("moto") / "log") as address:
        yield address


@pytest.fixture
def peer(store: str, bucket_env: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Peer]:
    with s3_peer(store) as peer:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", peer.address)
        peer.put("/models")
        peer.put("/models/teams/llama/config.json", b"{}", x_amz_acl="public-read")
        peer.put("/models/teams/llama/model.safetensors", WEIGHTS, x_amz_acl="public-read")
        peer.put("/models/teams/llama/original/other.safetensors", b"not of this folder")
        peer.put("/models/teams/llama/notes.pdf", b"not of a model")
        yield peer


@pytest.fixture
def bucket_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Credentials and a cache; returns the cache."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("ULLAGE_S3_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ULLAGE_S3_PINS", "{}")
    return tmp_path / "cache"


def refused(source: str = SOURCE) -> str:
    with pytest.raises(WeightsError) as caught:
        resolve_source(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def new_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which files this process began with."""
    monkeypatch.setenv("ULLAGE_S3_PINS", "{}")


@needs_moto
def test_a_folder_is_fetched_once(peer: S3Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve_source(SOURCE)
    assert files.format == "directory"
    assert sorted(path.name for path in files.path.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS
    _, _, headers = peer.requests[0]
    assert "Credential=AKIDEXAMPLE/" in headers["authorization"]
    assert "/us-east-1/s3/" in headers["authorization"]

    new_pod(monkeypatch)
    peer.requests.clear()
    assert resolve_source(f"{SOURCE}/") == files
    assert [method for method, _, _ in peer.requests] == ["GET"], "the listing alone"


@needs_moto
def test_a_process_and_its_children_keep_their_version(peer: S3Peer) -> None:
    files = resolve_source(SOURCE)
    peer.put("/models/teams/llama/config.json", b'{"later": 1}')
    peer.requests.clear()
    code = (
        "from ullage_engine.model_loader.source import resolve_source; "
        f"print(resolve_source({SOURCE!r}).path)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert child.stdout.strip() == str(files.path)
    assert peer.requests == []


@needs_moto
def test_another_version_is_another_folder(peer: S3Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolve_source(SOURCE).path
    peer.put("/models/teams/llama/config.json", b'{"later": 1}')
    new_pod(monkeypatch)
    after = resolve_source(SOURCE).path
    assert after != before
    assert json.loads((after / "config.json").read_text()) == {"later": 1}
    assert json.loads((before / "config.json").read_text()) == {}


@needs_moto
def test_parts_of_a_gguf_come_together(peer: S3Peer) -> None:
    names = [f"m one-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in names:
        peer.put(f"/models/gguf/{name.replace(' ', '%20')}", b"GGUF")
    peer.put("/models/gguf/m%20one-00001-of-00003.gguf", b"another")
    with pytest.raises(WeightsError, match=r"m one-00002-of-00003\.gguf is not there"):
        resolve_source("s3://models/gguf/m%20one-00001-of-00003.gguf")
    files = resolve_source(f"s3://models/gguf/{names[1].replace(' ', '%20')}")
    assert (files.format, files.path.name) == ("gguf", names[0])
    assert sorted(path.name for path in files.path.parent.iterdir()) == names


@needs_moto
def test_an_adapter_is_fetched_anew_when_it_changes(peer: S3Peer) -> None:
    peer.put("/models/lora/adapter_config.json", b'{"r": 8}')
    peer.put("/models/lora/adapter_model.safetensors", b"weights")
    before = resolve_adapter("s3://models/lora")
    peer.put("/models/lora/adapter_model.safetensors", b"other weights")
    after = resolve_adapter("s3://models/lora")
    assert (before / "adapter_model.safetensors").read_bytes() == b"weights"
    assert (after / "adapter_model.safetensors").read_bytes() == b"other weights"


@needs_moto
def test_public_buckets_need_no_credentials(peer: S3Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "there are no credentials; name a Secret in s3.secretName" in refused()
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "true")
    resolve_source(SOURCE)
    assert all("authorization" not in headers for _, _, headers in peer.requests)


@needs_moto
def test_a_download_goes_on_where_it_ended(peer: S3Peer) -> None:
    def deny_later_parts(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        start = headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        return (403, [("Content-Length", "0")], b"") if int(start) >= PART else answer

    peer.breaks = deny_later_parts
    message = refused()
    for word in ("bucket models", "key 'teams/llama/model.safetensors'", "allow s3:ListBucket"):
        assert word in message
    peer.breaks = None
    peer.requests.clear()
    assert (resolve_source(SOURCE).path / "model.safetensors").read_bytes() == WEIGHTS
    assert min(peer.ranges("model.safetensors")) == PART


@needs_moto
def test_an_object_that_changes_meanwhile_is_noticed(peer: S3Peer) -> None:
    other = WEIGHTS[::-1]

    def change(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        if method == "GET" and path.endswith("config.json"):
            peer.put("/models/teams/llama/model.safetensors", other)
        return answer

    peer.breaks = change
    assert "key 'teams/llama/model.safetensors': it has changed since it was listed" in refused()
    peer.breaks = None
    folder = resolve_source(SOURCE).path
    assert (folder / "model.safetensors").read_bytes() == other
    kept = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    assert kept == [folder.name], "nothing is left of the version that was not whole"


@needs_moto
@pytest.mark.parametrize(
    ("algorithm", "name"),
    [("", "MD5"), ("SHA256", "sha256"), ("CRC32", "crc32"), ("CRC64NVME", "crc64nvme")],
)
def test_bytes_are_those_that_were_uploaded(peer: S3Peer, algorithm: str, name: str) -> None:
    headers = {"x_amz_sdk_checksum_algorithm": algorithm} if algorithm else {}
    peer.put("/models/teams/llama/model.safetensors", WEIGHTS, **headers)

    def damage(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        status, answered, body = answer
        if method == "GET" and path.endswith("model.safetensors"):
            body = body[:-1] + bytes([body[-1] ^ 1])
        return status, answered, body

    peer.breaks = damage
    assert f"its bytes have another {name} than the bucket says; start again" in refused()
    peer.breaks = None
    assert (resolve_source(SOURCE).path / "model.safetensors").read_bytes() == WEIGHTS


@needs_moto
def test_files_of_an_earlier_start_are_served_while_the_store_is_away(
    peer: S3Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = resolve_source(SOURCE)
    new_pod(monkeypatch)

    def gone(*_: object) -> Answer:
        return 403, [("Content-Length", "0")], b""

    peer.breaks = gone  # an answer is no absence
    assert "access is denied" in refused()
    monkeypatch.setattr("ullage_engine.model_loader.s3.Bucket", _Unreachable)
    with caplog.at_level(logging.WARNING):
        _Unreachable.address = peer.address
        assert resolve_source(SOURCE) == files
    assert "using the files of an earlier start" in caplog.text


class _Unreachable:
    """A bucket whose store has gone away at its address."""

    address = ""

    def __init__(self, bucket: str) -> None:
        self.endpoint = endpoint_of(bucket, {"AWS_ENDPOINT_URL_S3": self.address})

    def objects(self, prefix: str) -> Iterator[object]:
        raise S3Error(f"{self.address} cannot be reached")


@needs_moto
def test_room_is_looked_for_before_a_byte_is_written(
    peer: S3Peer, bucket_env: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ullage_engine.model_loader.room.room_of", lambda folder: Room(20 << 20, None)
    )
    message = refused()
    assert "the model's files need 36 MiB, but 20 MiB are free there" in message
    assert not list(bucket_env.rglob("*.safetensors"))
    assert peer.ranges("config.json") == []


@needs_moto
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("s3://nowhere/m", ["bucket nowhere", "NoSuchBucket", "check the name, s3.endpoint"]),
        ("s3://models/none", ["bucket models", "key 'none'", "nothing is there; check the prefix"]),
        ("s3://models/none.gguf", ["none.gguf is not there; check the key"]),
        ("s3://models/teams/llama/original", ["no config.json"]),
        ("s3://models/a?b", ["write s3://bucket/prefix"]),
        ("s3://Models/a", ["'Models' is no bucket's name"]),
        ("s3:///a", ["write s3://bucket/prefix"]),
    ],
)
def test_errors_name_bucket_key_cause_and_remedy(
    peer: S3Peer, source: str, words: list[str]
) -> None:
    message = refused(source)
    for word in [f"model.source {source!r}", *words]:
        assert word in message


def test_a_store_that_is_not_there_is_named(
    bucket_env: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "127.0.0.1:9")
    assert "s3.endpoint '127.0.0.1:9' is no address; write https://host" in refused()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://127.0.0.1:9")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such/file")
    assert "AWS_CA_BUNDLE /no/such/file: No such file" in refused()
    monkeypatch.delenv("AWS_CA_BUNDLE")
    assert "https://127.0.0.1:9 cannot be reached" in refused()


@pytest.mark.parametrize(
    ("bucket", "environ", "address", "path"),
    [
        ("models", {}, "https://models.s3.us-east-1.amazonaws.com", "/"),
        ("a.b.c", {"AWS_REGION": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com", "/a.b.c/"),
        (
            "models",
            {"AWS_DEFAULT_REGION": "cn-north-1"},
            "https://models.s3.cn-north-1.amazonaws.com.cn",
            "/",
        ),
        ("models", {"AWS_ENDPOINT_URL": "http://minio:9000/"}, "http://minio:9000", "/models/"),
        (
            "models",
            {"AWS_ENDPOINT_URL": "http://x", "AWS_ENDPOINT_URL_S3": "https://y"},
            "https://y",
            "/models/",
        ),
    ],
)
def test_buckets_are_where_the_environment_says(
    bucket: str, environ: dict[str, str], address: str, path: str
) -> None:
    found = endpoint_of(bucket, environ)
    assert (found.address, found.path) == (address, path)
