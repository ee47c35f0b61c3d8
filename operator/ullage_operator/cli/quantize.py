"""`ullage quantize`: write a model with its matrices in a smaller format.

The engine's package does the work in a process of its own: the operator does not import it.
"""

import argparse
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
        status = subprocess.run(command, check=False).returncode
    except OSError as error:
        raise LocalFailure(f"cannot run {command[0]}: {error.strerror}") from error
    except KeyboardInterrupt:
        return 130
    if status not in (0, 2):
        raise LocalFailure(
            f"quantize ended with status {status}; it needs ullage[engine] installed "
            "and memory for the largest matrix and a shard of 2 GiB"
        )
    return status
