"""The commands behind `ullage plan --trace` and `ullage plan --measure`, in a process of their own.

`ullage` never imports the engine or the router, so it writes the service's configuration files to a
folder and runs this module.
"""

import argparse
import asyncio
import gc
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ullage_common.config.engine import EngineConfig
from ullage_common.config.router import RouterConfig
from ullage_common.process.config_file import ConfigError, read_file
from ullage_replay.cost import FitError
from ullage_replay.hardware import Hardware, HardwareError, read_hardware, write_hardware
from ullage_replay.measure import EngineAddress, MeasureError, measure
from ullage_replay.report import Summary, as_json, as_table, summarize
from ullage_replay.search import ReplayObjectives, find_engines
from ullage_replay.simulation import PoolPlan, replay
from ullage_replay.timeline import TimelineError
from ullage_replay.trace import TraceError, TraceRequest, read_trace
from ullage_replay.virtual_time import StalledError

ROUTER_FILE = "router.yaml"
PROGRESS_AFTER_S = 2.0
"""Seconds after which a replay reports its progress, and between two reports."""
_GARBAGE = 200_000
"""Allocations between two garbage collections, which are slow with so many live objects."""

_ERRORS = (
    ConfigError,
    FitError,
    HardwareError,
    MeasureError,
    StalledError,
    TimelineError,
    TraceError,
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this process's command line."""
    parser = argparse.ArgumentParser(prog="python -m ullage_replay.main")
    commands = parser.add_subparsers(dest="command", required=True)

    replaying = commands.add_parser("replay", help="replay a trace in virtual time")
    replaying.add_argument("--configs", type=Path, required=True, help="folder of configurations")
    replaying.add_argument("--pool", action="append", required=True, metavar="NAME=ENGINES")
    replaying.add_argument("--trace", type=Path, required=True)
    replaying.add_argument("--hardware", type=Path, required=True, metavar="FILE")
    replaying.add_argument("--ttft", type=float, help="objective in seconds")
    replaying.add_argument("--tpot", type=float, help="objective in seconds")
    replaying.add_argument("--json", action="store_true")
    replaying.set_defaults(run=run_replay)

    measuring = commands.add_parser("measure", help="measure a running service's engines")
    measuring.add_argument("--router", required=True, metavar="HOST:PORT")
    measuring.add_argument("--engine", action="append", required=True, metavar="POOL=HOST:PORT")
    measuring.add_argument("--hardware", type=Path, required=True, metavar="FILE")
    measuring.set_defaults(run=run_measure)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status, which is 2 for an error that the user can fix."""
    options = make_parser().parse_args(arguments)
    logging.disable(logging.INFO)
    try:
        status: int = options.run(options)
    except _ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def run_replay(options: argparse.Namespace) -> int:
    """Replay a trace, and print the summary."""
    trace = read_trace(options.trace)
    hardware = read_hardware(options.hardware)
    router = read_file(options.configs / ROUTER_FILE, RouterConfig)
    counts = {name: int(count) for name, _, count in (p.partition("=") for p in options.pool)}
    pools = {
        name: PoolPlan(read_file(options.configs / f"{name}.yaml", EngineConfig), count)
        for name, count in counts.items()
    }

    gc.freeze()
    gc.set_threshold(_GARBAGE)
    summary = _replayed(trace, router, pools, hardware)
    objectives = ReplayObjectives(options.ttft, options.tpot)
    if objectives.as_json:
        first = next(iter(pools))

        def with_engines(count: int) -> Summary:
            print(f"trying {count} engines in pool {first}", file=sys.stderr)
            changed = {**pools, first: replace(pools[first], num_engines=count)}
            return _replayed(trace, router, changed, hardware)

        summary = find_engines(with_engines, counts, objectives, summary)

    sys.stdout.write(as_json(summary) if options.json else as_table(summary))
    return 0


def _replayed(
    trace: Sequence[TraceRequest],
    router: RouterConfig,
    pools: dict[str, PoolPlan],
    hardware: Hardware,
) -> Summary:
    return summarize(replay(trace, router, pools, hardware, ProgressLine(len(trace))))


class ProgressLine:
    """Prints how many requests have been replayed, once the replay has taken a while."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._due = time.perf_counter() + PROGRESS_AFTER_S

    def __call__(self, number: int) -> None:
        """Print the progress if it is due."""
        if time.perf_counter() >= self._due:
            self._due += PROGRESS_AFTER_S
            print(f"replayed {number} of {self._total} requests", file=sys.stderr)


def run_measure(options: argparse.Namespace) -> int:
    """Measure a running service, and write the hardware file."""
    engines = [
        EngineAddress(pool, target)
        for pool, _, target in (each.partition("=") for each in options.engine)
    ]
    hardware = asyncio.run(
        measure(options.router, engines, lambda stage: print(stage, file=sys.stderr))
    )
    write_hardware(options.hardware, hardware)
    for pool, engine in hardware.engines.items():
        print(
            f"pool {pool}: {engine.cost.num_steps} steps, "
            f"which the model misses by {100 * engine.cost.error:.1f} % on average"
        )
    print(f"{options.hardware}: {hardware.model} on {hardware.processor}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
