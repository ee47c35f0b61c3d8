"""The native worker: `python -m ullage_engine.worker.main --config F --endpoint PATH`.

The fork server runs `main` in a process that it forks from itself.

`ullage_engine.worker.loop` describes the worker's life cycle and its exit statuses.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import setproctitle

from ullage_common.config.engine import EngineConfig
from ullage_engine.worker import loop, rank_process
from ullage_engine.worker.device import HostTier
from ullage_engine.worker.forks import ForkedProcess, fork
from ullage_engine.worker.started import Started
from ullage_engine.worker.startup import start


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a native worker, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ullage_engine.worker.main",
        description="Compute for one ullage-engine, which starts this process itself.",
    )
    return loop.run(parser, _start, arguments)


class _WaitingRanks:
    """The processes of the other ranks, forked in advance, which wait for their options."""

    def __init__(self, config: EngineConfig, options: argparse.Namespace) -> None:
        """Fork a process for every rank but rank 0."""
        self._base = ["--config", str(options.config)]
        if options.kv_arena:
            self._base += ["--kv-arena", options.kv_arena, "--kv-bytes", str(options.kv_bytes)]
        self._pipes: dict[int, int] = {}
        self._processes: dict[int, ForkedProcess] = {}

        for rank in range(1, config.gpus):
            its_end, self._pipes[rank] = os.pipe()
            self._processes[rank] = ForkedProcess(fork(partial(_run_rank, rank, its_end)))
            os.close(its_end)

    def start(self, rank: int, endpoint: str, device_bytes: int | None) -> ForkedProcess:
        """Let a rank begin, and return its process. See `startup.StartRank`."""
        options = [*self._base, "--rank", str(rank), "--endpoint", endpoint]
        if device_bytes is not None:
            options += ["--device-bytes", str(device_bytes)]

        with os.fdopen(self._pipes.pop(rank), "w") as pipe:
            pipe.write(json.dumps(options) + "\n")
        return self._processes[rank]


def _run_rank(rank: int, pipe: int) -> int:
    """Run a rank in the forked process, and return its exit status."""
    title = [sys.executable, "-m", rank_process.__name__, "--rank", str(rank)]
    setproctitle.setproctitle(" ".join(title))
    # A line, because the end of the pipe would not be seen: this process has its other end, too.
    with os.fdopen(pipe) as file:
        options = json.loads(file.readline())
    return rank_process.main(options)


def _start(config: EngineConfig, report: loop.Report, options: argparse.Namespace) -> Started:
    # Before anything starts a thread or uses the GPU.
    ranks = _WaitingRanks(config, options)
    group_path = Path(options.endpoint)
    host_tier = HostTier(options.kv_arena, options.kv_bytes) if options.kv_arena else None
    return start(config, report, group_path, ranks.start, host_tier)


if __name__ == "__main__":
    sys.exit(main())
