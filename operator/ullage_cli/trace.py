"""`ullage trace`: prints one request's way, from the logs of all processes that handled it."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ullage_operator.api.errors import LocalFailure

HELP = """examples:
  ullage trace 8f14e45fceea167a5a36dedd4bea2543          of ullage up on this machine
  ullage trace my-id --logs ./run                       of ullage up --run-dir ./run
  ullage trace my-id --namespace prod                   of a cluster, through kubectl logs
  ullage trace my-id --namespace prod --service chat --since 15m
  ullage trace my-id -o json | jq 'select(.event == "decided")'

Every answer and every error has the id in its header x-request-id; clients may choose it.
"""
PART_OF = "app.kubernetes.io/part-of=ullage"
"""Label of all pods of Ullage."""
INSTANCE = "app.kubernetes.io/instance"
"""Name of the label whose value is a pod's LLMService."""
KUBECTL_S = 60.0
"""Longest time of one call of kubectl, seconds."""
READERS = 8
"""Number of pods whose logs are read at the same time."""

_PROCESSES = (
    ("ullage_router", "router"),
    ("ullage.engine.worker", "worker"),
    ("ullage.engine.group", "worker"),
    ("ullage.engine", "engine"),
)
"""Process by the start of the logger's name; the first match counts."""

_ORDER = (
    ("router", "arrived"),
    ("router", "tokenised"),
    ("router", "decided"),
    ("router", "queued"),
    ("router", "sent"),
    ("engine", "received"),
    ("worker", "admitted"),
    ("worker", "first_chunk"),
    ("worker", "preempted"),
    ("worker", "resumed"),
    ("engine", "resumed"),
    ("engine", "first_token"),
    ("router", "admitted"),
    ("router", "first_token"),
    ("worker", "finished"),
    ("engine", "finished"),
    ("router", "finished"),
)
"""Order of the events of one millisecond, since log lines have whole milliseconds."""
_PLACES = {key: place for place, key in enumerate(_ORDER)}

_HIDDEN = frozenset({"time", "level", "logger", "message", "request_id", "event", "process"})
"""Fields of log lines that are not shown, or have a column of their own."""
_IN_TIMELINE = frozenset({"decided", "resumed", "lost"})
"""Events of the router's log that the timeline in its last line has, too."""
_SUMMARY = (
    "status",
    "error",
    "finish",
    "model",
    "output_tokens",
    "cached_tokens",
    "ttft_s",
    "duration_s",
    "degraded",
    "trail",
    "retry_after_s",
    "coalesced_with",
    "tenant",
)
"""Fields of the router's last line that describe the request as a whole."""


class Log(NamedTuple):
    """Log lines of one pod's processes."""

    pod: str
    lines: Iterable[str]


class TraceStep(NamedTuple):
    """One event of the request in one process."""

    at: datetime
    process: str
    """router, engine (the server process) or worker; for other loggers, their name."""
    pod: str
    event: str
    fields: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `-o json` prints."""
        at = self.at.isoformat(timespec="microseconds").replace("+00:00", "Z")
        own = {"time": at, "process": self.process, "pod": self.pod, "event": self.event}
        return own | self.fields


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "trace",
        help="print one request's way from all logs",
        description="Prints what router, engine and worker did for one request, and when.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="header x-request-id")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder of logs (that of a running ullage up)"
    )
    parser.add_argument("-n", "--namespace", help="read the pods' logs there, by kubectl")
    parser.add_argument("--service", metavar="NAME", help="only pods of this LLMService")
    parser.add_argument(
        "--since", default="1h", metavar="TIME", help="how old a pod's lines may be, as 15m (1h)"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="(text)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the request's steps.

    Raises:
        LocalFailure: no log has the request, or logs cannot be read.
    """
    if options.logs and (options.namespace or options.service):
        raise LocalFailure("--logs and --namespace: give the one or the other")

    if options.namespace or options.service:
        cluster = options.namespace or "default"
        logs = list(of_pods(cluster, options.service, options.since))
        where = f"the logs of {len(logs)} pods of namespace {cluster}, of the last {options.since}"
    else:
        folders = [options.logs] if options.logs else local_folders()
        logs = [log for folder in folders for log in of_files(folder)]
        where = f"{len(logs)} logs in {', '.join(map(str, folders))}"

    steps = steps_of(options.request_id, logs)
    if not steps:
        raise LocalFailure(
            f"request {options.request_id!r} is not in {where}; copy the id from the answer's "
            "header x-request-id, and see that observability.logLevel is Info or Debug"
        )

    try:
        if options.output == "json":
            for step in steps:
                print(json.dumps(step.as_json()))
        else:
            print("\n".join(render(options.request_id, steps)))
    except BrokenPipeError:
        pass  # head has read enough
    return 0


def local_folders() -> list[Path]:
    """Return the folders of every running `ullage up` without --run-dir, newest first.

    Raises:
        LocalFailure: there is none.
    """
    states = Path(tempfile.gettempdir()).glob("ullage-*/state.json")
    folders = [path.parent for path in sorted(states, key=_modified, reverse=True)]
    if not folders:
        raise LocalFailure(
            "no ullage up runs here; name the folder that it prints as logs with --logs, or a "
            "namespace of a cluster with --namespace"
        )
    return folders


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it has just ended
        return 0.0


def of_files(folder: Path) -> list[Log]:
    """Return the logs in a folder, one for each pod.

    Raises:
        LocalFailure: the folder does not exist, or has no logs.
    """
    paths = sorted(folder.glob("*.log"))
    if not paths:
        problem = "has no *.log" if folder.is_dir() else "is no folder"
        raise LocalFailure(f"--logs {folder}: {problem}; ullage up prints its folder as logs")
    return [Log(path.stem, _lines_of(path)) for path in paths]


def _lines_of(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def of_pods(namespace: str, service: str | None, since: str) -> list[Log]:
    """Read the logs of a namespace's pods, including those of containers before their restart.

    Args:
        namespace: namespace of the pods.
        service: the pods' LLMService; None for all services.
        since: age of the oldest lines, as kubectl takes it, such as 1h.

    Raises:
        LocalFailure: kubectl is not here or fails for all pods, or there is no pod.
    """
    if shutil.which("kubectl") is None:
        raise LocalFailure("--namespace needs kubectl; install it, or give saved logs with --logs")

    labels = f"{PART_OF},{INSTANCE}={service}" if service else PART_OF
    listed = json.loads(_kubectl(namespace, "get", "pods", "-l", labels, "-o", "json"))
    pods = [_restarts_of(pod) for pod in listed["items"]]
    if not pods:
        raise LocalFailure(
            f"no pods with labels {labels} in namespace {namespace}; name the namespace of the "
            "LLMService with --namespace"
        )

    wanted: list[tuple[str, list[str]]] = []
    for name, restarts in pods:
        wanted.append((name, []))
        if restarts:
            wanted.append((name, ["--previous"]))
    print(f"reading the logs of {len(pods)} pods ...", file=sys.stderr)

    def read(one: tuple[str, list[str]]) -> Log | LocalFailure:
        name, flags = one
        command = ["logs", name, "--all-containers", f"--since={since}", *flags]
        try:
            return Log(name, _kubectl(namespace, *command).splitlines())
        except LocalFailure as failure:
            return failure

    with ThreadPoolExecutor(READERS) as readers:
        answers = list(readers.map(read, wanted))

    # A pod that starts has no log yet, and the log before a restart may be gone.
    failures = [each for each in answers if isinstance(each, LocalFailure)]
    if len(failures) == len(answers):
        raise failures[0]
    for failure in failures:
        print(f"left out: {failure}", file=sys.stderr)
    return [each for each in answers if isinstance(each, Log)]


def _restarts_of(pod: Mapping[str, Any]) -> tuple[str, int]:
    """Return a pod's name and the number of its containers' restarts."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return pod["metadata"]["name"], sum(status.get("restartCount", 0) for status in statuses)


def _kubectl(namespace: str, *arguments: str) -> str:
    command = ["kubectl", "--namespace", namespace, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=KUBECTL_S)
    except subprocess.TimeoutExpired:
        raise LocalFailure(f"{' '.join(command)}: no end after {KUBECTL_S:.0f} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise LocalFailure(f"{' '.join(command)}: {said}")
    return done.stdout


def steps_of(request_id: str, logs: Iterable[Log]) -> list[TraceStep]:
    """Return the steps of a request in order of time.

    The router's last line of a request has a timeline. Earlier lines of that router with the same
    events are left out.
    """
    steps: list[TraceStep] = []
    for log in logs:
        lines = [line for text in log.lines if (line := _parsed(text, request_id))]
        has_timeline = any("timeline" in line for line in lines)
        for line in lines:
            if "timeline" in line:
                steps += _timeline(line, log.pod)
            elif not (has_timeline and _is_in_timeline(line)):
                steps.append(_step(line, log.pod))
    return list(_merged(steps))


def _merged(steps: list[TraceStep]) -> Iterator[TraceStep]:
    """Yield the steps of all processes by time, and keep the order within each process.

    Times never decrease: log lines have whole milliseconds and a router's timeline has fractions,
    so a cause in the timeline may seem later than its effect in a log. The effect then gets the
    time of the cause.
    """
    waiting: dict[tuple[str, str], deque[TraceStep]] = defaultdict(deque)
    for step in sorted(steps, key=lambda step: step.at):
        waiting[step.pod, step.process].append(step)

    latest: datetime | None = None
    while waiting:
        process = min(waiting, key=lambda process: _order(waiting[process][0]))
        step = waiting[process].popleft()
        if not waiting[process]:
            del waiting[process]
        latest = max(step.at, latest or step.at)
        yield step._replace(at=latest)


def _order(step: TraceStep) -> tuple[datetime, int]:
    """Return the key that orders steps: the millisecond, then the place of the event in _ORDER."""
    millisecond = step.at.replace(microsecond=step.at.microsecond // 1000 * 1000)
    return millisecond, _PLACES.get((step.process, step.event), len(_ORDER))


def _parsed(text: str, request_id: str) -> dict[str, Any] | None:
    """Return a log line of the request; None for other lines and for text that is no log line."""
    # Far cheaper than parsing every line.
    if json.dumps(request_id, ensure_ascii=False)[1:-1] not in text:
        return None
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or line.get("request_id") != request_id:
        return None
    return line if isinstance(line.get("time"), str) else None


def _is_in_timeline(line: Mapping[str, Any]) -> bool:
    """Return whether the timeline of the router's last line has this line's event, too."""
    return _process(line) == "router" and line.get("event") in _IN_TIMELINE


def _process(line: Mapping[str, Any]) -> str:
    """Return the process that wrote a line; for an unknown logger, the logger's name."""
    logger = str(line.get("logger", ""))
    return next((name for start, name in _PROCESSES if logger.startswith(start)), logger)


def _step(line: dict[str, Any], pod: str) -> TraceStep:
    event = line.get("event") or line.get("message", "")
    at = datetime.fromisoformat(line["time"])
    fields = {name: value for name, value in line.items() if name not in _HIDDEN}
    if "exception" in line or line.get("level") in ("warning", "error"):
        fields = {"level": line["level"], "message": line["message"]} | fields
    return TraceStep(at, _process(line), pod, event, fields)


def _timeline(line: dict[str, Any], pod: str) -> Iterator[TraceStep]:
    """Yield the steps in the router's last line of a request."""
    arrived = float(line["arrived"])

    def at(seconds: float) -> datetime:
        return datetime.fromtimestamp(arrived + seconds, UTC)

    yield TraceStep(at(0.0), "router", pod, "arrived", {})

    for moment in line["timeline"]:
        fields = {
            name: value
            for name, value in moment.items()
            if name not in ("event", "after_s") and value not in (None, "")
        }
        yield TraceStep(at(moment["after_s"]), "router", pod, moment["event"], fields)

    fields = {name: line[name] for name in _SUMMARY if line.get(name) not in (None, "", [], {})}
    yield TraceStep(at(line["duration_s"]), "router", pod, line.get("event", "finished"), fields)


def render(request_id: str, steps: list[TraceStep]) -> Iterator[str]:
    """Yield the lines of the text output."""
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
