"""Measure goodput, latency and refusal times at ten times the capacity, with mixed lengths.

The benchmark starts engines and one `ullage-router` with its default ladder, each in a separate
process. It sends streamed requests with mixed prompts and outputs at `--factor` times the capacity,
at even intervals, whether or not earlier requests have been answered (an open loop). The engines
have no model, but a limited KV pool and a fixed time per step. With --real, there is one engine
with SmolLM2 on the CPU.

A request's worth is the KV that it holds times its output. If time is scarce rather than memory
(--sequence-s, --real), the worth is the output alone. If memory is scarce, the capacity is
computed. If time is scarce, the capacity is measured before the load, with `--clients` that each
send one request after another. The benchmark prints one JSON object:

capacity          worth of the requests that can be served per second
goodput_share     worth of the complete answers within the objectives, divided by the capacity,
                  without the first seconds
ttft_p95_s        time from sending a request to its first token, for served requests
e2e_p95_s         time from sending a request to its last token, for served requests
refused_p50_ms    time from sending a request to the end of its refusal, if it did not queue
router_cpu_ms     the router's CPU time per request
hangs             number of requests without an answer at their time limit
missed            figures that miss their limits (none with --quick)
alerts            with --prometheus: when each of a service's alerts fired and cleared, in seconds
                  after the load began. A Prometheus with the operator's rules scrapes the router
                  every second. The run waits until UllageHeadroomExhausted has cleared.

With --refused N, the benchmark instead measures whether refused clients that obey Retry-After are
refused again. Clients connect at once to one engine with `--slots`, each with a separate
connection, until N of them have been refused. A refused client waits for its Retry-After and
retries, until it is served. The benchmark prints one JSON object:

clients         number of clients
refused         clients that were refused at first
refused_again   refused clients that were refused again when they retried
retry_after     number of clients by the seconds in their first Retry-After
took_s          time from the first request to the last answer
shortest_s      the same time on an engine that is never idle

With --cases, the benchmark instead serves examples/smollm2.yaml, with changes that a case names,
and compares variants in alternating rounds. Each begins once other processes are quiet. The
benchmark prints the median and the spread of the rounds, and judges them by the requirements:

pressure   p95 of answers while another process takes the engines' memory, against calm times. Needs
           root, for control groups.
peak       first tokens at peak with a bound on the sequences that a step decodes, against none
large      p95 of requests that take the large pool, alone and beside ordinary ones
returning  how many refused clients are accepted after Retry-After, and how that compares with the
           time that they needed
prefill    first tokens of long and short prompts on two engines of one core each, distributed by
           their work, against engines in turn

examples:
  python -m benchmarks overload
  python -m benchmarks overload --real
  python -m benchmarks overload --prometheus
  python -m benchmarks overload --refused 60
  python -m benchmarks overload --cases all --json cases.json
  python -m benchmarks overload --cases pressure peak --rounds 7
  python -m benchmarks overload --quick

exit status: 0 nothing hung, all statuses were 200, 429, 503 or 504, and no limit was missed (with
--refused: every client was served and none was refused again; with --cases: every figure met its
limit), 1 otherwise
"""

import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.overload import cases, refused
from benchmarks.support.kv_engine import MODEL, blocks_of
from benchmarks.support.one_engine import start_engine as start_real_engine
from benchmarks.support.options import new_parser
from benchmarks.support.prometheus import Prometheus, find
from benchmarks.support.prometheus import running as running_prometheus
from benchmarks.support.router_process import (
    E2E_S,
    START_S,
    TTFT_S,
    listening,
    process,
    ready,
    start_router,
)
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.manifests.monitoring import rule_groups

ALLOWED = {200, 429, 503, 504}
HANG_S = 60.0
HEADROOM_ALERT = "UllageHeadroomExhausted"
FIRING = 'ALERTS{alertstate="firing"}'
CLEAR_S = 180.0
GAP_S = 2.5
"""Seconds without a sample after which an alert counts as cleared. Samples come every second."""
LEAST_GOODPUT_SHARE = 0.9
MOST_REFUSED_P99_MS = 20.0
FLOORS = (
    f"floors: goodput_share >= {LEAST_GOODPUT_SHARE:g}, refused_p99_ms <= {MOST_REFUSED_P99_MS:g}, "
    f"ttft_p95_s <= {TTFT_S:g}, e2e_p95_s <= {E2E_S:g}"
)
REAL_MODEL = "smollm2"
PROMPTS = (40, 100, 250)
OUTPUTS = (10, 40, 90)
"""Lengths of outputs in tokens. PROMPTS has lengths in characters, or in words with --real."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The prompt and output lengths of one request in the mix."""

    prompt: int
    output: int

    @property
    def blocks(self) -> int:
        return blocks_of(self.prompt, self.output)


MIX = [Ask(prompt, output) for prompt in PROMPTS for output in OUTPUTS]


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of one run of the benchmark."""

    seconds: float
    factor: float
    engines: int
    slots: int
    """Average number of requests that an engine's KV pool holds at once."""
    token_s: float
    sequence_s: float
    is_real: bool
    clients: int

    @property
    def is_timed(self) -> bool:
        """Whether time is the scarce resource rather than memory."""
        return self.is_real or self.sequence_s > 0

    @property
    def blocks(self) -> int:
        """Number of KV blocks of each engine."""
        return round(self.slots * sum(ask.blocks for ask in MIX) / len(MIX))

    def worth(self, ask: Ask) -> float:
        return ask.output * (1 if self.is_timed else ask.blocks)

    @property
    def mean_worth(self) -> float:
        return sum(map(self.worth, MIX)) / len(MIX)

    @property
    def ramp_s(self) -> float:
        """Seconds until the engines are full and the first answers have come."""
        return min(2 * max(OUTPUTS) * self.token_s, self.seconds / 3)


@dataclass(frozen=True, slots=True)
class Outcome:
    ask: Ask
    status: int
    """HTTP status (0 if the request hung, -1 if its connection or stream broke)."""
    code: str
    has_waited: bool
    ended: float
    ttft_s: float
    took_s: float

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.ttft_s <= TTFT_S and self.took_s <= E2E_S


async def start_engine(stack: contextlib.AsyncExitStack, plan: Plan, number: int, to: Path) -> str:
    """Start an engine, and return the engine's address."""
    if plan.is_real:
        memory = {"device_bytes": 1500 << 20, "safety_reserve": 32 << 20}
        real = await stack.enter_async_context(start_real_engine(to, None, memory=memory))
        return real.address
    command = [sys.executable, "-m", "benchmarks.support.kv_engine", "--name", f"engine-{number}"]
    blocks = plan.blocks * (100 if plan.is_timed else 1)
    command += ["--blocks", str(blocks), "--token-s", str(plan.token_s)]
    command += ["--sequence-s", str(plan.sequence_s)]
    log = to / f"engine-{number}.log"
    engine = await stack.enter_async_context(process(*command, log=log))
    assert engine.stdout
    line = await asyncio.wait_for(engine.stdout.readline(), START_S)
    return f"127.0.0.1:{json.loads(line)['port']}"


def start_prometheus(stack: contextlib.AsyncExitStack, metrics_port: int, to: Path) -> Prometheus:
    """Start a Prometheus with a service's rules that scrapes the router."""
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
    """Return when each alert fired and cleared, as pairs of seconds after the load began.

    This waits until the headroom alert has cleared, for at most CLEAR_S. For an alert that still
    fires, the second value is None.
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


class Client:
    """A client of one router.

    Args:
        session: HTTP session of the client.
        url: URL of the router.
        model: name of the served model.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model
        self._numbers = random.Random(5)

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return a request body whose prompt differs from its first token on, to avoid caches."""
        number = self._numbers.randrange(1 << 30)
        words = [f"{number:010d}", *["x" if self._model == MODEL else "word "] * (ask.prompt - 10)]
        return {
            "model": self._model,
            "prompt": "".join(words),
            "max_tokens": ask.output,
            "ignore_eos": True,
            "stream": True,
        }

    async def ask(self, ask: Ask) -> Outcome:
        """Send one request, and read the answer to its last byte."""
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
        return Outcome(ask, status, code, has_waited, now, ttft_s, now - started)


async def measured_capacity(client: Client, plan: Plan) -> float:
    """Return the worth of the answers per second in a closed loop.

    Each of the plan's clients sends one request after another.
    """
    asks = itertools.cycle(random.Random(3).sample(MIX * 20, k=20 * len(MIX)))
    end = time.monotonic() + max(5.0, plan.seconds / 2)
    answers = list[Outcome]()

    async def go_on() -> None:
        while time.monotonic() < end:
            answers.append(await client.ask(next(asks)))
            if answers[-1].status != 200:
                await asyncio.sleep(0.5)

    started = time.monotonic()
    await asyncio.gather(*(go_on() for _ in range(plan.clients)))
    served = sum(plan.worth(answer.ask) for answer in answers if answer.status == 200)
    return served / (time.monotonic() - started)


async def load(client: Client, plan: Plan, capacity: float) -> tuple[float, list[Outcome]]:
    """Send the load, and return its start time and all answers."""
    started = time.monotonic()
    rate = plan.factor * capacity / plan.mean_worth
    asks = random.Random(7).choices(MIX, k=int(rate * plan.seconds))
    tasks = []
    for number, ask in enumerate(asks):
        await asyncio.sleep(started + number / rate - time.monotonic())
        tasks.append(asyncio.create_task(client.ask(ask)))
    return started, list(await asyncio.gather(*tasks))


def figures(
    plan: Plan, capacity: float, started: float, answers: Sequence[Outcome]
) -> dict[str, Any]:
    """Return the figures to print."""
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
    """Return the names of the figures that miss their limits."""
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
    parser = new_parser("overload", __doc__, FLOORS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8, help="requests an engine holds at once")
    parser.add_argument("--token-s", type=float, default=0.05)
    parser.add_argument(
        "--sequence-s", type=float, default=0.0, help="more seconds for each other request"
    )
    parser.add_argument("--real", action="store_true", help="SmolLM2 on the CPU, one engine")
    parser.add_argument("--clients", type=int, default=8, help="clients that measure the capacity")
    parser.add_argument("--prometheus", action="store_true", help="say which alerts fire, and when")
    parser.add_argument("--quick", action="store_true", help="3 s of light load, without floors")
    parser.add_argument(
        "--refused", type=int, metavar="N", help="measure N refused clients that come back instead"
    )
    parser.add_argument("--cases", nargs="+", choices=[*cases.CASES, "all"], help="instead")
    parser.add_argument("--rounds", type=int, help="rounds of each case (2 to 5 by default)")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="most seconds to wait for a quiet machine"
    )
    parser.add_argument("--json", type=Path, help="write the figures of --cases here")
    o = parser.parse_args()
    if o.refused is not None:
        return refused.measure(o.refused, o.slots, o.token_s)
    if o.cases:
        names = list(cases.CASES) if "all" in o.cases else o.cases
        return cases.measure(names, o.rounds, o.patience, o.json)

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
