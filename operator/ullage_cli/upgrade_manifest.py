"""`ullage upgrade-manifest` converts a manifest of version 0.1.0 to the current fields."""

import argparse
import sys
from pathlib import Path

from ullage_cli.manifest_file import upgraded_manifest

HELP = """examples:
  ullage upgrade-manifest -f old.yaml > new.yaml
  ullage upgrade-manifest -f old.yaml | diff old.yaml -

Comments are lost. Values that must change are listed on standard error. Check the result with
ullage plan -f new.yaml. docs/guide/upgrading.md has the other steps of an upgrade.

exit status: 0 upgraded, 2 the manifest is wrong, or has a field without a successor
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage upgrade-manifest`."""
    parser = commands.add_parser(
        "upgrade-manifest",
        help="print a manifest of 0.1.0 with today's fields",
        description="Print a manifest of 0.1.0 with today's fields.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="manifest of 0.1.0")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the upgraded manifest, and print a note for each changed value to standard error."""
    text, changes = upgraded_manifest(options.file)
    print(text, end="")
    for each in changes:
        print(f"note: {each}", file=sys.stderr)
    return 0
