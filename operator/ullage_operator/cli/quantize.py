"""`ullage quantize`: write a model with its matrices in a smaller format.

The engine's package does the work in a process of its own: the operator does not import it.
"""

import argparse
import signal
import subprocess
import sys

from ullage_operator.errors import LocalFailure

MODULE = "ullage_engine.quant.main"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "quantize",
        help="write a model in a smaller format",
        add_help=False,
        # Whatever follows belongs to the engine's own parser, -h included.
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    return quantize([sys.executable, "-m", MODULE, *options.arguments])


def quantize(command: list[str]) -> int:
    """Exit status of the engine's command, which prints its own progress and errors.

    Raises:
        LocalFailure: it could not run at all.
    """
    try:
        status = _run(command)
    except OSError as error:
        raise LocalFailure(f"cannot run {command[0]}: {error.strerror}") from error
    except KeyboardInterrupt:
        return 130
    if status < 0:
        raise LocalFailure(
            f"quantize was ended by signal {-status}; if that was for memory, it needs room for "
            "the largest matrix and a shard of 2 GiB"
        )
    if status not in (0, 2, 130, 143):
        raise LocalFailure(
            f"quantize ended with status {status} for the reason above; "
            "if a module is missing, install ullage[engine]"
        )
    return status


def _run(command: list[str]) -> int:
    """Waits for the command to clean up, however this process is told to end."""
    with subprocess.Popen(command) as process:
        previous = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, previous)
