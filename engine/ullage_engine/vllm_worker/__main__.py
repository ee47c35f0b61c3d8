"""Command-line entry point of the vLLM worker, which runs `ullage_engine.worker.loop`."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ullage_common.config.engine import EngineConfig
from ullage_common.process import logs
from ullage_common.process.config_file import read_file
from ullage_engine.memory.ledger import LedgerError
from ullage_engine.protocol.errors import WeightsError, WorkerStartError
from ullage_engine.protocol.messages import Loading
from ullage_engine.worker import loop
from ullage_engine.worker.forks import die_with_parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker or a follower, and return the process's exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--follow" in given:
        from ullage_engine.vllm_worker.group import follow

        given.remove("--follow")
        return follow(given)
    if "--node" in given:
        return _compute(given)
    parser = argparse.ArgumentParser(
        prog="python -m ullage_engine.vllm_worker",
        description="Compute with vLLM for one ullage-engine, which starts this process itself.",
    )
    return loop.run(parser, _start, given, _import_libraries)


def _compute(arguments: Sequence[str]) -> int:
    """Run this node's vLLM ranks on behalf of the follower that started this process."""
    parent = os.getppid()
    parser = argparse.ArgumentParser(prog="python -m ullage_engine.vllm_worker")
    parser.add_argument("--node", type=int, required=True, help="rank of this node")
    parser.add_argument("--config", type=Path, required=True, help="the engine's configuration")
    parser.add_argument("--leader", required=True, help="address of the leader")
    parser.add_argument(
        "--rank-bytes", type=int, required=True, help="memory of a rank's device on the leader"
    )
    options = parser.parse_args(arguments)
    die_with_parent(parent)
    config = read_file(options.config, EngineConfig)
    logs.configure(config.server.log_level, fields={"node": options.node})
    from ullage_engine.vllm_worker.arguments import Node
    from ullage_engine.vllm_worker.startup import compute

    try:
        compute(config, Node(options.node, options.leader), options.rank_bytes)
    except (WorkerStartError, LedgerError, WeightsError) as error:
        logging.getLogger("ullage.engine.vllm").error("%s", error)
    return 1


def _import_libraries() -> None:
    from ullage_engine.vllm_worker import startup  # noqa: F401


def _start(
    config: EngineConfig, report: loop.Report, options: argparse.Namespace
) -> loop.StartedEngine:
    # Importing vLLM takes seconds, so report to the server first that this process is alive.
    report(Loading(stage="imports", done_bytes=0, total_bytes=1))
    from ullage_engine.vllm_worker.startup import start
    from ullage_engine.worker.device import HostTier

    host_tier = HostTier(options.kv_arena, options.kv_bytes) if options.kv_arena else None
    return start(config, report, host_tier)


if __name__ == "__main__":
    sys.exit(main())
