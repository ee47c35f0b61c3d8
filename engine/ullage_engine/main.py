"""`ullage-engine`: serves one model until it receives SIGTERM or SIGINT."""

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec
import uvloop

from ullage_common.config.engine import EngineConfig, choose_engine, refusal_by_vllm
from ullage_common.process import logs
from ullage_common.process.config_file import ConfigError, read_file, warn_unknown
from ullage_common.process.cores import pin
from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.server.app import AppError, EngineApp, WorkerLaunch
from ullage_engine.server.health import RestartPolicy
from ullage_engine.server.supervisor import GaveUpError, WorkerCommand
from ullage_engine.server.worker_process import EndpointError, launch_env, vllm_env, worker_env

log = logging.getLogger("ullage.engine")

_WORKERS = {
    "native": ("ullage_engine.worker.main", worker_env),
    "vllm": ("ullage_engine.vllm_worker", vllm_env),
}
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")

EXAMPLES = """\
examples:
  ullage-engine --config engine.yaml
  ullage-engine --config engine.yaml --grpc-port 9100 --metrics-port 9190
  grpcurl -plaintext localhost:9000 ullage.headroom.v1.HeadroomService/GetHeadroom

SIGINT or SIGTERM lets running requests end; a second one does not wait for them.
exit status: 0 stopped, 1 workers kept dying, 2 wrong configuration or model
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the engine; the exit status."""
    options = _parser().parse_args(arguments)
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
    parser.add_argument("--version", action="version", version=f"ullage {version('ullage')}")
    return parser


def _config(options: argparse.Namespace) -> EngineConfig:
    config = read_file(options.config, EngineConfig)
    given = {name: getattr(options, name) for name in ("engine_id", "grpc_port", "metrics_port")}
    changes = {name: value for name, value in given.items() if value is not None}
    server = msgspec.structs.replace(config.server, **changes)
    return msgspec.structs.replace(config, server=server)


async def _serve(config: EngineConfig, config_path: Path) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    policy = RestartPolicy(step_deadline_s=config.limits.step_deadline)
    await EngineApp(config, _launch(config, config_path), policy).run(stop, hurry)


def _launch(config: EngineConfig, config_path: Path) -> WorkerLaunch:
    has_vllm = find_spec("vllm") is not None
    vllm_refusal = refusal_by_vllm(config.model, config.memory, config.adapters)
    name, reason = choose_engine(
        config.engine,
        on_cuda=_computes_on_cuda(config),
        has_vllm=has_vllm,
        native_refusal=_native_refusal(config) if config.engine == "auto" else "",
        vllm_refusal=vllm_refusal,
    )
    log.info("engine %s: %s", name, reason)
    if name == "vllm" and not has_vllm:
        raise AppError(
            "engine: vllm is asked for and not installed here; run make install-vllm, take an "
            "image that has it, or set engine: native"
        )
    if name == "native" and config.adapters:
        remedy = "set engine: vllm or remove them"
        if vllm_refusal:
            remedy = f"remove them, for vLLM refuses {vllm_refusal}"
        raise AppError(f"adapters: the native engine serves none; {remedy} ({reason})")
    if name == "native" and config.group.nodes > 1:
        raise AppError(
            f"group.nodes: the native engine computes on one node; set engine: vllm or nodes "
            f"of the pool to 1 ({reason})"
        )
    module, environment = _WORKERS[name]
    return WorkerLaunch(
        command=_command(module, config_path), environment=launch_env(config, environment)
    )


def _command(module: str, config_path: Path) -> WorkerCommand:
    base = [sys.executable, "-m", module, "--config", str(config_path)]
    return lambda endpoint: [*base, "--endpoint", endpoint]


def _computes_on_cuda(config: EngineConfig) -> bool:
    return config.device != "cpu" and _NVIDIA_DRIVER.is_dir()


def _native_refusal(config: EngineConfig) -> str:
    """Returns why the native engine does not serve a model; empty if it does, or if only its worker
    can say, as of what is not downloaded yet."""
    if config.adapters:
        return "it serves no adapters"
    source = config.model.source
    if source.startswith("hf://"):
        return ""
    try:
        files = resolve_source(source)
        if files.format == "directory":
            path = files.path / "config.json"
            read_model_config(HFConfig(path, json.loads(path.read_bytes())))
    except (OSError, ValueError):
        return ""
    except WeightsError as error:
        return str(error)
    return ""


def _fail(message: str, status: int) -> int:
    line = " ".join(message.split())  # a YAML error spans several
    print(f"error: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
