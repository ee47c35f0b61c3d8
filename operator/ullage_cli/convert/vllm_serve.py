"""Converts a command line of `vllm serve`."""

from collections.abc import Sequence

from ullage_cli.manifest_draft import Draft, service_name
from ullage_cli.vllm_arguments import (
    POOL,
    multiply_by_data_ranks,
    read_tokens,
    set_model_name,
    set_reasoning_default,
    source_uri,
    translate,
)
from ullage_operator.api.errors import LocalFailure

MODULE = "vllm.entrypoints.openai.api_server"


def is_command(words: Sequence[str]) -> bool:
    """Return whether words are a command that starts vLLM's server."""
    return words[:1] == ["vllm"] or MODULE in words


def convert(words: Sequence[str]) -> Draft:
    """Return an LLMService that serves what a command serves.

    Raises:
        LocalFailure: the command names no model, or has a value that Ullage cannot serve.
    """
    rest = list(words)
    if MODULE in rest:
        rest = rest[rest.index(MODULE) + 1 :]
    else:
        rest = rest[1:]
        if rest[:1] != ["serve"]:
            raise LocalFailure(f"vllm {' '.join(rest[:1])}: only vllm serve can be converted")
        rest = rest[1:]

    positional, arguments = read_tokens(rest)
    named = [str(each.value) for each in arguments if each.name == "model"]
    # vLLM ignores the positional argument if --model is there, and the last --model counts.
    models = [*reversed(named), *positional]
    if not models:
        raise LocalFailure("vllm serve: names no model; write vllm serve ORG/NAME")

    draft = Draft(service_name(models[0]))
    draft.set("spec.model.source", source_uri(models[0]))
    set_model_name(draft, models[0])
    for text in models[1:]:
        draft.lose(text, "vllm serve takes one model")

    translate(draft, [each for each in arguments if each.name != "model"])
    multiply_by_data_ranks(draft)
    set_reasoning_default(draft)
    if draft.get(f"{POOL}.gpus") is None:
        draft.set(f"{POOL}.gpus", 1)
    return draft
