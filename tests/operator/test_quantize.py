"""`ullage quantize` hands everything on to the engine's own command."""

import sys

import pytest

from ullage_operator.cli.main import main, make_parser
from ullage_operator.cli.quantize import quantize
from ullage_operator.errors import LocalFailure


def test_arguments_are_handed_on() -> None:
    given = ["quantize", "--model", "file:///m", "--format", "int8", "--output", "o", "-h"]
    assert make_parser().parse_args(given).arguments == given[1:]


def test_the_engines_help_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "--help"]) == 0
    shown = capfd.readouterr().out
    assert "--calibrate FILE" in shown
    assert "ullage quantize --model" in shown


def test_a_wrong_model_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    wanted = ["--model", "file:///nowhere", "--format", "int8", "--output", "/tmp/never-written"]
    assert main(["quantize", *wanted]) == 2
    error = capfd.readouterr().err.strip()
    assert error.startswith("error: model.source 'file:///nowhere'")
    assert "\n" not in error


def test_a_command_that_dies_is_explained() -> None:
    with pytest.raises(LocalFailure, match="status 3"):
        quantize([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(LocalFailure, match="cannot run"):
        quantize(["/nowhere/python"])
