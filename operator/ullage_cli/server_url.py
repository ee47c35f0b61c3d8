"""Finds the server that a command calls: a URL, or an LLMService in kubectl's cluster."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from ullage_cli.port_forward import PortForward
from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure

ReportT = TypeVar("ReportT")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a server and its model to a parser."""
    parser.add_argument(
        "target", metavar="URL|SERVICE", help="base URL, or an LLMService with --namespace"
    )
    parser.add_argument("-n", "--namespace", help="namespace of the LLMService, through kubectl")
    parser.add_argument("--model", default="", help="name of the model (default: the first one)")
    parser.add_argument(
        "--context", type=tokens, default=0, metavar="TOKENS", help="if the server hides it"
    )
    parser.add_argument("--api-key", help="API key (default: $ULLAGE_API_KEY)")


def tokens(text: str) -> int:
    """Parse a number of tokens for argparse, whose errors show this function's name."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


@contextlib.contextmanager
def server_url(options: argparse.Namespace) -> Iterator[str]:
    """Yield the server's base URL. For an LLMService, forward a port during the block.

    Raises:
        LocalFailure: the LLMService has no namespace, or its router cannot be reached.
    """
    if "://" in options.target:
        yield options.target
        return
    if not options.namespace:
        raise LocalFailure(
            f"{options.target!r} is not a URL; give http://HOST:PORT, or an LLMService with "
            "--namespace"
        )
    router = f"deployment/{naming.router_name(options.target)}"
    with PortForward(options.namespace, router, naming.HTTP_PORT) as forward:
        yield forward.url()


def add_report_files(parser: argparse.ArgumentParser, picture: str) -> None:
    """Add the options --json, --markdown and --svg, which name the files to write a report to.

    Args:
        parser: the command's parser.
        picture: what the SVG file shows, for the help text, for example a curve.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write it as a table")
    parser.add_argument("--svg", type=Path, metavar="FILE", help=f"write it as a {picture}")


def check_report_files(options: argparse.Namespace) -> None:
    """Check that the reports of `add_report_files` can be written, before a long measurement.

    Raises:
        LocalFailure: a file's folder does not exist or refuses files, or the path is a folder.
    """
    for path in (options.json, options.markdown, options.svg):
        if path is None:
            continue
        if path.is_dir():
            raise LocalFailure(f"{path}: Is a directory; choose another file")
        if not path.parent.is_dir():
            raise LocalFailure(f"{path}: No such file or directory; choose another file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise LocalFailure(f"{path}: Permission denied; choose another file")


def write_reports(
    report: ReportT, forms: Sequence[tuple[Path | None, Callable[[ReportT], str]]]
) -> None:
    """Write a report in every format that has an output file.

    Raises:
        LocalFailure: a file cannot be written.
    """
    for path, form in forms:
        if path is None:
            continue
        try:
            path.write_text(form(report), encoding="utf-8")
        except OSError as error:
            raise LocalFailure(f"{path}: {error.strerror}; choose another file") from None
