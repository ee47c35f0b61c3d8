"""Translates the options of `vllm serve` to fields of an LLMService.

Options with a field of their own set it. Arguments of vLLM's engine without one go to
`spec.vllm.args`, which only vLLM reads. All other options are lost, each with an explanation.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ullage_cli.manifest_draft import Draft, model_name
from ullage_cli.vllm_options import (
    ENGINE_SWITCHES,
    ENGINE_VALUES,
    LIST_OPTIONS,
    SERVER_SWITCHES,
    SERVER_VALUES,
    SHORT_OPTIONS,
)
from ullage_common.config.engine import OWNED_VLLM_ARGS
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.parsing import in_api_names

POOL = "spec.pools.single"
"""Path of the pool that takes the options about ranks and replicas."""

SWITCHES = ENGINE_SWITCHES | SERVER_SWITCHES
ENGINE_OPTIONS = ENGINE_SWITCHES | ENGINE_VALUES
OPTIONS = SWITCHES | ENGINE_OPTIONS | SERVER_VALUES

DEFAULT_LORA_RANK = 16
_FITTING_LENGTHS = ("auto", "-1")
"""Values of vLLM's `max_model_len` that stand for the longest one that fits."""
_CHUNK = "spec.batching.prefillChunkTokens"
_WITHOUT_CHUNKS = "chunked prefill is off, so steps have no limit of tokens"
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30}
_OPTIMIZATION = re.compile(r"-O\.?(\d)")
"""Matches vLLM's short form of --optimization-level, whose value is not a token of its own."""
_READABLE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMG])")


@dataclass(frozen=True, slots=True)
class Argument:
    """One option of `vllm serve`, as it was written."""

    name: str
    """Name of vLLM's argument, such as max_model_len."""
    value: Any
    """Text, a list of texts, True or False for a switch, or a value from YAML."""
    spelling: str
    """The option as it was written, for messages. Contains no value."""


class ArgumentFailure(LocalFailure):
    """An option has a value that Ullage cannot serve."""


def read_tokens(tokens: Sequence[str]) -> tuple[list[str], list[Argument]]:
    """Return the positional arguments and the options of a command line.

    Options with several values get a list. Unknown options take one value, if the next token is not
    an option.
    """
    positional: list[str] = []
    arguments: list[Argument] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if not token.startswith("-") or token == "-":
            positional.append(token)
            continue

        if level := _OPTIMIZATION.fullmatch(token):
            arguments.append(Argument("optimization_level", level[1], "-O"))
            continue
        spelling, equals, value = token.partition("=")
        name, is_on = _name_of(spelling)
        if equals:
            arguments.append(Argument(name, value, spelling))
            continue
        if name in SWITCHES or not is_on:
            arguments.append(Argument(name, is_on, spelling))
            continue

        end = index
        most = len(tokens) if name in LIST_OPTIONS else index + 1
        while end < min(most, len(tokens)) and not _is_option(tokens[end]):
            end += 1
        values = list(tokens[index:end])
        index = end
        arguments.append(Argument(name, _only(values), spelling))

    return positional, arguments


def _is_option(token: str) -> bool:
    return token.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", token)


def _only(values: list[str]) -> Any:
    """Return the only value, all of several values, or True if there is none."""
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def _name_of(spelling: str) -> tuple[str, bool]:
    """Return vLLM's name of an option, and False if the option turns a switch off."""
    name = spelling.lstrip("-").replace("-", "_")
    if not spelling.startswith("--"):
        return SHORT_OPTIONS.get(name, name), True
    if name.startswith("no_") and name.removeprefix("no_") in SWITCHES:
        return name.removeprefix("no_"), False
    return name, True


def from_mapping(values: Mapping[str, Any]) -> list[Argument]:
    """Return the options that a mapping of names to values stands for, such as a YAML section."""
    return [Argument(name.replace("-", "_"), value, f"--{name}") for name, value in values.items()]


def translate(draft: Draft, arguments: Sequence[Argument]) -> None:
    """Set the fields of a draft that options stand for, and record the options that are lost.

    Raises:
        ArgumentFailure: an option has a value that has no counterpart, although its field exists.
    """
    for argument in arguments:
        section = argument.name.partition(".")[0]
        if section != argument.name and section in OPTIONS:
            draft.lose(argument.spelling, f"write its section in full: --{_dashed(section)} JSON")
        elif setter := _SETTERS.get(argument.name):
            setter(draft, argument)
        elif argument.name in OWNED_VLLM_ARGS:
            draft.lose(argument.spelling, f"set {in_api_names(OWNED_VLLM_ARGS[argument.name])}")
        elif argument.name in ENGINE_OPTIONS:
            _set_engine_argument(draft, argument)
        elif argument.name in _ELSEWHERE:
            draft.lose(argument.spelling, _ELSEWHERE[argument.name])
        elif argument.name in OPTIONS:
            draft.lose(argument.spelling, "it belongs to vLLM's HTTP server; Ullage has its own")
        else:
            draft.lose(argument.spelling, "vLLM has no such option; check its spelling")

    _count_gpus(draft)
    _set_ranks_of_adapters(draft)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def counterpart(name: str) -> str:
    """Return which field does what an option of `vllm serve` does, in one line.

    Args:
        name: name of vLLM's argument, such as max_loras.
    """
    if owned := OWNED_VLLM_ARGS.get(name):
        field = f"set {in_api_names(owned)}"
        return f"in a manifest, {field}" if "nothing" not in owned else owned
    if name in ENGINE_OPTIONS:
        return f"in a manifest, set spec.vllm.args.{name}"
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if name in OPTIONS:
        return "it belongs to vLLM's HTTP server; Ullage has its own"
    return "neither Ullage nor vLLM has this option; see ullage serve --help"


def dtype(text: str) -> str:
    """Return the value of `model.dtype` for vLLM's spelling."""
    names = {
        "auto": "Auto",
        "half": "Float16",
        "float16": "Float16",
        "bfloat16": "BFloat16",
        "float": "Float32",
        "float32": "Float32",
    }
    return _chosen("dtype", text, names)


def quantization(text: str) -> str:
    """Return the value of `model.quantization` for vLLM's or Ullage's spelling."""
    names = {each.lower(): each for each in ("Auto", "None", "Int8", "Int4", "FP8", "W8A8")}
    if text.lower() in _CHECKPOINT_METHODS:
        return "Auto"
    return _chosen("quantization", text, names)


_CHECKPOINT_METHODS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4")
"""Values of vLLM's `quantization` that only say what the checkpoint says itself."""


def kv_dtype(text: str) -> str:
    """Return the value of `model.kvDtype` for vLLM's spelling."""
    return _chosen("kv-cache-dtype", text, {"auto": "Auto", "fp8": "FP8", "fp8_e4m3": "FP8"})


def readable_int(text: str) -> int:
    """Parse a whole number such as 8192, 8k (8000) or 8K (8192), as vLLM does."""
    if match := _READABLE.fullmatch(text):
        return int(float(match[1]) * _UNITS[match[2]])
    try:
        return int(text)
    except ValueError:
        raise ArgumentFailure(f"{text!r} is not a whole number; write 8192, 8k or 8K") from None


def threshold_percent(text: str) -> int:
    """Return `memory.thresholdPercent` for vLLM's share of a GPU's memory, such as 0.9."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    # Rounding up would use memory that the source leaves free; 0.29 * 100 is slightly below 29.
    percent = math.floor(round(share * 100, 6))
    if not 1 <= percent <= 100:
        raise ArgumentFailure(
            f"--gpu-memory-utilization {text}: not a share of memory; use 0.01 to 1, such as 0.85"
        )
    return percent


def _chosen(option: str, text: str, names: Mapping[str, str]) -> str:
    value = names.get(str(text).lower())
    if value is None:
        raise ArgumentFailure(f"--{option} {text}: not served; use one of {', '.join(names)}")
    return value


def source_uri(text: str) -> str:
    """Return the URI of a model that may be a bare name: a repository of the hub, or a path.

    Paths are those of the machine or container that serves, so nothing looks for them here.
    """
    if "://" in text:
        return text
    if text.startswith("/"):
        return f"file://{text}"
    return f"hf://{text}"


def _count_gpus(draft: Draft) -> None:
    ranks = draft.get(f"{POOL}.parallelism")
    if ranks:
        count = ranks.setdefault("tensor", 1) * ranks.setdefault("pipeline", 1)
        draft.set(f"{POOL}.gpus", count)


def _text(argument: Argument) -> str:
    """Return the value as text, or raise an error if the option has no value.

    Raises:
        ArgumentFailure: the option has no value, or several.
    """
    if isinstance(argument.value, bool | list | dict) or argument.value is None:
        raise ArgumentFailure(f"{argument.spelling}: needs one value")
    return str(argument.value)


def _is_off(argument: Argument) -> bool:
    return argument.value in (False, "false", "False")


def _field(path: str, convert: Callable[[str], Any], reason: str = "") -> "Setter":
    def setter(draft: Draft, argument: Argument) -> None:
        draft.set(path, convert(_text(argument)), reason)

    return setter


def _set_engine_argument(draft: Draft, argument: Argument) -> None:
    value = argument.value
    if isinstance(value, str) and argument.name not in _TEXTS:
        value = _parsed(value)
    if argument.name in LIST_OPTIONS:
        values = value if isinstance(value, list) else [value]
        value = [_parsed(each) if isinstance(each, str) else each for each in values]
    draft.set(f"spec.vllm.args.{argument.name}", value)
    draft.set("spec.engine", "VLLM", "only vLLM reads spec.vllm.args")


def _parsed(text: str) -> Any:
    """Return the value that text stands for in JSON or YAML, or else the text itself."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


_TEXTS = frozenset({"hf_config_path", "tokenizer_mode", "load_format", "otlp_traces_endpoint"})


def _set_model(draft: Draft, argument: Argument) -> None:
    draft.set("spec.model.source", source_uri(_text(argument)))


def _set_names(draft: Draft, argument: Argument) -> None:
    names = argument.value if isinstance(argument.value, list) else [_text(argument)]
    draft.reasons.pop("spec.model.name", None)
    draft.set("spec.model.name", str(names[0]))
    for name in names[1:]:
        draft.lose(f"{argument.spelling} {name}", "a model has one name; clients use the first")


def _set_revision(draft: Draft, argument: Argument) -> None:
    source = draft.get("spec.model.source") or ""
    if not source.startswith("hf://"):
        draft.lose(argument.spelling, "only models of the hub have revisions")
        return
    draft.set("spec.model.source", f"{source.partition('@')[0]}@{_text(argument)}")


def _set_length(draft: Draft, argument: Argument) -> None:
    text = _text(argument)
    if text.lower() in _FITTING_LENGTHS:
        draft.lose(
            f"{argument.spelling} {text}",
            "left out, so the limit is the model's own; ullage serve --print finds one that fits",
        )
        return
    draft.set("spec.model.maxModelLen", readable_int(text))


def _set_quantization(draft: Draft, argument: Argument) -> None:
    text = _text(argument)
    if text.lower() == "gguf":
        draft.lose(f"{argument.spelling} {text}", "left out, because the file itself says so")
        return
    value = quantization(text)
    reason = ""
    if text.lower() in _CHECKPOINT_METHODS:
        reason = f"the checkpoint declares {text} itself"
    draft.set("spec.model.quantization", value, reason)


def set_reasoning_default(draft: Draft) -> None:
    """Leave thoughts in the text, as vLLM does, if the source names no parser of them."""
    if draft.get("spec.prompts.reasoning") is None:
        reason = "without --reasoning-parser, thoughts stay in content; write Auto to split them"
        draft.set("spec.prompts.reasoning", "None", reason)


def set_model_name(draft: Draft, text: str) -> None:
    """Set the name by which clients request a model, with a reason if it is not the given text."""
    name = model_name(text)
    reason = "" if name == text else f"vLLM's clients request it as {text}; they need this name"
    draft.set("spec.model.name", name, reason)


def _set_data_ranks(draft: Draft, argument: Argument) -> None:
    draft.data_ranks = readable_int(_text(argument))


def multiply_by_data_ranks(draft: Draft) -> None:
    """Multiply the numbers of engines by that of data-parallel ranks. Call this once, at the end.

    Raises:
        ArgumentFailure: there is no rank, or ranks would share the expert layers.
    """
    ranks = draft.data_ranks
    if ranks < 1:
        raise ArgumentFailure(f"data-parallel size {ranks}: not positive; write 1 or more")
    if ranks == 1:
        return
    if draft.get("spec.vllm.args.enable_expert_parallel"):
        raise ArgumentFailure(
            f"expert parallelism over {ranks} data-parallel ranks: each engine of Ullage needs the "
            "whole model; leave data parallelism out, and raise tensor parallelism until the "
            "experts fit into one engine"
        )

    reason = f"each of {ranks} data-parallel ranks becomes an engine of its own"
    draft.set("spec.replicas", int(draft.get("spec.replicas") or 1) * ranks, reason)
    scaling = draft.get(f"{POOL}.autoscaling")
    if scaling:
        numbers = {name: scaling[name] * ranks for name in ("minReplicas", "maxReplicas")}
        draft.set(f"{POOL}.autoscaling", scaling | numbers, reason)


def _set_threshold(draft: Draft, argument: Argument) -> None:
    draft.set(
        "spec.memory.thresholdPercent",
        threshold_percent(_text(argument)),
        "gpu_memory_utilization; Ullage also keeps memory.safetyReserve (2Gi) free below it",
    )


def _set_chunk(draft: Draft, argument: Argument) -> None:
    tokens = readable_int(_text(argument))
    if draft.get(_CHUNK) == 0:
        draft.lose(argument.spelling, _WITHOUT_CHUNKS)
        return
    draft.set(
        _CHUNK,
        tokens,
        "max_num_batched_tokens counts prompts and decodes; this field counts prompts only",
    )


def _set_chunked(draft: Draft, argument: Argument) -> None:
    if not _is_off(argument):
        return
    if draft.get(_CHUNK):
        draft.lose("max_num_batched_tokens", _WITHOUT_CHUNKS)
    draft.set(_CHUNK, 0, "0 turns chunked prefill off")


def _set_prefix_cache(draft: Draft, argument: Argument) -> None:
    draft.set("spec.memory.prefixCache", not _is_off(argument))


def _set_lora(draft: Draft, argument: Argument) -> None:
    if _is_off(argument):
        draft.set("spec.memory.maxLoras", 0)
    elif draft.get("spec.memory.maxLoras") is None:
        draft.set(
            "spec.memory.maxLoras", 1, "vLLM's default for max_loras; only vLLM serves adapters"
        )


def _set_adapters(draft: Draft, argument: Argument) -> None:
    values = argument.value if isinstance(argument.value, list) else [argument.value]
    adapters = list(draft.get("spec.adapters") or ())
    for value in values:
        name, path = _adapter(value, argument)
        adapters.append({"name": name, "source": source_uri(path), "rank": 0})
    draft.set("spec.adapters", adapters, "each rank is the highest allowed one; write its own rank")


def _adapter(value: Any, argument: Argument) -> tuple[str, str]:
    parsed = value
    if isinstance(value, str) and value.startswith("{"):
        parsed = _parsed(value)
    if isinstance(parsed, dict) and {"name", "path"} <= parsed.keys():
        return str(parsed["name"]), str(parsed["path"])
    name, equals, path = str(value).partition("=")
    if not equals:
        raise ArgumentFailure(f"{argument.spelling} {value}: write NAME=PATH")
    return name, path


def _set_cors(draft: Draft, argument: Argument) -> None:
    value = _parsed(argument.value) if isinstance(argument.value, str) else argument.value
    draft.set("spec.router.cors.allowedOrigins", value)


_REASONING = {
    "deepseek_r1": "Think",
    "qwen3": "Think",
    "glm45": "Think",
    "mistral": "Mistral",
    "granite": "Granite",
}


def _set_reasoning(draft: Draft, argument: Argument) -> None:
    text = _text(argument)
    value = _REASONING.get(text, "Auto")
    reason = "" if text in _REASONING else f"for vLLM's {text}: found from the chat template"
    draft.set("spec.prompts.reasoning", value, reason)


def _set_tracing(draft: Draft, argument: Argument) -> None:
    draft.set("spec.observability.tracing.endpoint", _text(argument))


Setter = Callable[[Draft, Argument], None]

_SETTERS: Mapping[str, Setter] = {
    "model": _set_model,
    "served_model_name": _set_names,
    "revision": _set_revision,
    "dtype": _field("spec.model.dtype", dtype),
    "quantization": _set_quantization,
    "kv_cache_dtype": _field("spec.model.kvDtype", kv_dtype),
    "max_model_len": _set_length,
    "tensor_parallel_size": _field(f"{POOL}.parallelism.tensor", readable_int),
    "pipeline_parallel_size": _field(f"{POOL}.parallelism.pipeline", readable_int),
    "data_parallel_size": _set_data_ranks,
    "nnodes": _field(f"{POOL}.nodes", readable_int),
    "gpu_memory_utilization": _set_threshold,
    "kv_cache_memory_bytes": _field("spec.memory.maxKV", readable_int),
    "max_num_seqs": _field("spec.batching.maxSequences", readable_int),
    "max_num_batched_tokens": _set_chunk,
    "enable_chunked_prefill": _set_chunked,
    "enable_prefix_caching": _set_prefix_cache,
    "enable_lora": _set_lora,
    "max_loras": _field("spec.memory.maxLoras", readable_int),
    "max_lora_rank": _field("spec.memory.maxLoraRank", readable_int),
    "lora_modules": _set_adapters,
    "allowed_origins": _set_cors,
    "reasoning_parser": _set_reasoning,
    "otlp_traces_endpoint": _set_tracing,
}
"""Functions that set the field of an option, by the name of vLLM's argument."""

_PORTS = "the router's Service has the ports 8000 and 9000 (spec.router.service)"
_TLS = "put the files into a Secret, and name it in spec.tls.router.secretName"
_TOOLS = "the router finds the format of tool calls from the model's chat template"
_TEMPLATE = "put the template into the model's folder, as chat_template.jinja"
_LOGS = "the router's logs have spec.observability.logLevel"

_ELSEWHERE: Mapping[str, str] = {
    "host": _PORTS,
    "port": _PORTS,
    "grpc_port": _PORTS,
    "uds": _PORTS,
    "api_key": "make keys with ullage key new, and name their Secret in spec.tenants.secretName",
    "ssl_keyfile": _TLS,
    "ssl_certfile": _TLS,
    "ssl_ca_certs": _TLS,
    "ssl_cert_reqs": _TLS,
    "enable_auto_tool_choice": _TOOLS,
    "tool_call_parser": _TOOLS,
    "tool_parser_plugin": _TOOLS,
    "chat_template": _TEMPLATE,
    "default_chat_template_kwargs": "send chat_template_kwargs with each request",
    "uvicorn_log_level": _LOGS,
    "enable_log_requests": _LOGS,
    "disable_log_requests": "the router logs no prompts",
    "config": "convert the options in this file, too",
    "api_server_count": "spec.router.replicas is the number of routers",
}
"""Explanations of options without a counterpart that a translation could set."""


def _set_ranks_of_adapters(draft: Draft) -> None:
    """Set the ranks of adapters, which vLLM reads from files, to the highest allowed rank."""
    adapters = draft.get("spec.adapters") or ()
    rank = draft.get("spec.memory.maxLoraRank") or DEFAULT_LORA_RANK
    for adapter in adapters:
        adapter["rank"] = adapter["rank"] or rank
