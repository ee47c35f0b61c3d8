"""The command `ullage trace`, which reads logs and prints a request's history."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ullage_cli.processes.state import running_folders
from ullage_cli.trace.logs import logs_of_files, logs_of_pods
from ullage_cli.trace.steps import TraceStep, steps_of
from ullage_operator.api.errors import LocalFailure

HELP = """examples:
  ullage trace 8f14e45fceea167a5a36dedd4bea2543    logs of ullage up on this machine
  ullage trace my-id --logs ./run                  logs of ullage up --run-dir ./run
  ullage trace my-id --namespace prod              logs of a cluster, through kubectl logs
  ullage trace my-id --namespace prod --service chat --since 15m
  ullage trace my-id -o json | jq 'select(.event == "decided")'

Every answer and every error has the id in its header x-request-id. Clients may choose it.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage trace`."""
    parser = commands.add_parser(
        "trace",
        help="print the steps of one request from all logs",
        description="Print the steps of one request in router, engine and worker, with times.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="header x-request-id")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder of logs (default: of a running ullage up)"
    )
    parser.add_argument("-n", "--namespace", help="read the logs of pods there, with kubectl")
    parser.add_argument("--service", metavar="NAME", help="only pods of this LLMService")
    parser.add_argument(
        "--since", default="1h", metavar="TIME", help="maximum age of lines, such as 15m (1h)"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="(text)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the events of the request in chronological order.

    Raises:
        LocalFailure: no log mentions the request, or the logs cannot be read.
    """
    if options.logs and (options.namespace or options.service):
        raise LocalFailure("--logs and --namespace: give only one of them")

    if options.namespace or options.service:
        namespace = options.namespace or "default"
        logs = list(logs_of_pods(namespace, options.service, options.since))
        where = f"{len(logs)} logs of namespace {namespace}, of the last {options.since}"
    else:
        folders = [options.logs] if options.logs else running_folders()
        logs = [log for folder in folders for log in logs_of_files(folder)]
        where = f"{len(logs)} logs in {', '.join(map(str, folders))}"

    steps = steps_of(options.request_id, logs)
    if not steps:
        raise LocalFailure(
            f"request {options.request_id!r} is not in {where}; copy the id from the answer's "
            "header x-request-id, and check that observability.logLevel is Info or Debug"
        )

    try:
        if options.output == "json":
            for step in steps:
                print(json.dumps(step.as_json()))
        else:
            print("\n".join(_render(options.request_id, steps)))
    except BrokenPipeError:
        pass  # head has read enough
    return 0


def _render(request_id: str, steps: list[TraceStep]) -> Iterator[str]:
    """Format a request's steps as text, and yield it line by line."""
    first = steps[0].at
    yield f"request {request_id}, {first.isoformat(timespec='milliseconds')}"

    pod_width = max(len(step.pod) for step in steps)
    event_width = max(len(step.event) for step in steps)
    for step in steps:
        after_ms = max(0.0, (step.at - first).total_seconds() * 1000)
        details = "  ".join(f"{name}={_value(value)}" for name, value in step.fields.items())
        time = f"{after_ms:+11.1f} ms"
        place = f"{step.process:6}  {step.pod:{pod_width}}"
        yield f"{time}  {place}  {step.event:{event_width}}  {details}".rstrip()


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value if value and " " not in value else json.dumps(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
    return json.dumps(value, separators=(",", ":"))
