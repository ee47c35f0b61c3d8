"""The native worker's process: `python -m ullage_engine.worker.main --config F --endpoint PATH`.

`ullage_engine.worker.loop` describes the worker's life cycle and its exit statuses.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ullage_common.config.engine import EngineConfig
from ullage_engine.worker import loop
from ullage_engine.worker.device import HostTier
from ullage_engine.worker.started import Started
from ullage_engine.worker.startup import RankCommand, start


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a native worker, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ullage_engine.worker.main",
        description="Compute for one ullage-engine, which starts this process itself.",
    )
    return loop.run(parser, _start, arguments)


def _start(config: EngineConfig, report: loop.Report, options: argparse.Namespace) -> Started:
    group_path = Path(options.endpoint)
    command = _rank_command(options.config, options.kv_arena, options.kv_bytes)
    host_tier = HostTier(options.kv_arena, options.kv_bytes) if options.kv_arena else None
    return start(config, report, group_path, command, host_tier)


def _rank_command(config: Path, kv_arena: str | None, kv_bytes: int) -> RankCommand:
    base = [sys.executable, "-m", "ullage_engine.worker.rank_process", "--config", str(config)]
    base += ["--parent", str(os.getpid())]
    if kv_arena:
        base += ["--kv-arena", kv_arena, "--kv-bytes", str(kv_bytes)]

    def command(rank: int, endpoint: str, device_bytes: int | None) -> Sequence[str]:
        budget = [] if device_bytes is None else ["--device-bytes", str(device_bytes)]
        return [*base, "--rank", str(rank), "--endpoint", endpoint, *budget]

    return command


if __name__ == "__main__":
    sys.exit(main())
