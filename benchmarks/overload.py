#!/usr/bin/env python3
"""Ten times the capacity of mixed lengths: goodput, lateness, and how fast the rest is refused.

usage: overload.py [--seconds 60] [--factor 10] [--engines 2] [--sequence-s 0] [--real] [--quick]
                   [--prometheus]

Starts engines and one `ullage-router` with its default ladder, a process each, and sends streamed
requests of mixed prompts and outputs at `--factor` times the capacity, at even intervals and
whatever comes back (an open loop). The engines are either without a model, with bounded KV and a
given time for a step (`kv_engine.py`), or, with --real, one engine with SmolLM2 on the CPU.

What a request is worth is the KV that it holds times its output, or, where time is short rather
than memory (--sequence-s, --real), its output. The capacity is computed of memory, and measured
before the load of time: `--clients` at once, one request after another. Prints one JSON object:

capacity          worth of the requests that can be served in a second
goodput_share     worth of the answers in full and within the objectives, over the capacity; without
                  the first seconds
ttft_p95_s        from sending a request to its first token, of those that were served
e2e_p95_s         the same to its last token
refused_p50_ms    from sending a request to the whole of its refusal, those that waited left out
router_cpu_ms     processor time of the router for a request
hangs             requests without an answer at their time limit
missed            figures that are worse than their floors (FLOORS); --quick has none
alerts            with --prometheus: when each alert of a service fired and cleared, in seconds from
                  the load's begin, as a Prometheus with the rules that the operator makes saw it,
                  which scrapes the router every second; waited for until UllageHeadroomExhausted
                  has cleared

exit status: 0 no hang, only 200, 429, 503 and 504, and no floor missed; 1 otherwise
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import psutil
from kv_engine import MODEL, blocks_of
from local_prometheus import Prometheus, find
from local_prometheus import running as running_prometheus
from one_engine import start_engine as start_real_engine

from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.manifests.monitoring import rule_groups

HERE = Path(__file__).resolve().parent
ALLOWED = {200, 429, 503, 504}
HANG_S = 60.0
START_S = 60.0
HEADROOM_ALERT = "UllageHeadroomExhausted"
FIRING = 'ALERTS{alertstate="firing"}'
CLEAR_S = 180.0
GAP_S = 2.5
"""Seconds without a sample after which an alert has cleared; there is one every second."""
LEAST_GOODPUT_SHARE = 0.9
MOST_REFUSED_P99_MS = 20.0
TTFT_S = 7.0
E2E_S = 20.0
OBJECTIVES = MappingProxyType({"ttft_p95": TTFT_S, "e2e_p95": E2E_S})
FLOORS = (
    f"floors: goodput_share >= {LEAST_GOODPUT_SHARE:g}, refused_p99_ms <= {MOST_REFUSED_P99_MS:g}, "
    f"ttft_p95_s <= {TTFT_S:g}, e2e_p95_s <= {E2E_S:g}"
)
REAL_MODEL = "smollm2"
PROMPTS = (40, 100, 250)
OUTPUTS = (10, 40, 90)
"""Lengths of prompts, in characters or, of the real model, in words, and of outputs, in tokens."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the mix."""

    prompt: int
    output: int

    @property
    def blocks(self) -> int:
        return blocks_of(self.prompt, self.output)


MIX = [Ask(prompt, output) for prompt in PROMPTS for output in OUTPUTS]


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    seconds: float
    factor: float
    engines: int
    slots: int
    """Average requests that an engine's KV holds at once."""
    token_s: float
    sequence_s: float
    is_real: bool
    clients: int

    @property
    def is_timed(self) -> bool:
        """Whether time is short, rather than memory."""
        return self.is_real or self.sequence_s > 0

    @property
    def blocks(self) -> int:
        """Blocks of each engine."""
        return round(self.slots * sum(ask.blocks for ask in MIX) / len(MIX))

    def worth(self, ask: Ask) -> float:
        return ask.output * (1 if self.is_timed else ask.blocks)

    @property
    def mean_worth(self) -> float:
        return sum(map(self.worth, MIX)) / len(MIX)

    @property
    def ramp_s(self) -> float:
        """Until the engines are full and the first answers have come."""
        return min(2 * max(OUTPUTS) * self.token_s, self.seconds / 3)


@dataclass(frozen=True, slots=True)
class Answer:
    ask: Ask
    status: int
    """0: it hung."""
    code: str
    has_waited: bool
    ended: float
    ttft_s: float
    took_s: float

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.ttft_s <= TTFT_S and self.took_s <= E2E_S


@contextlib.asynccontextmanager
async def process(*command: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is ended when the block ends."""
    with log.open("wb") as errors:
        started = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=errors
        )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
            await started.wait()


async def start_engine(stack: contextlib.AsyncExitStack, plan: Plan, number: int, to: Path) -> str:
    """The address of a new engine."""
    if plan.is_real:
        memory = {"device_bytes": 1500 << 20, "safety_reserve": 32 << 20}
        real = await stack.enter_async_context(start_real_engine(to, None, memory=memory))
        return real.address
    command = [sys.executable, str(HERE / "kv_engine.py"), "--name", f"engine-{number}"]
    blocks = plan.blocks * (100 if plan.is_timed else 1)
    command += ["--blocks", str(blocks), "--token-s", str(plan.token_s)]
    command += ["--sequence-s", str(plan.sequence_s)]
    log = to / f"engine-{number}.log"
    engine = await stack.enter_async_context(process(*command, log=log))
    assert engine.stdout
    line = await asyncio.wait_for(engine.stdout.readline(), START_S)
    return f"127.0.0.1:{json.loads(line)['port']}"


async def start_router(
    stack: contextlib.AsyncExitStack,
    model: str,
    addresses: list[str],
    to: Path,
    slo: Mapping[str, float] = OBJECTIVES,
) -> tuple[str, psutil.Process]:
    """The URL of a new router, and its process."""
    anywhere = {"host": "127.0.0.1", "port": 0}
    config = {
        "model": model,
        "http": {**anywhere, "public_stats": True},
        "grpc": anywhere,
        "metrics": anywhere,
        "pools": [{"name": "single", "targets": addresses}],
        "slo": dict(slo),
    }
    path = to / "router.yaml"
    log = to / "router.log"
    path.write_text(json.dumps(config))
    command = (sys.executable, "-m", "ullage_router.main", "--config", str(path))
    router = await stack.enter_async_context(process(*command, log=log))
    port = (await listening(log))["http_port"]
    return f"http://127.0.0.1:{port}", psutil.Process(router.pid)


async def listening(log: Path) -> dict[str, Any]:
    """The ports that a router's log names."""
    async with asyncio.timeout(START_S):
        while True:
            if line := first_line(log, '"listening"'):
                return dict(json.loads(line))
            await asyncio.sleep(0.05)


def first_line(log: Path, word: str) -> str:
    """The first line with the word; empty when there is none yet."""
    return next((line for line in log.read_text().splitlines() if word in line), "")


def start_prometheus(stack: contextlib.AsyncExitStack, metrics_port: int, to: Path) -> Prometheus:
    """A Prometheus with a service's rules that scrapes the router."""
    program = find()
    if program is None:
        sys.exit(
            "error: no prometheus: run tests/charts/get_prometheus.py or set ULLAGE_PROMETHEUS"
        )
    kind = {"apiVersion": "serving.ullage.dev/v1alpha1", "kind": "LLMService"}
    spec = {"model": {"source": "file:///model", "name": MODEL}, "pools": {"single": {}}}
    service = parse({**kind, "metadata": {"name": "overload"}, "spec": spec})
    pod = "overload-router-6c9f8d7b5-x2x4z"
    labels = {"namespace": service.namespace, "llmservice": service.name, "pod": pod}
    targets = [{"targets": [f"127.0.0.1:{metrics_port}"], "labels": labels}]
    jobs = [{"job_name": "router", "static_configs": targets}]
    folder = to / "prometheus"
    folder.mkdir()
    rules = rule_groups(service, Settings())
    return stack.enter_context(running_prometheus(program, folder, jobs, rules))


def alerts(prometheus: Prometheus, began: float) -> dict[str, list[list[float | None]]]:
    """When each alert fired and cleared, seconds from the time when the load began.

    Waits until the headroom's has cleared; None: it did not within CLEAR_S.
    """
    firing = f'ALERTS{{alertname="{HEADROOM_ALERT}",alertstate=~"pending|firing"}}'
    end = time.monotonic() + CLEAR_S
    while prometheus.query(firing) and time.monotonic() < end:
        time.sleep(1)
    still = {each["metric"]["alertname"] for each in prometheus.query(FIRING)}
    spells_by_alert = dict[str, list[list[float | None]]]()
    for series in prometheus.query(f"{FIRING}[1h]"):
        name = series["metric"]["alertname"]
        spells = spells_by_alert.setdefault(name, [])
        times = [at for at, _ in series["values"]]
        gaps = [n for n in range(1, len(times)) if times[n] - times[n - 1] > GAP_S]
        for first, last in itertools.pairwise([0, *gaps, len(times)]):
            spells.append([round(times[first] - began, 1), round(times[last - 1] + 1 - began, 1)])
        if name in still:
            spells[-1][1] = None
    return spells_by_alert


async def ready(session: aiohttp.ClientSession, url: str, engines: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            async with session.get(f"{url}/stats") as response:
                states = (await response.json())["engines"]
            if [engine["state"] for engine in states] == ["ready"] * engines:
                return
            await asyncio.sleep(0.05)


class Client:
    """Sends requests.

    Args:
        session: its connections.
        url: of the router.
        model: name of the served model.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model
        self._numbers = random.Random(5)

    def body(self, ask: Ask) -> dict[str, Any]:
        """Prompts differ from their first token, so that no cache knows them."""
        number = self._numbers.randrange(1 << 30)
        words = [f"{number:010d}", *["x" if self._model == MODEL else "word "] * (ask.prompt - 10)]
        return {
            "model": self._model,
            "prompt": "".join(words),
            "max_tokens": ask.output,
            "ignore_eos": True,
            "stream": True,
        }

    async def ask(self, ask: Ask) -> Answer:
        """One request, to its last byte."""
        started = time.monotonic()
        ttft_s = 0.0
        code = ""
        has_waited = False
        try:
            async with (
                asyncio.timeout(HANG_S),
                self._session.post(self._url, json=self.body(ask)) as response,
            ):
                status = response.status
                has_waited = "queue=" in response.headers.get("x-ullage-trail", "")
                if status != 200:
                    code = (await response.json())["error"]["code"]
                async for line in response.content:
                    if not ttft_s and line.startswith(b"data:"):
                        ttft_s = time.monotonic() - started
                    if b'"error"' in line:
                        status = -1
                        code = "BROKEN"
        except TimeoutError:
            status = 0
            code = "HUNG"
        except aiohttp.ClientError as error:
            status = -1
            code = type(error).__name__
        now = time.monotonic()
        return Answer(ask, status, code, has_waited, now, ttft_s, now - started)


async def measured_capacity(client: Client, plan: Plan) -> float:
    """Worth of the answers to clients that each send one request after another, a second."""
    asks = itertools.cycle(random.Random(3).sample(MIX * 20, k=20 * len(MIX)))
    end = time.monotonic() + max(5.0, plan.seconds / 2)
    answers = list[Answer]()

    async def go_on() -> None:
        while time.monotonic() < end:
            answers.append(await client.ask(next(asks)))
            if answers[-1].status != 200:
                await asyncio.sleep(0.5)

    started = time.monotonic()
    await asyncio.gather(*(go_on() for _ in range(plan.clients)))
    served = sum(plan.worth(answer.ask) for answer in answers if answer.status == 200)
    return served / (time.monotonic() - started)


async def load(client: Client, plan: Plan, capacity: float) -> tuple[float, list[Answer]]:
    """When the load began, and every answer."""
    started = time.monotonic()
    rate = plan.factor * capacity / plan.mean_worth
    asks = random.Random(7).choices(MIX, k=int(rate * plan.seconds))
    tasks = []
    for number, ask in enumerate(asks):
        await asyncio.sleep(started + number / rate - time.monotonic())
        tasks.append(asyncio.create_task(client.ask(ask)))
    return started, list(await asyncio.gather(*tasks))


def figures(
    plan: Plan, capacity: float, started: float, answers: Sequence[Answer]
) -> dict[str, Any]:
    """What is printed."""
    begin = started + plan.ramp_s
    end = started + plan.seconds
    good = [a for a in answers if a.is_good and begin <= a.ended < end]
    goodput = sum(plan.worth(answer.ask) for answer in good) / (end - begin)
    served = [answer for answer in answers if answer.status == 200]
    refused = [a for a in answers if a.status == 429 and not a.has_waited]
    refused_ms = sorted(1e3 * answer.took_s for answer in refused)
    counts = Counter(f"{a.status} {a.code}".strip() for a in answers)
    return {
        "seconds": plan.seconds,
        "capacity": round(capacity, 2),
        "requests": len(answers),
        "goodput": round(goodput, 2),
        "goodput_share": round(goodput / capacity, 3),
        "ttft_p95_s": round(_quantile(sorted(a.ttft_s for a in served), 0.95), 2),
        "e2e_p95_s": round(_quantile(sorted(a.took_s for a in served), 0.95), 2),
        "refused": len(refused),
        "refused_p50_ms": round(_quantile(refused_ms, 0.5), 2),
        "refused_p99_ms": round(_quantile(refused_ms, 0.99), 2),
        "statuses": dict(sorted(counts.items())),
        "hangs": sum(a.status == 0 for a in answers),
        "is_well": all(a.status in ALLOWED for a in answers),
    }


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0


def missed(figures: Mapping[str, Any]) -> list[str]:
    """Names of the figures that are worse than their floors."""
    is_reached = {
        "goodput_share": figures["goodput_share"] >= LEAST_GOODPUT_SHARE,
        "refused_p99_ms": figures["refused_p99_ms"] <= MOST_REFUSED_P99_MS,
        "ttft_p95_s": figures["ttft_p95_s"] <= TTFT_S,
        "e2e_p95_s": figures["e2e_p95_s"] <= E2E_S,
    }
    return [name for name, is_well in is_reached.items() if not is_well]


async def run(plan: Plan, with_prometheus: bool) -> dict[str, Any]:
    model = REAL_MODEL if plan.is_real else MODEL
    async with contextlib.AsyncExitStack() as stack:
        to = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses = [await start_engine(stack, plan, n, to) for n in range(plan.engines)]
        url, router = await start_router(stack, model, addresses, to)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await ready(session, url, plan.engines)
        port = (await listening(to / "router.log"))["metrics_port"]
        prometheus = start_prometheus(stack, port, to) if with_prometheus else None
        client = Client(session, url, model)
        capacity = plan.engines * plan.blocks / plan.token_s
        if plan.is_timed:
            capacity = await measured_capacity(client, plan)
        before = cpu_s(router)
        began = time.time()
        started, answers = await load(client, plan, capacity)
        used_ms = 1e3 * (cpu_s(router) - before) / len(answers)
        report = {**figures(plan, capacity, started, answers), "router_cpu_ms": round(used_ms, 3)}
        if prometheus:
            report["alerts"] = await asyncio.to_thread(alerts, prometheus, began)
    return report


def has_fired_and_cleared(alerts: Mapping[str, list[list[float | None]]]) -> bool:
    spells = alerts.get(HEADROOM_ALERT, [])
    return bool(spells) and None not in spells[-1]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], epilog=FLOORS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8, help="requests an engine holds at once")
    parser.add_argument("--token-s", type=float, default=0.05)
    parser.add_argument("--sequence-s", type=float, default=0.0, help="more for each other request")
    parser.add_argument("--real", action="store_true", help="SmolLM2 on the CPU, one engine")
    parser.add_argument("--clients", type=int, default=8, help="at once, to measure the capacity")
    parser.add_argument("--prometheus", action="store_true", help="say which alerts fire, and when")
    parser.add_argument("--quick", action="store_true", help="3 s of little load, without floors")
    o = parser.parse_args()
    if o.quick:
        o.seconds = 3.0
        o.slots = 2
        o.token_s = 0.01
    engines = 1 if o.real else o.engines
    plan = Plan(o.seconds, o.factor, engines, o.slots, o.token_s, o.sequence_s, o.real, o.clients)
    figures = asyncio.run(run(plan, o.prometheus))
    figures["missed"] = [] if o.quick else missed(figures)
    for name, spells in figures.get("alerts", {}).items():
        for fired, cleared in spells:
            end = "did not clear" if cleared is None else f"cleared at {cleared:g} s"
            print(f"alert {name} fired at {fired:g} s, {end}", file=sys.stderr)
    if o.prometheus and not o.quick and not has_fired_and_cleared(figures["alerts"]):
        figures["missed"].append(HEADROOM_ALERT)
    print(json.dumps(figures))
    print(FLOORS, file=sys.stderr)
    return 0 if figures["is_well"] and not figures["missed"] else 1


if __name__ == "__main__":
    sys.exit(main())
