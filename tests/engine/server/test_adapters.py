"""Requests that name a LoRA adapter as their model are computed with it, whatever happens."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import AdapterSection, EngineConfig
from ullage_common.process.config_file import ConfigError, read_file
from ullage_common.wire.errors import from_rpc_error
from ullage_engine import main as engine_main
from ullage_engine.main import main
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.server.health import RestartPolicy

Serve = Callable[..., AbstractAsyncContextManager[Any]]
EAGER = RestartPolicy(first_backoff_s=0.05)
SQL = AdapterSection(name="sql", source="file:///sql", rank=16)


@pytest.fixture
def with_adapter(config: EngineConfig) -> EngineConfig:
    return replace(config, adapters=(SQL,))


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
    assert sum(line[0] == "submit" and line[-1] == "sql" for line in lines) == 3


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
        with pytest.raises(ConfigError, match=r"adapters\[\d\]\.name is 'sql', which the model or"):
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
        "refuses: model.quantization: int8 is the native engine's; with vLLM set fp8, or name a "
        "checkpoint that is quantised itself\n"
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
    workers = [launch.command("x.ipc")[2] for launch in launches]
    assert workers == ["ullage_engine.worker.main", "ullage_engine.vllm_worker"]
