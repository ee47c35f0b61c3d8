"""`ullage upgrade-manifest`: prints a manifest of 0.1.0 with today's fields."""

import argparse
import sys
from pathlib import Path

from ullage_cli.manifest_file import upgraded_manifest


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "upgrade-manifest",
        help="print a manifest of 0.1.0 in today's form",
        description="Prints a manifest of 0.1.0 with today's fields (docs/guide/upgrading.md). "
        "Comments are lost. Values that cannot stay the same are named on the standard error "
        "output.",
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="manifest of 0.1.0")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the manifest, and a note for each changed value on the standard error output."""
    text, changes = upgraded_manifest(options.file)
    print(text, end="")
    for each in changes:
        print(f"note: {each}", file=sys.stderr)
    return 0
