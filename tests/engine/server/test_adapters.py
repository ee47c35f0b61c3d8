"""Requests that name a LoRA adapter as their model are computed with it, whatever happens."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from msgspec.structs import asdict, replace
from ullage_testing.failing_disk import FailingDisk

from ullage.admin.v1 import admin_pb2
from ullage.headroom.v1.headroom_pb2 import Headroom
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import AdapterSection, EngineConfig
from ullage_common.process import file_watch
from ullage_common.process.config_file import ConfigError, read_file
from ullage_common.wire import fingerprint
from ullage_common.wire.errors import from_rpc_error
from ullage_engine import main as engine_main
from ullage_engine.main import main
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.server import service
from ullage_engine.server.restart_policy import RestartPolicy

Serve = Callable[..., AbstractAsyncContextManager[Any]]
EAGER = RestartPolicy(first_backoff_s=0.05)
KILL = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)
OOM = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_OOM)
Edit = Callable[..., None]
MakeAdapter = Callable[..., AdapterSection]


@pytest.fixture
def with_adapter(config: EngineConfig, make_adapter: MakeAdapter) -> EngineConfig:
    return replace(config, adapters=(make_adapter("sql"),))


@pytest.fixture
def edited(config: EngineConfig, tmp_path: Path) -> tuple[EngineConfig, Edit]:
    """Returns a configuration whose adapters are in a file, and what writes that file."""
    path = tmp_path / "mounted" / "adapters.yaml"
    path.parent.mkdir()

    def edit(*adapters: AdapterSection) -> None:
        text = json.dumps({"adapters": [asdict(each) for each in adapters]})
        path.with_suffix(".tmp").write_text(text)
        path.with_suffix(".tmp").replace(path)

    edit()
    return replace(config, adapters_file=str(path)), edit


def served(state: Headroom) -> list[str]:
    return [each.name for each in state.adapters if each.served]


def errors(state: Headroom) -> dict[str, str]:
    return {each.name: each.error for each in state.adapters if each.error}


def ask(model: str, **fields: Any) -> pb.GenerateRequest:
    fields.setdefault("token_ids", pb.TokenIds(ids=(1, 2, 3)))
    request = pb.GenerateRequest(
        model=model,
        sampling=pb.SamplingParams(seed=9),
        stop=pb.StopConditions(max_tokens=40),
        output=pb.OutputOptions(return_token_ids=True),
    )
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


async def refused(engine: Any, name: str) -> str:
    """Returns the reason why a request of a model is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.generate(ask(name))
    return from_rpc_error(caught.value).reason


def expected(fake: ModuleType, adapter: str) -> list[int]:
    """The fake worker's tokens differ by adapter."""
    return [fake.token_at(place, 9 + len(adapter)) for place in range(3, 43)]


def test_a_request_keeps_its_adapter_under_the_next_workers(
    serve: Serve, fake: ModuleType, with_adapter: EngineConfig, run_dir: Path
) -> None:
    trace = run_dir / "trace"

    async def scenario() -> None:
        async with serve(with_adapter, EAGER, trace=str(trace)) as engine:
            lost_twice = pb.TokenIds(ids=(fake.Script.LOST_TWICE, 2, 3))
            answer = await engine.generate(ask("sql", token_ids=lost_twice))
            assert answer.token_ids == expected(fake, "sql")
            for name in ("", "smollm2-135m"):
                assert (await engine.generate(ask(name))).token_ids == expected(fake, "")

    asyncio.run(scenario())
    lines = [line.split() for line in trace.read_text().splitlines()]
    keys = {line[-1] for line in lines if line[0] == "submit" and "sql" in line[-1]}
    assert len(keys) == 1
    assert sum(line[0] == "submit" and line[-1] in keys for line in lines) == 3
    # The first worker loads it, the others are told that it can be.
    added = [line[2] for line in lines if line[0] == "add"]
    assert added == ["False", "True", "True"]


def test_adapters_come_and_go_while_the_engine_serves(
    serve: Serve, fake: ModuleType, edited: tuple[EngineConfig, Edit], make_adapter: MakeAdapter
) -> None:
    config, edit = edited

    async def scenario() -> None:
        async with serve(config) as engine:
            pid = (await engine.admin.InjectFault(OOM)).worker_pid
            assert served(await engine.state()) == []
            edit(make_adapter("sql"), make_adapter("python"))
            await engine.until(lambda state: served(state) == ["sql", "python"])
            for name in ("sql", "python"):
                assert (await engine.generate(ask(name))).token_ids == expected(fake, name)

            edit(make_adapter("python"))
            await engine.until(lambda state: served(state) == ["python"])
            assert await refused(engine, "sql") == "MODEL_NOT_FOUND"
            assert (await engine.generate(ask("python"))).token_ids == expected(fake, "python")
            assert (await engine.admin.InjectFault(OOM)).worker_pid == pid
            assert (await engine.state()).worker_restarts == 0

    asyncio.run(scenario())


def test_what_runs_goes_on_with_the_version_that_it_began_with(
    serve: Serve,
    edited: tuple[EngineConfig, Edit],
    make_adapter: MakeAdapter,
    run_dir: Path,
) -> None:
    config, edit = edited
    trace = run_dir / "trace"
    edit(make_adapter("sql"))

    async def scenario() -> None:
        async with serve(config, EAGER, trace=str(trace), step_s=0.05) as engine:
            before = (await engine.state()).adapters[0].digest
            running = asyncio.create_task(engine.generate(ask("sql")))
            await engine.until(lambda state: state.requests_running > 0)
            edit(make_adapter("sql", version=1))
            await engine.until(lambda state: state.adapters[0].digest != before)
            await engine.admin.InjectFault(KILL)
            assert (await running).finished.resumes == 1
            await engine.generate(ask("sql"))

    asyncio.run(scenario())
    lines = [line.split() for line in trace.read_text().splitlines()]
    submitted = [line[-1] for line in lines if line[0] == "submit"]
    assert submitted[0] == submitted[1] != submitted[2]
    added = [line[1] for line in lines if line[0] == "add"]
    assert sorted(added[2:]) == sorted(added[:2]), "the next worker has to know both"
    assert [line[1] for line in lines if line[0] == "remove"] == [submitted[0]]


class DeafReader:
    """A call whose client reads nothing, not even its error."""

    def __init__(self) -> None:
        self.has_failed = asyncio.Event()

    async def write(self, message: pb.GenerateResponse) -> None:
        await asyncio.Event().wait()

    async def abort(self, *_: object) -> None:
        self.has_failed.set()
        await asyncio.Event().wait()

    def time_remaining(self) -> None:
        """It set no deadline of its own."""

    def invocation_metadata(self) -> None:
        """It came with none."""


def test_an_error_that_is_not_read_keeps_no_adapter(
    serve: Serve,
    edited: tuple[EngineConfig, Edit],
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "SLOW_CLIENT_GRACE_S", 0.1)
    config, edit = edited
    limits = replace(config.limits, request_timeout=0.5, total_timeout=0.5)
    config = replace(config, limits=limits)
    edit(make_adapter("sql"))

    async def scenario() -> None:
        async with serve(config) as engine:
            before = (await engine.state()).adapters[0].digest
            reader = DeafReader()
            unread = asyncio.create_task(engine._app._inference.Generate(ask("sql"), reader))
            async with asyncio.timeout(30):
                await reader.has_failed.wait()
            edit(make_adapter("sql", version=1))
            await engine.until(lambda state: state.adapters[0].digest != before)
            assert len(engine._app._adapters.additions()) == 1
            assert not unread.done()
            unread.cancel()
            await asyncio.gather(unread, return_exceptions=True)

    asyncio.run(scenario())


def test_bad_adapters_are_reported_by_name_and_cost_nobody_else_anything(
    serve: Serve,
    fake: ModuleType,
    edited: tuple[EngineConfig, Edit],
    make_adapter: MakeAdapter,
    tmp_path: Path,
) -> None:
    config, edit = edited
    good = make_adapter("good")
    cut = make_adapter("cut")
    weights = Path(cut.source.removeprefix("file://"), "adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    gone = AdapterSection(name="gone", source=f"file://{tmp_path}/gone", rank=8)
    bad = (gone, cut, make_adapter("wide", rank=32), make_adapter("broken"))

    async def scenario() -> None:
        async with serve(config, EAGER) as engine:
            edit(*bad, good)
            await engine.until(lambda state: len(errors(state)) == 4 and served(state) == ["good"])
            found = errors(await engine.state())
            assert "no adapter_config.json" in found["gone"]
            assert "adapter_model.safetensors" in found["cut"]
            assert "has r 32" in found["wide"]
            assert "max_lora_rank 16" in found["wide"]
            assert found["broken"] == "its rank is wrong"
            for name in found:
                assert await refused(engine, name) == "MODEL_NOT_FOUND"
            assert (await engine.generate(ask("good"))).token_ids == expected(fake, "good")

            edit(make_adapter("good", version=1), make_adapter("gone"))
            await engine.until(lambda state: served(state) == ["good", "gone"])
            assert errors(await engine.state()) == {}

    asyncio.run(scenario())


def test_an_edit_that_fails_leaves_the_version_before_it(
    serve: Serve, edited: tuple[EngineConfig, Edit], make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    config, edit = edited
    edit(make_adapter("sql"))

    async def scenario() -> None:
        async with serve(config) as engine:
            edit(AdapterSection(name="sql", source=f"file://{tmp_path}/gone", rank=8))
            await engine.until(lambda state: bool(errors(state)))
            assert served(await engine.state()) == ["sql"]
            await engine.generate(ask("sql"))

    asyncio.run(scenario())


def test_an_adapter_that_ends_workers_is_left_alone_after_two(
    serve: Serve, fake: ModuleType, edited: tuple[EngineConfig, Edit], make_adapter: MakeAdapter
) -> None:
    config, edit = edited

    async def scenario() -> None:
        async with serve(config, EAGER) as engine:
            edit(make_adapter("kills"), make_adapter("sql"))
            await engine.until(lambda state: bool(errors(state)) and served(state) == ["sql"])
            assert "2 workers ended while they loaded it" in errors(await engine.state())["kills"]
            assert (await engine.generate(ask("sql"))).token_ids == expected(fake, "sql")
            # An edit of another one is no reason to try it again.
            edit(make_adapter("kills"), make_adapter("python"))
            await engine.until(lambda state: served(state) == ["python"])
            assert (await engine.state()).worker_restarts == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("is_twice", [True, False])
def test_a_file_that_cannot_be_read_costs_the_model_nothing(
    serve: Serve,
    fake: ModuleType,
    edited: tuple[EngineConfig, Edit],
    make_adapter: MakeAdapter,
    is_twice: bool,
) -> None:
    config, edit = edited
    edit(make_adapter("twice"), make_adapter("twice"))
    if not is_twice:
        Path(config.adapters_file).write_text("adapters: {")

    async def scenario() -> None:
        async with serve(config) as engine:
            assert (await engine.generate(ask(""))).token_ids == expected(fake, "")
            edit(make_adapter("sql"))
            await engine.until(lambda state: served(state) == ["sql"])

    asyncio.run(scenario())


@pytest.mark.parametrize("fails_at_start", [True, False])
def test_a_file_is_read_again_after_an_error_of_the_disk(
    serve: Serve,
    edited: tuple[EngineConfig, Edit],
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    fails_at_start: bool,
) -> None:
    config, edit = edited
    monkeypatch.setattr(file_watch, "INTERVAL_S", 0.05)
    disk = FailingDisk(Path(config.adapters_file).parent, monkeypatch)
    if fails_at_start:
        edit(make_adapter("sql"))
        disk.num_failures_left = 3

    async def scenario() -> None:
        async with serve(config) as engine:
            if not fails_at_start:
                disk.num_failures_left = 3
                edit(make_adapter("sql"))
            await engine.until(lambda state: served(state) == ["sql"])
        assert not disk.num_failures_left

    asyncio.run(scenario())


def test_an_answer_goes_on_from_another_engine_with_its_adapter(
    serve: Serve, fake: ModuleType, with_adapter: EngineConfig
) -> None:
    async def scenario() -> None:
        async with serve(with_adapter) as engine:
            tokens = expected(fake, "sql")
            received = pb.PartialAnswer(token_ids=tokens[:7])
            later = ask("sql", continuation=pb.Continuation(answers=[received]))
            assert (await engine.generate(later)).token_ids == tokens[7:]

    asyncio.run(scenario())


def test_the_fingerprint_of_an_answer_names_the_files_of_its_adapter(
    serve: Serve, edited: tuple[EngineConfig, Edit], make_adapter: MakeAdapter
) -> None:
    config, edit = edited
    edit(make_adapter("sql"))

    async def scenario() -> None:
        async with serve(config, weights="w") as engine:
            [plain, first] = [(await engine.generate(ask(n))).accepted for n in ("", "sql")]
            [state] = (await engine.state()).adapters
            key = fingerprint.adapter_key("sql", state.digest)
            expected = fingerprint.with_adapter(plain.fingerprint, key)
            assert first.fingerprint == expected != plain.fingerprint

            edit(make_adapter("sql", version=1))
            await engine.until(lambda headroom: headroom.adapters[0].digest != state.digest)
            second = (await engine.generate(ask("sql"))).accepted
            assert second.fingerprint not in (plain.fingerprint, first.fingerprint)

    asyncio.run(scenario())


def test_get_model_lists_adapters_and_other_names_are_refused(
    serve: Serve, with_adapter: EngineConfig
) -> None:
    async def scenario() -> None:
        async with serve(with_adapter) as engine:
            for name in ("", "sql", "smollm2-135m"):
                model = await engine.inference.GetModel(pb.GetModelRequest(model=name))
                assert model.model == "smollm2-135m"
                assert [(each.name, each.rank) for each in model.adapters] == [("sql", 16)]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await engine.generate(ask("python"))
            error = from_rpc_error(caught.value)
            assert (error.reason, error.metadata["field"]) == ("MODEL_NOT_FOUND", "model")
            assert "'smollm2-135m' or its adapter 'sql'" in error.message

    asyncio.run(scenario())


def test_two_of_one_name_are_refused(tmp_path: Path) -> None:
    adapter = "{name: sql, source: 'file:///a', rank: 8}"
    path = tmp_path / "engine.yaml"
    for name, adapters in (("sql", adapter), ("m", f"{adapter}, {adapter}")):
        path.write_text(f"model: {{source: 'file:///m', name: {name}}}\nadapters: [{adapters}]\n")
        with pytest.raises(ConfigError, match=r"adapters\[\d\]\.name is 'sql', the name of"):
            read_file(path, EngineConfig)


@pytest.mark.parametrize("kind", ["native", "auto"])
def test_the_native_engine_refuses_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(engine_main, "find_spec", lambda name: None)
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"engine: {kind}\ndevice: cpu\nmodel: {{source: 'file:///m', name: m}}\n"
        "adapters: [{name: sql, source: 'file:///a', rank: 8}]\n"
    )
    assert main(["--config", str(path)]) == 2
    assert capsys.readouterr().err == (
        "error: adapters: the native engine serves none; remove them, or set engine: vllm "
        "(spec.engine: VLLM) and install it (make install-vllm; on Kubernetes an image that has "
        "it, as the chart's vllmEngineImage or as spec.image)\n"
    )


def test_adapters_that_neither_engine_serves_are_refused_by_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_main, "find_spec", lambda name: object())
    path = tmp_path / "engine.yaml"
    path.write_text(
        "device: cpu\nmodel: {source: 'file:///m', name: m, quantization: int8}\n"
        "adapters: [{name: sql, source: 'file:///a', rank: 8}]\n"
    )
    assert main(["--config", str(path)]) == 2
    assert capsys.readouterr().err == (
        "error: adapters: the native engine serves none; remove them, or change what vLLM "
        "refuses: model.quantization: only the native engine has int8; with vLLM set fp8, or use a "
        "quantised checkpoint\n"
    )


def test_auto_takes_vllm_for_adapters(
    config: EngineConfig, with_adapter: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is one that the native engine serves on a CPU, without them."""
    monkeypatch.setattr(engine_main, "find_spec", lambda name: object())
    files = resolve_source(config.model.source)
    launches = [
        engine_main._launch(replace(each, device="cpu"), Path("engine.yaml"))(files)
        for each in (config, with_adapter)
    ]
    workers = [launch.program[2] for launch in launches]
    assert workers == ["ullage_engine.worker.main", "ullage_engine.vllm_worker"]
