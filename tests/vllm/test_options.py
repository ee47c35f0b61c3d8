"""The names of vLLM's options that the command knows, against vLLM itself."""

import dataclasses

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ullage_cli.vllm_options import (
    ENGINE_SWITCHES,
    ENGINE_VALUES,
    LIST_OPTIONS,
    SERVER_SWITCHES,
    SERVER_VALUES,
    SHORT_OPTIONS,
)


def own_names(kind: type) -> set[str]:
    """The names of a dataclass's public fields."""
    return {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}


def test_all_options_of_vllm_are_known() -> None:
    known = ENGINE_SWITCHES | ENGINE_VALUES | SERVER_SWITCHES | SERVER_VALUES
    assert own_names(AsyncEngineArgs) - known == set()
    assert own_names(FrontendArgs) - known == set()


def test_options_of_the_engine_are_those_of_vllm() -> None:
    assert own_names(AsyncEngineArgs) >= ENGINE_SWITCHES | ENGINE_VALUES


def test_switches_take_no_value() -> None:
    for field in dataclasses.fields(AsyncEngineArgs):
        if field.name in ENGINE_VALUES:
            assert field.default is not True, field.name


def test_options_with_several_values_are_those_of_vllm() -> None:
    actions = make_arg_parser(FlexibleArgumentParser())._actions
    assert {each.dest for each in actions if each.nargs == "+"} == LIST_OPTIONS


def test_short_options_are_those_of_vllm() -> None:
    actions = make_arg_parser(FlexibleArgumentParser())._actions
    short = {
        option.removeprefix("-"): each.dest
        for each in actions
        for option in each.option_strings
        if not option.startswith("--")
    }
    del short["h"]
    # vLLM's parser expands -O before argparse sees it.
    assert short | {"O": "optimization_level"} == SHORT_OPTIONS
