"""Runs a service's engines and router as processes on loopback, and sends requests to them."""

import asyncio
import contextlib
import json
import random
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from benchmarks.gpu.checkpoint import NAME, service_checkpoint, service_shape
from benchmarks.gpu.figures import Fact, Job, Report, none_of, one_line
from benchmarks.gpu.ties import Pair
from benchmarks.support.one_engine import Engine, end_process, start_engine
from benchmarks.support.processes import free_ports
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc

MIB = 1 << 20
START_S = 60.0
ASK_S = 100.0
"""Number of seconds after which a request counts as hung."""

Sections = dict[str, Any]

PATIENT: Sections = {"slo": {"ttft_p95": 100.0, "e2e_p95": 200.0}}
"""Latency objectives so high that a router never refuses a request for being late."""


@dataclass(frozen=True)
class Router:
    """A running router."""

    url: str
    target: str

    async def stats(self) -> dict[str, Any]:
        """Return the content of the router's /stats."""
        async with aiohttp.ClientSession() as client, client.get(f"{self.url}/stats") as response:
            stats: dict[str, Any] = await response.json()
            return stats


@contextlib.asynccontextmanager
async def engine_up(job: Job, name: str, sections: Sections) -> AsyncIterator[Engine]:
    """Run an engine with the services' model. Its log is in `NAME.log` next to the results."""
    folder = job.scratch / name
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = await asyncio.to_thread(service_checkpoint, job)
    model = {"source": f"file://{checkpoint}", "name": NAME, "dtype": dtype(job)}
    server = {"engine_id": name, "weights_dir": str(job.scratch / "weights")}
    merged: Sections = {
        **sections,
        "device": job.device,
        "model": model | sections.get("model", {}),
        "memory": memory(job) | sections.get("memory", {}),
        "server": server | sections.get("server", {}),
    }
    async with start_engine(folder, str(job.out / f"{name}.log"), **merged) as engine:
        yield engine


def dtype(job: Job) -> str:
    """Return the data type for services that prefer speed to equal tokens."""
    return "bfloat16" if job.on_gpu else "auto"


def memory(job: Job) -> Sections:
    """Return an engine's memory settings: the GPU's defaults, or a small budget for a rehearsal."""
    if job.on_gpu:
        return {}
    return {"device_bytes": 1200 * MIB, "safety_reserve": 16 * MIB}


def kv_bytes(job: Job, tokens: int, itemsize: int | None = None) -> int:
    """Return the KV bytes for a number of tokens in the engine's KV data type."""
    return tokens * service_shape(job).kv_bytes_per_token(itemsize or (2 if job.on_gpu else 4))


@contextlib.asynccontextmanager
async def router_up(
    job: Job, pools: dict[str, Sequence[Engine]], sections: Sections | None = None
) -> AsyncIterator[Router]:
    """Run a router for the engines of each pool until the block ends."""
    http_port, grpc_port, metrics_port = free_ports(3)
    config = {
        "model": NAME,
        "http": {"host": "127.0.0.1", "port": http_port, "public_stats": True},
        "grpc": {"host": "127.0.0.1", "port": grpc_port},
        "metrics": {"host": "127.0.0.1", "port": metrics_port},
        "pools": [
            {
                "name": pool,
                "role": "large" if pool == "large" else "standard",
                "targets": [engine.address for engine in engines],
            }
            for pool, engines in pools.items()
        ],
        **(sections or {}),
    }

    path = job.scratch / "router.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML

    command = (sys.executable, "-m", "ullage_router.main", "--config", str(path))
    with (job.out / "router.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command, stderr=log, stdout=log)

    try:
        router = Router(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}")
        await _ready(router, process)
        yield router
    finally:
        await end_process(process)


async def _ready(router: Router, process: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise RuntimeError(f"the router ended with status {process.returncode}; see router.log")
        with contextlib.suppress(OSError):
            if await asyncio.to_thread(_answers, f"{router.url}/readyz"):
                return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"the router was not ready within {START_S:g} s; see router.log")


def _answers(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=5) as response:
        return bool(response.status == 200)


@dataclass
class Reply:
    """The answer to one HTTP request."""

    status: int
    """HTTP status (0 without an answer in time, or after a lost connection)."""
    headers: dict[str, str]
    tokens: int
    seconds: float
    error: str = ""


async def complete(
    client: aiohttp.ClientSession, router: Router, prompt: str, max_tokens: int
) -> Reply:
    """Request a completion over HTTP, and read the whole answer."""
    body = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }

    began = time.monotonic()
    try:
        async with client.post(f"{router.url}/v1/completions", json=body) as response:
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as cause:
        return Reply(0, {}, 0, time.monotonic() - began, one_line(cause))

    tokens = answer.get("usage", {}).get("completion_tokens", 0)
    headers = {name.lower(): value for name, value in response.headers.items()}
    error = str(answer.get("error", {}).get("message", ""))
    return Reply(response.status, headers, tokens, time.monotonic() - began, error)


@dataclass
class Stream:
    """One streamed answer, token by token."""

    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Log-probability of each token minus that of the next likeliest token, if requested."""
    times: list[float] = field(default_factory=list)
    """Times by `time.monotonic`: the time of the request, then the time of each token."""
    route: str = ""
    degraded: list[str] = field(default_factory=list)
    resumes: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    error: str = ""
    """Why the stream is incomplete (empty if it is complete)."""


async def ask(
    channel: grpc.aio.Channel,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    session: str = "",
    gaps: bool = False,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stream: Stream | None = None,
) -> Stream:
    """Request exactly `max_tokens` tokens, and read the stream. Errors are stored in the result.

    Args:
        gaps: whether to record each token's lead over the next likeliest token.
        stream: a result to fill while tokens arrive, so that a caller can watch the progress.
    """
    stream = stream or Stream()
    request = pb.GenerateRequest(
        model=NAME,
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=temperature, top_p=top_p, seed=seed),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=pb.OutputOptions(return_token_ids=True, top_logprobs=2 if gaps else None),
        session_id=session,
    )

    stream.times.append(time.monotonic())
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=ASK_S)

    try:
        async for response in call:
            _take(stream, response)
    except grpc.aio.AioRpcError as error:
        stream.error = f"{error.code().name}: {error.details()}"
        return stream

    if len(stream.token_ids) != max_tokens and not stream.degraded:
        stream.error = f"{len(stream.token_ids)} of {max_tokens} tokens"
    return stream


def _take(stream: Stream, response: pb.GenerateResponse) -> None:
    kind = response.WhichOneof("event")
    if kind == "accepted":
        stream.route = response.accepted.route
        stream.degraded = list(response.accepted.degraded)
    elif kind == "delta":
        stream.token_ids += response.delta.token_ids
        stream.times += [time.monotonic()] * len(response.delta.token_ids)
        stream.gaps += [
            each.top[0].logprob - each.top[1].logprob for each in response.delta.logprobs
        ]
    elif kind == "finished":
        stream.resumes = response.finished.resumes
        stream.preemptions = response.finished.preemptions
        stream.cached_tokens = response.finished.usage.cached_tokens


def prompt_of(job: Job, number: int, length: int) -> list[int]:
    """Return prompt `number` with a given length. Prompts differ from their first token on."""
    chooser = random.Random(f"prompt {number} {length}")
    return [chooser.randrange(service_shape(job).vocab) for _ in range(length)]


def pair(wanted: Stream, given: Stream) -> Pair:
    """Return the tokens of two streams to compare, with the gaps of the expected stream."""
    return Pair(wanted.token_ids, wanted.gaps, given.token_ids)


def metrics(engine: Engine) -> dict[str, float]:
    """Return an engine's metrics by name, summed over labels. This blocks: call it in a thread."""
    with urllib.request.urlopen(engine.metrics_url, timeout=10) as response:
        text = response.read().decode()
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name = line.split("{")[0].split(" ")[0]
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return sums


def judge_log(job: Job, name: str, report: Report) -> None:
    """Report the errors in the log of an engine from `engine_up`. There must be no errors."""
    errors = errors_logged(job.out / f"{name}.log")
    for message in sorted(set(errors)):
        report(Fact(f"{name}.log", message))
    report(none_of(f"errors in {name}.log", len(errors)))


def errors_logged(path: Path) -> list[str]:
    """Return the error messages in a service's log."""
    messages = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and str(row.get("level", "")).lower() in ("error", "critical"):
                messages.append(str(row.get("message", row)))
    return messages
