"""Measures how well Retry-After predicts the wait on real engines.

Many clients arrive within seconds. A refused client returns after its Retry-After, until it is
served. The time that it really needed is

    needed = Retry-After + time in the queue after its return - time for which a place was free

before its return. A place is free while no request waits and an engine has memory for the request.
"""

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.overload.rounds import Measured, Verdict, alternate, spread, text
from benchmarks.support.load import messages
from benchmarks.support.local_service import example_up

CLIENTS = 110
WARM_UP = 16
"""Clients before the first round, from which the engines learn their speed."""
WORDS = 150
OUTPUT = 64
MODEL = "smollm2-135m"
ARRIVAL_S = 0.03
LOOK_S = 0.1
MOST_S = 300.0
LEAST_ACCEPTED = 0.9
LEAST_S = 0.1
"""Resolution of the time needed, so that ratios stay finite."""


@dataclass
class Returning:
    """A client, with the times of its refusals and of its Retry-After, in seconds."""

    number: int
    told_s: list[int] = field(default_factory=list)
    returned_at: list[float] = field(default_factory=list)
    request_id: str = ""
    """Id of the request that was served."""

    async def ask(self, session: aiohttp.ClientSession, url: str) -> None:
        """Send the request until it is served.

        Raises:
            SystemExit: the answer is neither 200 nor 429.
        """
        body = {
            "model": MODEL,
            "messages": messages(self.number, WORDS),
            "max_tokens": OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
        }
        while True:
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                text = await response.text()
                if response.status == 200:
                    self.request_id = response.headers["x-request-id"]
                    return
                if response.status != 429:
                    raise SystemExit(f"error: status {response.status}: {text}")
                self.told_s.append(int(response.headers["retry-after"]))
            await asyncio.sleep(self.told_s[-1])
            self.returned_at.append(time.monotonic())


@dataclass
class Watch:
    """What /stats showed over time."""

    free: list[tuple[float, int]] = field(default_factory=list)
    """At each time, the largest memory that a request could have had at once (bytes)."""
    queued_s: dict[str, float] = field(default_factory=dict)
    """Seconds in the queue, by request id."""
    needed_bytes: int = 0
    """Largest predicted memory of a request."""

    async def run(self, session: aiohttp.ClientSession, url: str) -> None:
        while True:
            async with session.get(f"{url}/stats") as response:
                stats = await response.json()
            waiting = stats["queue"]["waiting"]
            room = max(each["headroom_bytes"] - each["credit_bytes"] for each in stats["engines"])
            self.free.append((time.monotonic(), 0 if waiting else room))
            for record in stats["latest"]:
                self.queued_s[record["request_id"]] = record["queued_s"]
                self.needed_bytes = max(self.needed_bytes, record["predicted_bytes"] or 0)
            await asyncio.sleep(LOOK_S)

    def free_s(self, at: float) -> float:
        """Return for how many seconds a place had been free without a break before a time."""
        since = at
        for moment, room in reversed([each for each in self.free if each[0] <= at]):
            if room < self.needed_bytes:
                break
            since = moment
        return at - since


async def burst(url: str, seed: int, num_clients: int) -> Measured:
    """Send all clients, and wait until all are served."""
    clients = [Returning(10_000 * seed + number) for number in range(num_clients)]
    watch = Watch()
    began = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    async with asyncio.timeout(MOST_S), aiohttp.ClientSession(connector=connector) as session:
        watching = asyncio.create_task(watch.run(session, url))
        tasks = []
        for client in clients:
            tasks.append(asyncio.create_task(client.ask(session, url)))
            await asyncio.sleep(ARRIVAL_S)
        await asyncio.gather(*tasks)
        took_s = time.monotonic() - began
        await asyncio.sleep(2 * LOOK_S)
        watching.cancel()

    refused = [client for client in clients if client.told_s]
    tries = Counter(f"{len(client.told_s)} refusals" for client in refused)
    accepted = sum(len(client.told_s) == 1 for client in refused)
    pairs = [(client.told_s[0], needed_s(client, watch)) for client in refused]
    return Measured(
        {
            "accepted": [accepted / len(refused)] if refused else [],
            "told / needed": [told / needed for told, needed in pairs],
            "told - needed": [told - needed for told, needed in pairs],
            "told": [told for told, _ in pairs],
            "took": [took_s],
            "refused": [len(refused)],
        },
        tries,
    )


def needed_s(client: Returning, watch: Watch) -> float:
    """Return the seconds that a client really needed to wait from its first refusal."""
    waited_s = client.returned_at[-1] - client.returned_at[0] + client.told_s[0]
    queued_s = watch.queued_s.get(client.request_id, 0.0)
    free_s = watch.free_s(client.returned_at[-1]) if queued_s < LOOK_S else 0.0
    return max(LEAST_S, waited_s + queued_s - free_s)


async def measure(folder: Path, rounds: int, patience_s: float) -> list[Verdict]:
    async with example_up(folder / "returning", {}) as service:
        await burst(service.url, 99, WARM_UP)
        variants = {"burst": lambda number: burst(service.url, number, CLIENTS)}
        one = await alternate(variants, rounds, patience_s)

    rounds_of = one.rounds["burst"]
    accepted = [share for each in rounds_of for share in each.values["accepted"]]
    if not accepted:
        return [Verdict("RT3 refused clients", "none", "at least one", is_met=False)]
    ratios = [ratio for each in rounds_of for ratio in each.values["told / needed"]]
    late = [seconds for each in rounds_of for seconds in each.values["told - needed"]]
    lower, median, upper = statistics.quantiles(ratios, n=4)
    refused = [each.values["refused"][0] for each in rounds_of]
    took_s = [each.values["took"][0] for each in rounds_of]
    told_s = [told for each in rounds_of for told in each.values["told"]]
    print(f"Retry-After: {CLIENTS} clients, one every {ARRIVAL_S:g} s, {rounds} rounds")
    print(f"    refused {spread(refused)}, last answer after {spread(took_s)} s")
    print(f"    {text(one.outcomes())}")
    print(f"    first told {spread(told_s)} s")
    print(f"    told / needed: median {median:.2f}, the middle half {lower:.2f} to {upper:.2f}")
    print(f"    told - needed: {spread(late)} s")
    return [
        Verdict(
            "RT3 refused clients that are accepted at their return",
            spread(accepted),
            f"at least {LEAST_ACCEPTED:g}",
            statistics.median(accepted) >= LEAST_ACCEPTED,
        )
    ]
