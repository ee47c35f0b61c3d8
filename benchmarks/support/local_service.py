"""Runs `ullage up` with SmolLM2 and tiers of KV memory."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import grpc
import psutil
import yaml

from benchmarks.support.one_engine import MODEL, WORKERS
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/smollm2.yaml"
STOP_S = 60.0
DEVICE_MIB = 1500
TOKEN_BYTES = 23_040
"""KV bytes of one token of SmolLM2-135M in bfloat16."""
FIGURE = re.compile(r"^(ullage_\w+)\{(.*)\} (\S+)$", re.M)
TIER = re.compile(r'tier="(\w+)"')


@dataclass(frozen=True)
class Service:
    """A running service. Engines are numbered from 0."""

    process: subprocess.Popen[bytes]
    state: dict[str, Any]

    @property
    def target(self) -> str:
        return str(self.state["grpc_target"])

    @property
    def url(self) -> str:
        return str(self.state["http_url"])

    def server_pid(self, number: int) -> int:
        return int(self.state["engines"][number]["pid"])

    def worker_pid(self, number: int) -> int | None:
        for child in psutil.Process(self.server_pid(number)).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if WORKERS & set(child.cmdline()):
                    return int(child.pid)
        return None

    def figures(self, number: int) -> dict[str, float]:
        """Return an engine's metrics by name, or by `name/tier`, summed over all other labels."""
        url = self.state["engines"][number]["metrics_url"]
        with urllib.request.urlopen(url, timeout=30) as response:
            text = response.read().decode()
        sums: dict[str, float] = {}
        for name, labels, value in FIGURE.findall(text):
            tier = TIER.search(labels)
            key = f"{name}/{tier[1]}" if tier else name
            sums[key] = sums.get(key, 0.0) + float(value)
        return sums


def start(
    manifest: Path,
    state_file: Path,
    log: IO[bytes] | None = None,
    within: Callable[[Sequence[str]], list[str]] = list,
) -> tuple[subprocess.Popen[bytes], float]:
    """Start `ullage up`, and return its process and the seconds until it was ready.

    The service stops when its standard input ends, so that a killed benchmark leaves none behind.

    Args:
        manifest: file with the service.
        state_file: file that the service writes once it is ready.
        log: file for the service's log, or None for this process's standard error.
        within: returns a command that runs the given one, such as in a container.
    """
    command = [sys.executable, "-m", "ullage_cli.main", "up", "-f", str(manifest)]
    command += ["--http-port", "0", "--grpc-port", "0", "--state-file", str(state_file)]
    command.append("--until-eof")
    started = time.monotonic()
    service = subprocess.Popen(
        within(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log
    )
    while not state_file.exists():
        if service.poll() is not None:
            raise SystemExit(f"error: ullage up exited with status {service.returncode}")
        time.sleep(0.02)
    return service, time.monotonic() - started


@contextlib.asynccontextmanager
async def service_up(
    folder: Path,
    max_kv: str,
    tiers: dict[str, Any],
    is_deterministic: bool = False,
    batching: Mapping[str, Any] = {},
) -> AsyncIterator[Service]:
    """Run a service until the block ends. No benchmark's requests reach the service's limits.

    Raises:
        SystemExit: the service does not start, or does not stop within a minute.
    """
    async with _up(folder, _manifest(max_kv, tiers, is_deterministic, batching)) as service:
        yield service


@contextlib.asynccontextmanager
async def example_up(
    folder: Path,
    changes: Mapping[str, Any],
    within: Callable[[Sequence[str]], list[str]] = list,
) -> AsyncIterator[Service]:
    """Run the service of examples/smollm2.yaml until the block ends. Its log is in `folder`.

    Args:
        folder: a new folder for the service's files.
        changes: sections of the service's `spec`, of which the given fields are replaced. None
            removes a field.
        within: returns a command that runs the given one, such as in a container.

    Raises:
        SystemExit: the service does not start, or does not stop within a minute.
    """
    document = _example(folder, changes)
    with (folder / "log").open("wb") as log:
        async with _up(folder, document, log, within) as service:
            yield service


def _example(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    _merge(document["spec"], changes)
    return document


def _merge(section: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(section.get(name), dict):
            _merge(section[name], value)
        elif value is None:
            section.pop(name, None)
        else:
            section[name] = value


@contextlib.asynccontextmanager
async def _up(
    folder: Path,
    document: Mapping[str, Any],
    log: IO[bytes] | None = None,
    within: Callable[[Sequence[str]], list[str]] = list,
) -> AsyncIterator[Service]:
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(document))
    state_file = folder / "state.json"
    state_file.unlink(missing_ok=True)
    starting = asyncio.ensure_future(asyncio.to_thread(start, path, state_file, log, within))
    try:
        process, _ = await asyncio.shield(starting)
        yield Service(process, json.loads(state_file.read_text()))
    finally:
        process, _ = await starting
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(_ended, process)


def _ended(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "see start"
    process.stdin.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise SystemExit(f"error: ullage up did not stop within {STOP_S:g} s") from None


def _manifest(
    max_kv: str, tiers: dict[str, Any], is_deterministic: bool, batching: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "serving.ullage.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "tiers"},
        "spec": {
            "model": {
                "source": MODEL,
                "name": "smollm2",
                "maxModelLen": 8192,
                "dtype": "BFloat16",
                "deterministic": is_deterministic,
            },
            "device": "CPU",
            "streaming": {"coalesceTokens": 1},
            "router": {"replicas": 1},
            "pools": {"single": {"gpus": 1, "replicas": 1, "memory": {"maxKV": max_kv}}},
            "memory": {"deviceBytes": f"{DEVICE_MIB}Mi", "safetyReserve": "32Mi", "tiers": tiers},
            "routing": {
                "largeRequestTokens": 8192,
                "queue": {"maxRequests": 64, "timeout": "120s"},
            },
            "batching": dict(batching),
            "limits": {"maxOutputTokens": 1024, "requestTimeout": "300s"},
            "slo": {"ttftP95": "300s", "e2eP95": "600s"},
        },
    }


@dataclass
class Answer:
    """One answer. `arrivals_s` has the seconds from the request to each token."""

    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)


async def ask(
    channel: grpc.aio.Channel, token_ids: Sequence[int], max_tokens: int, session: str = ""
) -> Answer:
    """Request a greedy answer of exactly `max_tokens` tokens.

    Raises:
        grpc.aio.AioRpcError: the request was refused or failed.
        RuntimeError: the answer ended early.
    """
    request = pb.GenerateRequest(
        model="smollm2",
        token_ids=pb.TokenIds(ids=token_ids),
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=pb.OutputOptions(return_token_ids=True),
        session_id=session,
    )

    answer = Answer()
    finished = pb.Finished()
    started = time.perf_counter()

    async for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
        now = time.perf_counter() - started
        answer.token_ids += response.delta.token_ids
        answer.arrivals_s += [now] * len(response.delta.token_ids)
        if response.HasField("finished"):
            finished = response.finished

    if len(answer.token_ids) != max_tokens:
        raise RuntimeError(
            f"{len(answer.token_ids)} of {max_tokens} tokens, reason {finished.reason}"
        )

    usage = finished.usage
    answer.prompt_tokens = usage.prompt_tokens
    answer.cached_tokens = usage.cached_tokens
    answer.cached_by_tier = {each.tier: each.tokens for each in usage.cached_by_tier}
    if usage.cached_tokens and not usage.cached_by_tier:
        answer.cached_by_tier = {"device": usage.cached_tokens}
    return answer
