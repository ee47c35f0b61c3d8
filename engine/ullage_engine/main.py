"""The `ullage-engine` command, which serves one model until it receives SIGTERM or SIGINT."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import uvloop

from ullage_common import version
from ullage_common.config.engine import EngineConfig, choose_engine, refusal_by_vllm
from ullage_common.process import logs
from ullage_common.process.config_file import ConfigError, read_file, warn_unknown
from ullage_common.process.cores import pin
from ullage_common.process.stacks import dump_loop_on_signal, dump_on_signal
from ullage_engine.model_config.hf_config import read_config
from ullage_engine.model_config.registry import gguf_model_type, read_model_config
from ullage_engine.model_loader import fetch
from ullage_engine.model_loader.files import check_for_vllm
from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.server.app import AppError, ChooseLaunch, EngineApp
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.server_link import EndpointError
from ullage_engine.server.supervisor import GaveUpError, WorkerLaunch
from ullage_engine.server.worker_env import launch_env, vllm_env, worker_env
from ullage_engine.tokenizer.gguf_file import read_architecture

log = logging.getLogger("ullage.engine")

_WORKERS = {
    "native": ("ullage_engine.worker.main", worker_env),
    "vllm": ("ullage_engine.vllm_worker", vllm_env),
}
_FORK_SERVER = (sys.executable, "-m", "ullage_engine.worker.fork_server")
_INSTALL_VLLM = (
    "install it (make install-vllm; on Kubernetes an image that has it, as the chart's "
    "vllmEngineImage or as spec.image)"
)
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")

EXAMPLES = """\
examples:
  ullage-engine --config engine.yaml
  ullage-engine --config engine.yaml --grpc-port 9100 --metrics-port 9190
  ullage-engine fetch --source hf://org/name       fill the cache of a model, and end
  grpcurl -plaintext localhost:9000 ullage.headroom.v1.HeadroomService/GetHeadroom

SIGINT or SIGTERM lets running requests end; a second one does not wait for them.
exit status: 0 stopped, 1 workers kept dying, 2 wrong configuration or model
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engine or fetch a model, and return the exit status."""
    dump_on_signal()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["fetch"]:
        return fetch.main(given[1:])
    options = _parser().parse_args(given)
    try:
        config = _config(options)
        logs.configure(config.server.log_level)
        warn_unknown(options.config, config)
        if config.server.cores:
            pin(config.server.cores)
        uvloop.run(_serve(config, options.config))
    except (ConfigError, AppError, EndpointError) as error:
        return _fail(str(error), 2)
    except GaveUpError as error:
        return _fail(str(error), 1)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ullage-engine",
        description="Serve one model over gRPC within a fixed memory budget.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="configuration file, YAML")
    parser.add_argument("--engine-id", help="instead of server.engine_id")
    parser.add_argument("--grpc-port", type=int, help="instead of server.grpc_port")
    parser.add_argument("--metrics-port", type=int, help="instead of server.metrics_port")
    parser.add_argument("--version", action="version", version=f"ullage {version()}")
    return parser


def _config(options: argparse.Namespace) -> EngineConfig:
    config = read_file(options.config, EngineConfig)
    given = {name: getattr(options, name) for name in ("engine_id", "grpc_port", "metrics_port")}
    changes = {name: value for name, value in given.items() if value is not None}
    server = msgspec.structs.replace(config.server, **changes)
    return msgspec.structs.replace(config, server=server)


async def _serve(config: EngineConfig, config_path: Path) -> None:
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    policy = RestartPolicy.for_engine(config.device, config.limits.step_deadline)
    app = EngineApp(config, _launch(config, config_path), policy)
    dump_loop_on_signal(app.worker_pids)
    await app.run(stop, hurry)


def _launch(config: EngineConfig, config_path: Path) -> ChooseLaunch:
    """Return a function that chooses between the native engine and vLLM for a model's files.

    The function is called once the files are available, and returns how to start the worker.

    Raises:
        AppError: no installed engine supports these settings for any model.
    """
    has_vllm = find_spec("vllm") is not None
    choose = partial(
        choose_engine,
        config.engine,
        on_cuda=_computes_on_cuda(config),
        has_vllm=has_vllm,
        vllm_refusal=refusal_by_vllm(config.model, config.memory),
    )
    refused_settings = _native_refusal_of_settings(config)
    _check_settings(config, choose(native_refusal=refused_settings)[0], has_vllm)

    def launch(files: ModelFiles) -> WorkerLaunch:
        refusal = ""
        if config.engine != "vllm":
            refusal = _native_refusal(files, allows_unknown=config.model.allow_unknown_config)
        name, reason = choose(native_refusal=refused_settings or refusal)
        if name == "native" and refusal:
            raise AppError(f"{refusal}; or {_with_vllm(config, has_vllm)}")
        if name == "vllm":
            check_for_vllm(files, config.vllm.args)
        log.info("engine %s: %s", name, reason)
        if name == "native" and config.server.standby_worker:
            log.info("server.standby_worker has no effect: native workers start without imports")
        if name == "native":
            _check_kernel()
        module, environment = _WORKERS[name]
        return WorkerLaunch(
            program=(sys.executable, "-m", module),
            options=lambda endpoint: ["--config", str(config_path), "--endpoint", endpoint],
            environment=launch_env(config, environment),
            fork_server=_FORK_SERVER if name == "native" else (),
            model_source=config.model.source,
            uses_tiers=name == "native" or _vllm_uses_tiers(config),
        )

    return launch


def _vllm_uses_tiers(config: EngineConfig) -> bool:
    """Return whether every rank can access the host tier, which vLLM needs to store KV there."""
    is_reached = config.parallelism.pipeline == 1 and config.group.nodes == 1
    if not is_reached and config.memory.tiers.host.size != 0:
        log.info("memory.tiers: with vLLM KV stays on devices of several stages or nodes")
    return is_reached


def _check_settings(config: EngineConfig, name: str, has_vllm: bool) -> None:
    """Raise an error if the chosen engine is not installed or cannot use these settings."""
    if name == "vllm" and not has_vllm:
        only_vllm = _native_refusal_of_settings(config)
        native = "" if only_vllm else ", or set engine: native (spec.engine: Native)"
        raise AppError(f"engine: vllm is asked for and not installed here; {_INSTALL_VLLM}{native}")
    if name == "native" and config.max_loras:
        raise AppError(
            "adapters: the native engine serves none; remove them, or "
            f"{_with_vllm(config, has_vllm)}"
        )
    if name == "native" and config.group.nodes > 1:
        raise AppError(
            "group.nodes: the native engine computes on one node; set nodes of the pool to 1, or "
            f"{_with_vllm(config, has_vllm)}"
        )


def _check_kernel() -> None:
    """Raise an error if processes cannot be watched by pidfd, as the fork server needs."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise AppError(
            f"the native engine needs the system call pidfd_open ({error.strerror}); use Linux 5.3 "
            "or newer, and a container runtime whose seccomp profile allows the call"
        ) from error


def _with_vllm(config: EngineConfig, has_vllm: bool) -> str:
    """Return advice to use vLLM instead, for error messages about the native engine.

    If vLLM does not support the settings either, the advice says what to change.
    """
    if refusal := refusal_by_vllm(config.model, config.memory):
        return f"change what vLLM refuses: {refusal}"
    setting = "set engine: vllm (spec.engine: VLLM)"
    return setting if has_vllm else f"{setting} and {_INSTALL_VLLM}"


def _computes_on_cuda(config: EngineConfig) -> bool:
    return config.device != "cpu" and _NVIDIA_DRIVER.is_dir()


def _native_refusal_of_settings(config: EngineConfig) -> str:
    """Return the reason why the native engine does not support these settings, or ""."""
    if config.max_loras:
        return "it serves no adapters"
    return "it computes on one node" if config.group.nodes > 1 else ""


def _native_refusal(files: ModelFiles, *, allows_unknown: bool) -> str:
    """Return the reason why the native engine does not support a model, or "".

    Raises:
        WeightsError: if config.json is missing or is not a JSON object.
    """
    if files.format == "directory":
        config = read_config(files.path, allows_unknown=allows_unknown)
    try:
        if files.format == "directory":
            read_model_config(config)
        else:
            gguf_model_type(files.path, read_architecture(files.path))
    except WeightsError as error:
        return str(error)
    return ""


def _fail(message: str, status: int) -> int:
    line = " ".join(message.split())  # a YAML error spans several
    print(f"error: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
