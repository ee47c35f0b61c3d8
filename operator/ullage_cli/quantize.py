"""`ullage quantize` runs the engine's offline tool, which converts a model to a smaller format."""

import argparse
import signal
import subprocess
import sys

from ullage_operator.api.errors import LocalFailure

MODULE = "ullage_engine.quantize.convert"
"""Module of the engine's tool. It runs in its own process, as the CLI never imports the engine."""

EXPECTED_STATUSES = (0, 2, 130, 143)
"""Exit statuses to pass through: success, an error that the tool printed, SIGINT and SIGTERM."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage quantize`."""
    parser = commands.add_parser(
        "quantize",
        help="write a model in a smaller format",
        add_help=False,
        # All arguments belong to the engine's own parser, -h included.
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the engine's tool with the given arguments, and return its exit status."""
    return quantize([sys.executable, "-m", MODULE, *options.arguments])


def quantize(command: list[str]) -> int:
    """Run the tool and return its exit status. The tool prints its own progress and errors.

    Raises:
        LocalFailure: the tool could not be started, was killed, or crashed.
    """
    try:
        status = _run_to_end(command)
    except OSError as error:
        raise LocalFailure(f"cannot run {command[0]}: {error.strerror}") from error
    except KeyboardInterrupt:
        return 130

    if status < 0:
        raise LocalFailure(
            f"quantize was killed by signal {-status}; if memory was the reason, free enough for "
            "the largest matrix and a shard of 2 GiB"
        )
    if status not in EXPECTED_STATUSES:
        raise LocalFailure(
            f"quantize ended with status {status} for the reason above; "
            "if a module is missing, install ullage[engine]"
        )
    return status


def _run_to_end(command: list[str]) -> int:
    """Run a command, and wait until it has cleaned up even if this process receives SIGTERM."""
    with subprocess.Popen(command) as process:
        previous = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, previous)
