"""Soak test: half an hour of long conversations with flat memory, bounded files and cache hits.

The test starts `ullage up` with SmolLM2. The device holds three of the conversations, the host tier
does not hold the rest of them, and there is a file tier. Four clients continue one conversation
after another: the one that was answered last (whose KV is still on the device), one of medium age
(host) and the oldest (files). Every second, the test reads the resident memory of the worker and
the server, the size of the tiers and the hits. Halfway, it kills the worker. With --plot, it draws
the samples.

An answer with status 429 is no failure: memory is short on purpose, and the client retries later.

examples:
  python -m benchmarks soak                        half an hour
  python -m benchmarks soak --minutes 1            does it work?
  python -m benchmarks soak --minutes 2 --kv-mib 16 --pause-s 8 --no-kill
                                                   two minutes with mostly idle cores
  python -m benchmarks soak --plot docs/reasons/kv-soak.svg --json soak.json

exit status: 0 success, 1 a check failed (the output names each failed check)
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.support.local_service import (
    DEVICE_MIB,
    TOKEN_BYTES,
    Answer,
    Service,
    ask,
    service_up,
)
from benchmarks.support.options import new_parser
from benchmarks.support.plots import Line, Panel, draw
from ullage_common.wire.channels import open_channel

MIB = 1 << 20
HOST_SHARE = 1.5
FILE_SHARE = 3.0
"""Sizes of the tiers, as multiples of the device's KV."""
LONGEST_SHARE = 0.5
"""Share of the device's KV at which a conversation ends and a new one begins."""
TURN_SHARES = (0.02, 0.05, 0.1, 0.2)
"""Possible lengths of a client's turn, as shares of the device's KV."""
ANSWER_SHARES = (0.003, 0.006, 0.018)
FLAT_MIB = 32
"""Maximum growth of a process's resident memory in MiB."""
MEMORY_SHARE = 0.85
"""Maximum share of the device's memory for the worker. On a CPU, the device is the process."""
LATER_S = 600.0
"""Maximum additional seconds until each tier has served blocks."""
FEWEST_ROWS = 20
"""Minimum number of samples from which growth can be judged."""
CLIENTS = 4
TIERS = ("device", "host", "file")


@dataclass
class Session:
    """A conversation, which gets a new name when it starts again."""

    number: int
    name: str = ""
    tokens: list[int] = field(default_factory=list)
    turns: int = 0
    is_busy: bool = False


@dataclass
class Soak:
    """The conversations and all measurements."""

    sessions: list[Session]
    """Sessions in the order of their last turns."""
    chooser: random.Random
    kv_mib: int = 60
    pause_s: float = 0.25
    answers: int = 0
    refused: int = 0
    later_turns: int = 0
    later_turns_cached: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    after_kill: dict[str, int] = field(default_factory=dict)
    killed_s: float | None = None
    answers_at_kill: int = 0
    e2e_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    shared_files: set[str] = field(default_factory=set)
    """Files of /dev/shm that the service's processes have mapped."""
    is_over: bool = False
    """Whether the clients and the sampler must end."""

    @property
    def kv_tokens(self) -> float:
        """Number of tokens that fit into the device's KV."""
        return self.kv_mib * MIB / TOKEN_BYTES


async def client(soak: Soak, channel: grpc.aio.Channel) -> None:
    """Continue one conversation after another, with two turns in a row for each."""
    turns = 0
    while not soak.is_over:
        idle = [session for session in soak.sessions if not session.is_busy]
        # Each client has one conversation at a time, and there are more conversations than clients.
        session = idle[0 if turns % 2 else len(idle) // 2]
        turns += 1
        session.is_busy = True
        try:
            for _ in range(2):
                await turn(soak, channel, session)
                soak.sessions.remove(session)
                soak.sessions.append(session)
                await asyncio.sleep(soak.chooser.uniform(0.0, 2 * soak.pause_s))
        except (grpc.aio.AioRpcError, RuntimeError) as error:
            if is_refused(error):
                soak.refused += 1
                await asyncio.sleep(2.0)
                continue
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            soak.errors.append(f"session {session.name}, turn {session.turns}: {details}")
            return
        finally:
            session.is_busy = False


def is_refused(error: Exception) -> bool:
    """Return whether the error only means that memory was short, which is no failure."""
    return (
        isinstance(error, grpc.aio.AioRpcError)
        and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    )


async def turn(soak: Soak, channel: grpc.aio.Channel, session: Session) -> None:
    chooser = soak.chooser
    room = soak.kv_tokens
    if not session.tokens or len(session.tokens) > LONGEST_SHARE * room:
        session.name = f"{session.number}-{soak.answers}"
        session.tokens = []
        session.turns = 0
    num_new = int(chooser.choice(TURN_SHARES) * chooser.uniform(1.0, 1.25) * room)
    prompt = session.tokens + [chooser.randrange(100, 4000) for _ in range(num_new)]
    max_tokens = int(chooser.choice(ANSWER_SHARES) * room)
    answer = await ask(channel, prompt, max_tokens, session.name)
    session.tokens = prompt + answer.token_ids
    session.turns += 1
    _count(soak, session, answer)


def _count(soak: Soak, session: Session, answer: Answer) -> None:
    soak.answers += 1
    soak.e2e_s.append(answer.arrivals_s[-1])
    if session.turns > 1:
        soak.later_turns += 1
        soak.later_turns_cached += answer.cached_tokens > 0
    for tier, tokens in answer.cached_by_tier.items():
        soak.cached_by_tier[tier] = soak.cached_by_tier.get(tier, 0) + tokens
        if soak.killed_s is not None:
            soak.after_kill[tier] = soak.after_kill.get(tier, 0) + tokens


async def sample(soak: Soak, service: Service, files: Path, started: float) -> None:
    """Record a row of figures every second, until the test ends or a read fails."""
    while not soak.is_over:
        try:
            row = await asyncio.to_thread(_row, service, files)
        except (OSError, psutil.Error) as error:
            soak.errors.append(f"no figures at {time.monotonic() - started:.0f} s: {error!r}")
            return
        soak.samples.append({"s": time.monotonic() - started, **row, "answers": soak.answers})
        soak.shared_files |= await asyncio.to_thread(_shared_files, service)
        if len(soak.samples) % 15 == 1:
            print(_progress(soak), file=sys.stderr, flush=True)
        await asyncio.sleep(1.0)


def _shared_files(service: Service) -> set[str]:
    """Return the files of /dev/shm that the service's processes have mapped."""
    root = psutil.Process(service.process.pid)
    paths = set[str]()
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(OSError):  # the process has ended
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
            paths |= {word for word in maps.split() if word.startswith("/dev/shm/")}
    return paths


def _row(service: Service, files: Path) -> dict[str, float]:
    figures = service.figures(0)
    worker = service.worker_pid(0)

    row = {
        "worker": 0.0,
        "server": float(psutil.Process(service.server_pid(0)).memory_info().rss),
        "files": float(_disk_bytes(files)),
        "kv_pool": figures["ullage_kv_pool_bytes"],
        "kv_used": figures["ullage_kv_used_ratio"] * figures["ullage_kv_pool_bytes"],
        "restarts": figures.get("ullage_worker_restarts_total", 0.0),
        "failures": sum(v for k, v in figures.items() if k.startswith("ullage_kv_tier_failures")),
    }

    for tier in ("host", "file"):
        row[tier] = figures[f"ullage_kv_tier_used_bytes/{tier}"]
        row[f"{tier}_hits"] = figures[f"ullage_kv_tier_hits_total/{tier}"]

    if worker is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            row["worker"] = float(psutil.Process(worker).memory_info().rss)

    return row


def _disk_bytes(folder: Path) -> int:
    """Return the disk space of files in bytes, without the holes of sparse files."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total


def _progress(soak: Soak) -> str:
    row = soak.samples[-1]
    amounts = ", ".join(f"{k} {row[k] / MIB:.0f}" for k in ("worker", "server", "host", "files"))
    return f"{row['s']:6.0f} s  {soak.answers} answers, {amounts} MiB, {len(soak.errors)} errors"


async def kill_worker(soak: Soak, service: Service, started: float, after_s: float) -> None:
    await asyncio.sleep(after_s)
    if pid := service.worker_pid(0):
        soak.killed_s = time.monotonic() - started
        soak.answers_at_kill = soak.answers
        os.kill(pid, signal.SIGKILL)


async def run(options: argparse.Namespace, folder: Path) -> Soak:
    """Run the soak test. SIGTERM ends the test and the service.

    Raises:
        Exception: a client or the sampler failed with an unexpected error.
    """
    if task := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    files = folder / "kv"
    tiers = {
        "host": {"size": f"{HOST_SHARE * options.kv_mib:.0f}Mi"},
        "file": {"path": str(files), "size": f"{FILE_SHARE * options.kv_mib:.0f}Mi"},
    }

    sessions = [Session(number) for number in range(options.sessions)]
    soak = Soak(sessions, random.Random(options.seed), options.kv_mib, options.pause_s)

    async with (
        service_up(folder, f"{options.kv_mib}Mi", tiers) as service,
        open_channel(service.target) as channel,
    ):
        started = time.monotonic()
        seconds = 60 * options.minutes

        killer = asyncio.create_task(kill_worker(soak, service, started, options.kill_s))
        work = [
            asyncio.create_task(sample(soak, service, files, started)),
            *(asyncio.create_task(client(soak, channel)) for _ in range(CLIENTS)),
        ]

        ended: set[asyncio.Task[None]] = set()  # tasks end early only after an error
        while not ended and not is_enough(soak, time.monotonic() - started, seconds):
            ended, _ = await asyncio.wait(work, timeout=1, return_when=asyncio.FIRST_COMPLETED)

        soak.is_over = True
        killer.cancel()
        await asyncio.gather(*work)
    return soak


def is_enough(soak: Soak, passed_s: float, seconds: float) -> bool:
    """Return whether the time has passed and each tier has served blocks.

    On busy cores, the tiers may take up to LATER_S seconds longer.
    """
    is_used = all(soak.cached_by_tier.get(tier) for tier in TIERS)
    is_used &= soak.killed_s is None or bool(soak.after_kill.get("host"))
    return passed_s >= seconds + (0.0 if is_used else LATER_S)


def faults(soak: Soak, e2e_s: float) -> list[str]:
    """Return one line for each check that failed."""
    rows = soak.samples
    if len(rows) < FEWEST_ROWS:
        return [*soak.errors, f"there are only {len(rows)} samples"]

    last = rows[-1]
    shared = sorted(filter(os.path.exists, soak.shared_files))
    quota = FILE_SHARE * soak.kv_mib * MIB

    checks = {
        "blocks of KV failed in a tier": last["failures"] == 0,
        "the KV pool is not constant": len({row["kv_pool"] for row in rows}) == 1,
        "files exceed their quota": max(row["files"] for row in rows) <= quota,
        f"files stay in /dev/shm: {shared}": not shared,
        "a worker died by itself": last["restarts"] <= (soak.killed_s is not None),
        f"p95 of whole answers exceeds {e2e_s:g} s": p95(soak.e2e_s) <= e2e_s,
        f"the worker takes more than {MEMORY_SHARE:.0%} of its device": (
            max(row["worker"] for row in rows) <= MEMORY_SHARE * DEVICE_MIB * MIB
        ),
    }

    if soak.killed_s is not None:
        checks |= {
            "the killed worker is not replaced": last["restarts"] == 1 and last["worker"] > 0,
            "sessions of the killed worker are not there": soak.after_kill.get("host", 0) > 0,
        }

    for tier in TIERS:
        checks[f"nothing was cached on {tier}"] = soak.cached_by_tier.get(tier, 0) > 0

    for name in ("worker", "server"):
        grown = growth(soak, name)
        checks[f"the {name} lived too briefly to judge its growth"] = grown is not None
        checks[f"the {name} grows by {grown or 0:.0f} MiB"] = (grown or 0.0) <= FLAT_MIB

    return [*soak.errors, *(text for text, is_well in checks.items() if not is_well)]


def growth(soak: Soak, name: str) -> float | None:
    """Return a process's memory growth in MiB, or None if the process lived too briefly.

    A killed worker has two lives, and the larger growth counts. The measurement of a life begins
    with its first answers, because loading and the first steps allocate memory that is kept.
    """
    num_before = soak.answers_at_kill
    lives: list[list[float]] = [[], []]
    for row in soak.samples:
        is_second = name == "worker" and soak.killed_s is not None and row["s"] > soak.killed_s
        if row[name] and row["answers"] >= CLIENTS + (num_before if is_second else 0):
            lives[is_second].append(row[name] / MIB)
    grown = [
        statistics.median(values[-len(values) // 10 :])
        - statistics.median(values[: len(values) // 10])
        for values in lives
        if len(values) >= FEWEST_ROWS
    ]
    return max(grown, default=None)


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))] if values else 0.0


def result(soak: Soak, problems: list[str]) -> dict[str, Any]:
    last = soak.samples[-1] if soak.samples else {}
    return {
        "seconds": round(last.get("s", 0)),
        "answers": soak.answers,
        "refused": soak.refused,
        "later_turns": soak.later_turns,
        "later_turns_cached": soak.later_turns_cached,
        "cached_tokens": soak.cached_by_tier,
        "cached_tokens_after_kill": soak.after_kill,
        "blocks_hit": {tier: last.get(f"{tier}_hits") for tier in ("host", "file")},
        "e2e_p50_s": round(statistics.median(soak.e2e_s or [0.0]), 2),
        "e2e_p95_s": round(p95(soak.e2e_s), 2),
        "killed_s": soak.killed_s and round(soak.killed_s),
        "growth_mib": {name: round(growth(soak, name) or 0, 1) for name in ("worker", "server")},
        "most_mib": {
            name: round(max((row[name] for row in soak.samples), default=0) / MIB)
            for name in ("worker", "server", "kv_pool", "kv_used", "host", "file", "files")
        },
        "faults": problems,
    }


def plot(soak: Soak, path: Path) -> None:
    rows = soak.samples
    minutes = [row["s"] / 60 for row in rows]

    def panel(title: str, scale: float, lines: dict[str, str]) -> Panel:
        return Panel(title, [Line(n, [row[k] / scale for row in rows]) for n, k in lines.items()])

    resident = {"worker resident": "worker", "server resident": "server"}
    tiers = {"host tier": "host", "files on disk": "files", "device KV in use": "kv_used"}
    hits = {"from host": "host_hits", "from files": "file_hits"}
    panels = [
        panel("resident memory, MiB", MIB, resident),
        panel("KV by tier, MiB", MIB, tiers),
        panel("blocks read from tiers", 1, hits),
    ]
    draw(path, "minutes", minutes, panels)


def main() -> int:
    parser = new_parser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="duration (30)")
    parser.add_argument("--sessions", type=int, default=8, help="conversations, at least 5 (8)")
    parser.add_argument(
        "--kv-mib", type=int, default=60, help="KV of the device, for which all else is cut (60)"
    )
    parser.add_argument(
        "--pause-s", type=float, default=0.25, help="a client's mean pause between turns (0.25)"
    )
    parser.add_argument("--no-kill", action="store_true", help="do not kill the worker")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--e2e-s",
        type=float,
        default=20.0,
        help="limit of the 95th percentile of whole answers (20)",
    )
    parser.add_argument("--json", type=Path, help="write result and samples here")
    parser.add_argument("--plot", type=Path, help="draw the samples as SVG")
    options = parser.parse_args()

    options.kill_s = math.inf if options.no_kill else 30 * options.minutes
    if options.sessions <= CLIENTS:
        parser.error(f"--sessions {options.sessions}: give at least {CLIENTS + 1}")

    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        soak = asyncio.run(run(options, Path(folder)))

    problems = faults(soak, options.e2e_s)
    row = result(soak, problems)
    print(json.dumps(row))

    if options.json:
        options.json.write_text(json.dumps({**row, "samples": soak.samples}))
    if options.plot and soak.samples:
        plot(soak, options.plot)

    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0
