"""`ullage`: serve a manifest here, or show what the operator would apply."""

import argparse
import sys
from collections.abc import Sequence

from ullage_operator.cli import key, plan, quantize, up
from ullage_operator.errors import OperatorError
from ullage_operator.settings import VERSION

HELP = """examples:
  ullage up -f examples/smollm2.yaml         serve on 127.0.0.1:8000 until Ctrl-C
  ullage plan -f examples/smollm2.yaml       print what the operator would apply
  ullage key new alice                       make an API key
  ullage quantize --model file:///m --format int8 --output ./m-int8
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ullage",
        description="Language models that never run out of GPU memory.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ullage {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up.add_parser(commands)
    plan.add_parser(commands)
    quantize.add_parser(commands)
    key.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a clean stop, 2 when the manifest or the model cannot work."""
    options = make_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except OperatorError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
