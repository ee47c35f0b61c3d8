"""Runs the commands of load generators and evaluation harnesses beside this Python."""

import subprocess
import sys
from pathlib import Path

TAIL = 400
"""Number of characters of a failed command's output in the result. All of it goes to the log."""


def call(*command: str) -> str:
    """Run a program of this environment, and return its output.

    Raises:
        RuntimeError: the program failed.
    """
    path = Path(sys.executable).parent / command[0]
    done = subprocess.run(
        [str(path), *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    print(done.stdout, file=sys.stderr, flush=True)
    if done.returncode:
        raise RuntimeError(f"exited with {done.returncode}: {done.stdout.strip()[-TAIL:]}")
    return done.stdout
