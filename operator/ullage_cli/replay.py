"""Runs the replay of a trace, and the measurement behind it, each in a process of its own.

The command never imports the engine or the router. It writes the configuration files that the
operator's plan would give to their pods, and passes their folder on.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ullage_cli.local.workloads import Manifest, pod_names, workloads
from ullage_cli.processes.state import STATE_FILE, running_folders
from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.spec import Service

MODULE = "ullage_replay.main"
EXPECTED_STATUSES = (0, 2, 130)
"""Exit statuses to pass on: success, an error that the process printed, and SIGINT."""


def replay(service: Service, objects: Sequence[Manifest], options: argparse.Namespace) -> int:
    """Replay a trace through a service's router and engines, and return the exit status.

    Args:
        service: the service.
        objects: the operator's plan for the service.
        options: options of `ullage plan`.

    Raises:
        LocalFailure: the plan has no engine, or the process crashed.
    """
    counts = {
        workload["metadata"]["name"]: len(pod_names(workload)) for workload in workloads(objects)
    }
    configs = {item["metadata"]["name"]: item["data"] for item in objects if "data" in item}
    router = yaml.safe_load(configs[naming.router_name(service.name)][naming.ROUTER_CONFIG])
    pools = [pool["name"] for pool in router["pools"]]

    with tempfile.TemporaryDirectory(prefix="ullage-replay-") as folder:
        # Sleeping pools and pools without engines are not replayed.
        running = [name for name in pools if counts[naming.pool_name(service.name, name)]]
        if not running:
            raise LocalFailure("no pool asks for an engine; set spec.replicas to 1 or more")
        router["pools"] = [pool for pool in router["pools"] if pool["name"] in running]
        Path(folder, "router.yaml").write_text(json.dumps(router), encoding="utf-8")
        arguments = ["replay", "--configs", folder]
        for name in running:
            owner = naming.pool_name(service.name, name)
            text = configs[owner][naming.ENGINE_CONFIG]
            Path(folder, f"{name}.yaml").write_text(text, encoding="utf-8")
            arguments += ["--pool", f"{name}={counts[owner]}"]

        arguments += ["--trace", str(options.trace), "--hardware", options.hardware]
        for option in ("ttft", "tpot"):
            if (seconds := getattr(options, option)) is not None:
                arguments += [f"--{option}", str(seconds)]
        return _run([*arguments, *(["--json"] if options.json else [])])


def measure(name: str, hardware: str) -> int:
    """Measure a service that `ullage up` runs here, and return the exit status.

    Args:
        name: the service's name.
        hardware: path of the file to write.

    Raises:
        LocalFailure: no such service runs here, or the process crashed.
    """
    state = _state_of(name)
    arguments = ["measure", "--router", state["grpc_target"], "--hardware", hardware]
    measured = set()
    for engine in state["engines"]:
        pool = engine["workload"].removeprefix(f"{name}-")
        if pool not in measured:
            measured.add(pool)
            arguments += ["--engine", f"{pool}={engine['grpc_target']}"]
    return _run(arguments)


def _state_of(name: str) -> dict[str, Any]:
    pattern = re.compile(f"{re.escape(name)}-[a-z0-9]+")
    workloads_here: list[str] = []
    for folder in running_folders():
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        owners = [engine["workload"] for engine in state["engines"]]
        if any(pattern.fullmatch(owner) for owner in owners):
            return state
        workloads_here += owners
    running = ", ".join(workloads_here) or "none"
    raise LocalFailure(
        f"--measure {name}: no engine of it runs here (running: {running}); start it with ullage up"
    )


def _run(arguments: list[str]) -> int:
    try:
        status = subprocess.run([sys.executable, "-m", MODULE, *arguments]).returncode
    except KeyboardInterrupt:
        return 130
    if status not in EXPECTED_STATUSES:
        raise LocalFailure(
            f"the replay ended with status {status} for the reason above; "
            "if a module is missing, install ullage[router,engine]"
        )
    return status
