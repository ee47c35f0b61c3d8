"""TLS and mTLS of the router: with its clients, with its engines, and while certificates change."""

import asyncio
import datetime
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.process.config_file import ConfigError
from ullage_common.wire.channels import open_channel
from ullage_common.wire.tls import Certificates

if TYPE_CHECKING:
    Authority = Any
    Service = Any
    StartService = Any

MakeAuthority = Callable[[], "Authority"]
NEWS_S = 30.0
NAME = "router.test"
ENGINES = "demo-engine.test"
BODY = {"prompt": "Hi"}


@pytest.fixture
def authority(make_authority: MakeAuthority) -> "Authority":
    return make_authority()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(NEWS_S):
        while not await condition():  # noqa: ASYNC110 - files are looked at once a second
            await asyncio.sleep(0.05)


def context(authority: "Authority", folder: Path | None = None) -> ssl.SSLContext:
    """Of a client; with a folder, one that has a certificate."""
    made = ssl.create_default_context(cadata=authority.pem.decode())
    if folder:
        made.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return made


@asynccontextmanager
async def https(service: "Service", verify: ssl.SSLContext) -> AsyncIterator[httpx.AsyncClient]:
    url = f"https://127.0.0.1:{service.router.http_port}"
    async with httpx.AsyncClient(
        base_url=url, verify=verify, timeout=NEWS_S, trust_env=False
    ) as http:
        yield http


@asynccontextmanager
async def secure(
    service: "Service", authority: "Authority", folder: Path | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    own = [(folder / name).read_bytes() if folder else None for name in ("tls.key", "tls.crt")]
    credentials = grpc.ssl_channel_credentials(authority.pem, *own)
    target = f"127.0.0.1:{service.router.grpc_port}"
    async with open_channel(target, credentials, NAME) as channel:
        yield channel


async def generate(channel: grpc.aio.Channel) -> int:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    request = inference_pb2.GenerateRequest(text="Hi")
    return len([event async for event in stub.Generate(request, timeout=NEWS_S)])


async def certificate(service: "Service", verify: ssl.SSLContext) -> bytes | None:
    """That the router shows to a new connection."""
    port = service.router.http_port
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=verify)
    shown: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


def test_clients_over_tls(
    start_service: "StartService", authority: "Authority", tmp_path: Path
) -> None:
    async def scenario() -> None:
        tls = {"router": {"dir": str(authority.issue(tmp_path / "tls", NAME))}}
        async with start_service(tls=tls) as service:
            async with https(service, context(authority)) as http:
                assert (await http.post("/v1/completions", json=BODY)).status_code == 200
                state = (await service.monitoring.get("/stats")).json()["tls"]["router"]
                assert state["problem"] == ""
                assert 0 < state["expires_in_s"] <= 86_400
                name = "ullage_router_certificate_expiry_timestamp_seconds "
                text = (await service.monitoring.get("/metrics")).text
                [line] = [x for x in text.splitlines() if x.startswith(name)]
                ends = datetime.datetime.fromtimestamp(float(line.split()[1]), datetime.UTC)
                assert ends.isoformat() == state["expires"]
            async with secure(service, authority) as channel:
                assert await generate(channel) == 5
            with pytest.raises(httpx.HTTPError):  # plaintext
                await service.http.get("/healthz")
            with pytest.raises(grpc.aio.AioRpcError):
                await generate(service.channel)
            old = context(authority)
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            async with https(service, old) as http:
                assert (await http.get("/healthz")).status_code == 200

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_nothing_older_than_tls_1_2(
    start_service: "StartService", authority: "Authority", tmp_path: Path
) -> None:
    async def scenario() -> None:
        tls = {"router": {"dir": str(authority.issue(tmp_path / "tls", NAME))}}
        async with start_service(tls=tls) as service:
            outdated = context(authority)
            outdated.set_ciphers("ALL:@SECLEVEL=0")
            outdated.minimum_version = outdated.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises(OSError):
                await certificate(service, outdated)

    asyncio.run(scenario())


def test_clients_need_a_certificate_of_the_right_authority(
    start_service: "StartService",
    authority: "Authority",
    make_authority: MakeAuthority,
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        clients = make_authority()
        strangers = make_authority()
        folder = str(authority.issue(tmp_path / "tls", NAME))
        client = clients.issue(tmp_path / "client", "client.test")
        stranger = strangers.issue(tmp_path / "stranger", "client.test")
        tls = {"router": {"dir": folder, "client_ca_dir": str(client)}}
        async with start_service(tls=tls) as service:
            async with https(service, context(authority, client)) as http:
                assert (await http.post("/v1/completions", json=BODY)).status_code == 200
            async with secure(service, authority, client) as channel:
                assert await generate(channel) == 5
            for refused in (None, stranger):
                with pytest.raises(httpx.HTTPError):
                    async with https(service, context(authority, refused)) as http:
                        await http.get("/healthz")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async with secure(service, authority, refused) as channel:
                        await generate(channel)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert len(service.engine.requests) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_certificates_change_while_a_stream_runs(
    start_service: "StartService",
    authority: "Authority",
    make_authority: MakeAuthority,
    tmp_path: Path,
    run: Callable[[Any], None],
) -> None:
    """The stream goes on under the old certificate; new connections get the new authority's."""

    async def scenario() -> None:
        folder = authority.issue(tmp_path / "tls", NAME)
        tls = {"router": {"dir": str(folder), "client_ca_dir": str(folder)}}
        client = authority.issue(tmp_path / "client", "client.test")
        async with start_service(tls=tls) as service:
            service.engine.script.pause = asyncio.Event()
            body = {**BODY, "stream": True}
            async with (
                https(service, context(authority, client)) as http,
                secure(service, authority, client) as channel,
                http.stream("POST", "/v1/completions", json=body) as answer,
            ):
                lines = answer.aiter_lines()
                assert "Hello" in await anext(lines)
                told = asyncio.create_task(generate(channel))
                await service.until(lambda: service.engine.active == 2)
                newer = make_authority()
                newer.issue(folder, NAME)
                newcomer = newer.issue(tmp_path / "newcomer", "client.test")

                async def is_new() -> bool:
                    try:
                        return bool(await certificate(service, context(newer, newcomer)))
                    except ssl.SSLCertVerificationError:
                        return False

                await until(is_new)
                service.engine.script.pause.set()
                rest = [line async for line in lines]
                assert any("world" in line for line in rest)
                assert "data: [DONE]" in rest
                assert await told == 5
            async with https(service, context(newer, newcomer)) as http:
                assert (await http.post("/v1/completions", json=BODY)).status_code == 200
            async with secure(service, newer, newcomer) as channel:
                assert await generate(channel) == 5
            with pytest.raises(httpx.HTTPError):  # the authority before is trusted no longer
                async with https(service, context(newer, client)) as http:
                    await http.get("/healthz")

    run(scenario())


def test_broken_files_leave_the_certificate_before(
    start_service: "StartService", authority: "Authority", tmp_path: Path
) -> None:
    async def scenario() -> None:
        folder = authority.issue(tmp_path / "tls", NAME)
        tls = {"router": {"dir": str(folder)}}
        async with (
            start_service(tls=tls) as service,
            https(service, context(authority)),
        ):
            (folder / "tls.crt").write_text("nonsense")

            async def problem() -> str:
                told: str = (await service.monitoring.get("/stats")).json()["tls"]["router"][
                    "problem"
                ]
                return told

            await until(problem)
            assert "tls.crt: not a certificate in PEM" in await problem()
            assert (
                "ullage_router_certificate_problems 1.0"
                in (await service.monitoring.get("/metrics")).text
            )
            assert await certificate(service, context(authority))
            authority.issue(folder, NAME)
            await until(lambda: _is(problem, ""))

    asyncio.run(scenario())


async def _is(read: Callable[[], Any], value: object) -> bool:
    return bool(await read() == value)


def test_probes_speak_no_tls(
    start_service: "StartService", authority: "Authority", tmp_path: Path
) -> None:
    async def scenario() -> None:
        folder = str(authority.issue(tmp_path / "tls", NAME))
        tls = {"router": {"dir": folder, "client_ca_dir": folder}}
        probes = {"host": "127.0.0.1", "port": 0}
        async with start_service(tls=tls, probes=probes) as service:
            target = f"127.0.0.1:{service.router.probe_port}"
            async with open_channel(target) as channel:
                health = health_pb2_grpc.HealthStub(channel)

                async def is_serving() -> bool:
                    request = health_pb2.HealthCheckRequest(service="readiness")
                    answer = await health.Check(request)
                    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

                await until(is_serving)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await generate(channel)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(scenario())


@asynccontextmanager
async def engine_credentials(folder: Path) -> AsyncIterator[grpc.ServerCredentials]:
    """As an engine makes them, and follows its files."""
    certificates = Certificates(folder, folder)
    await certificates.start()
    yield certificates.server_credentials()
    await certificates.close()


def test_engines_and_router_verify_one_another(
    start_service: "StartService",
    authority: "Authority",
    make_authority: MakeAuthority,
    tmp_path: Path,
) -> None:
    """And go on doing so when both get new certificates while a stream runs."""

    async def scenario() -> None:
        engine = authority.issue(tmp_path / "engine", ENGINES)
        router = authority.issue(tmp_path / "router", "router.test")
        tls = {"engines": {"dir": str(router), "server_name": ENGINES}}
        async with (
            engine_credentials(engine) as credentials,
            start_service(tls=tls, credentials=credentials) as service,
        ):
            assert (await service.complete()).status_code == 200
            service.engine.script.pause = asyncio.Event()
            running = asyncio.create_task(service.complete())
            await service.until(lambda: service.engine.active == 1)
            watches = service.engine.headroom.sequence
            newer = make_authority()
            newer.issue(engine, ENGINES)
            newer.issue(router, "router.test")
            changed = service.router.service.tls.engines

            async def is_new() -> bool:
                return bool(changed.material.ca == newer.pem)

            await until(is_new)
            await service.until(lambda: service.engine.headroom.sequence > watches + 2, NEWS_S)
            service.engine.script.pause.set()
            assert (await running).json()["choices"][0]["text"] == "Hello big world"

            async def is_served() -> bool:  # while only one side had the new authority: 503
                return bool((await service.complete()).status_code == 200)

            await until(is_served)

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["authority", "name", "plaintext"])
def test_an_engine_that_is_not_ours_is_told_of(
    start_service: "StartService",
    authority: "Authority",
    make_authority: MakeAuthority,
    tmp_path: Path,
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        signer = make_authority() if fault == "authority" else authority
        engine = signer.issue(tmp_path / "engine", "else.test" if fault == "name" else ENGINES)
        (engine / "ca.crt").write_bytes(authority.pem)
        router = authority.issue(tmp_path / "router", "router.test")
        tls = {"engines": {"dir": str(router), "server_name": ENGINES}}
        async with engine_credentials(engine) as credentials:
            given = None if fault == "plaintext" else credentials
            async with start_service(tls=tls, credentials=given, wait=False) as service:

                async def trouble() -> str:
                    told: str = (await service.stats())["engines"][0]["trouble"]
                    return told

                await until(trouble)
                assert (await service.complete()).status_code == 503
                assert not service.engine.requests
                assert await trouble()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    [told] = [record for record in caplog.records if record.message == "engine lost"]
    assert told.levelno == logging.ERROR


def _mismatch(folder: Path, authority: "Authority") -> None:
    key = (folder / "tls.key").read_bytes()
    authority.issue(folder, NAME)
    (folder / "tls.key").write_bytes(key)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda f, a: (f / "tls.key").unlink(), "tls.key: No such file or directory"),
        (lambda f, a: (f / "tls.crt").write_text("x"), "tls.crt: not a certificate in PEM"),
        (lambda f, a: (f / "tls.key").write_text("x"), "tls.key: not a private key in PEM"),
        (lambda f, a: (f / "ca.crt").unlink(), "the Secret must have the key ca.crt"),
        (lambda f, a: a.issue(f, NAME, -datetime.timedelta(hours=1)), "tls.crt: expired at"),
        (_mismatch, "tls.key is not the key of tls.crt"),
    ],
    ids=["missing", "certificate", "key", "authority", "expired", "mismatch"],
)
def test_a_start_with_broken_files_is_refused(
    start_service: "StartService",
    authority: "Authority",
    tmp_path: Path,
    harm: Callable[[Path, "Authority"], None],
    told: str,
) -> None:
    folder = authority.issue(tmp_path / "tls", NAME)
    harm(folder, authority)

    async def start() -> None:
        tls = {"router": {"dir": str(folder), "client_ca_dir": str(folder)}}
        async with start_service(tls=tls):
            pass

    with pytest.raises(ConfigError, match=told):
        asyncio.run(start())


def test_no_key_is_told(authority: "Authority", tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = authority.issue(tmp_path / "tls", NAME)
        certificates = Certificates(folder, folder)
        await certificates.start()
        assert "PRIVATE" not in json.dumps(certificates.state())
        await certificates.close()

    asyncio.run(scenario())
