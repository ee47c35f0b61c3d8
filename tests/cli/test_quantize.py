"""`ullage quantize` hands everything on to the engine's own command."""

import sys
from importlib.util import find_spec

import pytest

from ullage_cli.main import make_parser
from ullage_cli.quantize import MODULE, quantize
from ullage_operator.api.errors import LocalFailure


def test_arguments_are_handed_on() -> None:
    given = ["quantize", "--model", "file:///m", "--format", "int8", "--output", "o", "-h"]
    assert make_parser().parse_args(given).arguments == given[1:]
    assert find_spec(MODULE) is not None


def test_the_engines_own_status_is_that_of_the_command() -> None:
    for status in (0, 2, 143):
        assert quantize([sys.executable, "-c", f"raise SystemExit({status})"]) == status


def test_the_engine_is_told_to_end() -> None:
    """Of SIGTERM, so that it removes what is half written."""
    script = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""
    assert quantize([sys.executable, "-c", script]) == 143


def test_a_command_that_dies_is_explained() -> None:
    with pytest.raises(LocalFailure, match="status 3 for the reason above"):
        quantize([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(LocalFailure, match="by signal 9"):
        quantize([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    with pytest.raises(LocalFailure, match="cannot run"):
        quantize(["/nowhere/python"])
