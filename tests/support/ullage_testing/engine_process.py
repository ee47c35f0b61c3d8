"""An engine's server in a process of its own, with a fake worker.

`python engine_process.py CONFIG OPTIONS TIMES`: the configuration's file, and the fake worker's
options and the times of its GPUs as JSON. It writes its port, and ends on SIGTERM.
"""

import asyncio
import signal
import sys
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
