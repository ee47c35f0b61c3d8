"""The entry point `ullage`: parses the command line and prints errors."""

import argparse
import sys
from collections.abc import Sequence

from ullage_cli import (
    bench,
    completion,
    key,
    models,
    plan,
    profile,
    quantize,
    up,
    upgrade_manifest,
    verify,
)
from ullage_cli.batch import command as batch
from ullage_cli.chat import command as chat
from ullage_cli.convert import command as convert
from ullage_cli.serve import command as serve
from ullage_cli.top import command as top
from ullage_cli.trace import command as trace
from ullage_operator.api.errors import OperatorError
from ullage_operator.api.settings import VERSION

HELP = """examples:
  ullage serve Qwen/Qwen3-0.6B               serve a model, with formats that fit this machine
  ullage chat                                chat with it in the terminal
  ullage models                              show which models fit this machine
  ullage up -f examples/smollm2.yaml         serve on 127.0.0.1:8000 until Ctrl-C
  ullage batch -i in.jsonl -o out.jsonl --model ./model.gguf
                                             answer a file in OpenAI's batch format
  ullage top                                 watch the service live
  ullage plan -f examples/smollm2.yaml       print the operator's objects for a manifest
  ullage plan -f service.yaml --trace requests.jsonl --hardware here.json
                                             predict memory, latency and refusals
  ullage verify all http://127.0.0.1:8000    check a server under overload and faults
  ullage bench http://127.0.0.1:8000         find the knee of throughput over latency
  ullage trace REQUEST_ID                    print the steps of one request from all logs
  ullage profile smollm2 --steps 50          record an engine's next steps for Perfetto
  ullage convert values.yaml                 print manifests for another server's configuration
  ullage key new alice                       make an API key
  ullage upgrade-manifest -f old.yaml        print a manifest of 0.1.0 with today's fields
  ullage quantize --model file:///m --format int8 --output ./m-int8
"""

COMMANDS = (
    serve,
    chat,
    models,
    batch,
    up,
    top,
    trace,
    verify,
    bench,
    profile,
    plan,
    convert,
    quantize,
    key,
    upgrade_manifest,
    completion,
)
"""Subcommand modules, in the order in which the help lists them."""


def make_parser() -> argparse.ArgumentParser:
    """Return the command-line parser. Each subcommand stores its entry function as `run`."""
    parser = argparse.ArgumentParser(
        prog="ullage",
        description="Language models that never run out of GPU memory.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ullage {VERSION}")

    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    commands.choices["completion"].set_defaults(root=parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status, which is 2 for an error that the user can fix.

    Args:
        arguments: command-line arguments without the program's name, or None to use those of
            this process.
    """
    parser = make_parser()
    options, unknown = parser.parse_known_args(arguments)
    try:
        if unknown and "refuse_unknown" in options:
            options.refuse_unknown(unknown)
        elif unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        status: int = options.run(options)
    except OperatorError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
