"""Writes and reads state.json, which records the addresses and process ids of a running service.

The file is read by scripts, and by commands that look for a service on this machine.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ullage_cli.local.ports import LOOPBACK
from ullage_cli.processes.pod_process import PodProcess
from ullage_operator.api.errors import LocalFailure

RUN_DIR_PREFIX = "ullage-"
"""Prefix of the temporary run directories that `ullage up` creates."""
STATE_FILE = "state.json"

State = dict[str, Any]
"""Content of a state file, as parsed JSON."""


def service_state(model: str, processes: Sequence[PodProcess], run_dir: Path) -> State:
    """Return the addresses and process ids of a running service.

    Args:
        model: name of the service's model.
        processes: the processes of the router and of the engines.
        run_dir: folder of the processes' logs.
    """
    router = next(p for p in processes if "http" in p.pod.ports)
    engines = [p for p in processes if p is not router]
    # A router has a port for probes only with TLS.
    scheme = "https" if "probe" in router.pod.ports else "http"

    return {
        "model": model,
        "run_dir": str(run_dir),
        "http_url": f"{scheme}://{_address(router, 'http')}",
        "grpc_target": _address(router, "grpc"),
        "metrics_url": _metrics_url(router),
        "router": {"pid": router.pid},
        "engines": [
            {
                "id": engine.pod.name,
                "workload": engine.pod.owner,
                "pid": engine.pid,
                "grpc_target": _address(engine, "grpc"),
                "metrics_url": _metrics_url(engine),
            }
            for engine in engines
        ],
    }


def _metrics_url(process: PodProcess) -> str:
    return f"http://{_address(process, 'metrics')}/metrics"


def _address(process: PodProcess, port_name: str) -> str:
    return f"{LOOPBACK}:{process.pod.ports[port_name]}"


def write_state(path: Path, state: State) -> None:
    """Write a state file atomically, so that a reader never sees a partial file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(state, indent=2), encoding="utf-8")
    temporary.replace(path)


def read_state(path: Path) -> State:
    """Return the content of a state file.

    Raises:
        OSError, ValueError: the file is gone, or is not JSON.
    """
    state: State = json.loads(path.read_text(encoding="utf-8"))
    return state


def running_folders() -> list[Path]:
    """Return the run directory of every `ullage up` that runs without --run-dir, newest first.

    Raises:
        LocalFailure: no such `ullage up` is running.
    """
    states = Path(tempfile.gettempdir()).glob(f"{RUN_DIR_PREFIX}*/{STATE_FILE}")
    folders = [path.parent for path in sorted(states, key=_modified, reverse=True)]
    if not folders:
        raise LocalFailure(
            "no ullage up runs here; pass the folder that it prints as logs with --logs, or a "
            "namespace of a cluster with --namespace"
        )
    return folders


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # the service has just ended
        return 0.0


def engines_of(folder: Path) -> list[Mapping[str, Any]]:
    """Return the engines in a run directory's state file (empty if the service just stopped)."""
    try:
        state = read_state(folder / STATE_FILE)
    except (OSError, ValueError):
        return []
    return list(state["engines"])
