"""`ullage completion` prints a script that completes the command's words in a shell."""

import argparse
import sys

from ullage_operator.api.errors import LocalFailure

SHELLS = ("bash", "zsh", "fish")

HELP = """examples:
  bash:  echo 'eval "$(ullage completion bash)"' >> ~/.bashrc
  zsh:   ullage completion zsh > "${fpath[1]}/_ullage"     and start a new shell
  fish:  ullage completion fish > ~/.config/fish/completions/ullage.fish
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage completion`."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes words in a shell",
        description="Print a script that completes commands, options and their values in a shell.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the script. The parser of the whole command is in `options.root`.

    Raises:
        LocalFailure: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise LocalFailure("the package shtab is missing; pip install 'ullage[cli]'") from error

    mark_files(options.root)
    sys.stdout.write(shtab.complete(options.root, options.shell))
    return 0


def mark_files(parser: argparse.ArgumentParser) -> None:
    """Let arguments whose values are paths complete the names of files."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                mark_files(each)
        elif _is_path(action):
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def _is_path(action: argparse.Action) -> bool:
    """Return whether an argument takes a path, by its type or by the name of its value."""
    names = str(action.metavar or "")
    return getattr(action.type, "__name__", "") == "Path" or any(
        word in names for word in ("FILE", "SOURCE", "MODEL", "DIR")
    )
