"""`ullage upgrade-manifest` prints a manifest of 0.1.0 with today's fields."""

import argparse
import sys
from pathlib import Path

from ullage_cli.manifest_file import upgraded_manifest


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "upgrade-manifest",
        help="print a manifest of 0.1.0 with today's fields",
        description="Print a manifest of 0.1.0 with today's fields (docs/guide/upgrading.md). "
        "Comments are lost. Values that must change are listed on standard "
        "error.",
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="manifest of 0.1.0")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the manifest, and print a note for each changed value to standard error."""
    text, changes = upgraded_manifest(options.file)
    print(text, end="")
    for each in changes:
        print(f"note: {each}", file=sys.stderr)
    return 0
