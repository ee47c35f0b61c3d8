"""Measures the time that a cached prefix in each tier saves, and the overhead of tiers."""

import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.support.local_service import TOKEN_BYTES, Answer, Service, ask, service_up
from ullage_common.wire.channels import open_channel

MIB = 1 << 20
TAIL = 16
OUTPUT = 32
"""Number of tokens per answer. TAIL is the number of prompt tokens after the long prefix."""
TEXT_PROMPT = 512
WAIT_S = 60.0
FROM_TIER = 0.85
"""Minimum share of a prefix that must come from the tier of the prefix's row."""


ENGINE_LIMITS = {
    "ttft_host_share": (1 / 5, "first token from host / recomputed"),
    "ttft_file_share": (1 / 3, "first token from files / recomputed"),
    "inter_token_share": (1.03, "between tokens, with a host tier / without"),
}
"""Upper limit and title of each figure."""


@dataclass(frozen=True)
class Setup:
    """A service with tiers, and the number of prompts that it gets in turn."""

    where: str
    """Tier that serves a repeated prompt, or `recomputed`."""
    prompts: int
    host_share: float
    """Size of the host tier as a multiple of one prompt's KV (the same unit as `file_share`)."""
    file_share: float = 0.0

    def tiers(self, prompt_mib: float, folder: Path) -> dict[str, Any]:
        tiers: dict[str, Any] = {"host": {"size": f"{self.host_share * prompt_mib:.0f}Mi"}}
        if self.file_share:
            size = f"{self.file_share * prompt_mib:.0f}Mi"
            tiers["file"] = {"path": str(folder / "kv"), "size": size}
        return tiers


SETUPS = (
    Setup("recomputed", prompts=2, host_share=0),
    Setup("host", prompts=2, host_share=3),
    # The host tier holds one prompt, and each prompt asked is the least recently used.
    Setup("file", prompts=3, host_share=1.25, file_share=6),
)


@dataclass
class Row:
    """Answers whose prefixes came from the same tier."""

    answers: list[Answer] = field(default_factory=list)

    @property
    def ttft_ms(self) -> list[float]:
        return [1e3 * answer.arrivals_s[0] for answer in self.answers]

    @property
    def inter_token_ms(self) -> list[float]:
        return [gap for answer in self.answers for gap in gaps_ms(answer)]

    def figures(self) -> dict[str, float]:
        cached = sum(answer.cached_tokens for answer in self.answers)
        return {
            "answers": len(self.answers),
            "ttft_p50_ms": quantile(self.ttft_ms, 0.5),
            "ttft_p99_ms": quantile(self.ttft_ms, 0.99),
            "inter_token_p50_ms": quantile(self.inter_token_ms, 0.5),
            "inter_token_p99_ms": quantile(self.inter_token_ms, 0.99),
            "hit_ratio": round(cached / sum(a.prompt_tokens for a in self.answers), 3),
        }


def gaps_ms(answer: Answer) -> list[float]:
    times = answer.arrivals_s
    return [1e3 * (later - before) for before, later in itertools.pairwise(times)]


def quantile(values: Sequence[float], share: float) -> float:
    return round(sorted(values)[int(share * (len(values) - 1))], 2)


@dataclass
class Pass:
    """All answers of one pass over the services."""

    rows: dict[str, Row] = field(default_factory=dict)
    token_ids: dict[int, list[list[int]]] = field(default_factory=dict)
    """Token ids of each answer, by prompt."""
    slower: list[float] = field(default_factory=list)
    """For each pair of answers, the ratio of the time per token with and without a host tier."""
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, where: str, number: int, answer: Answer) -> None:
        self.rows.setdefault(where, Row()).answers.append(answer)
        self.token_ids.setdefault(number, []).append(answer.token_ids)

    def equal_texts(self) -> tuple[int, int]:
        """Return how many answers equal the first answer to their prompt, and the total number."""
        others = [(ids[0], each) for ids in self.token_ids.values() for each in ids[1:]]
        return sum(first == each for first, each in others), len(others)


async def measure_pass(
    folder: Path, num_tokens: int, rounds: int, *, is_deterministic: bool
) -> Pass:
    """Send the same prompts to all services in turn, once cold and then for `rounds` rounds.

    Raises:
        SystemExit: an answer did not come from the tier of its row.
    """
    prompt_mib = num_tokens * TOKEN_BYTES / MIB
    # One prompt with its answer, and hardly a block more: the next prompt evicts it.
    max_kv = f"{(num_tokens + TAIL + OUTPUT) * 1.1 * TOKEN_BYTES / MIB:.0f}Mi"

    chooser = random.Random(num_tokens)
    result = Pass()
    prompts = [
        [chooser.randrange(100, 40_000) for _ in range(num_tokens + TAIL)]
        for _ in range(max(setup.prompts for setup in SETUPS))
    ]

    async with contextlib.AsyncExitStack() as stack:
        running: list[tuple[Setup, Service, grpc.aio.Channel]] = []
        for setup in SETUPS:
            own = folder / f"{setup.where}-{is_deterministic}"
            own.mkdir()
            manifest = service_up(own, max_kv, setup.tiers(prompt_mib, own), is_deterministic)
            service = await stack.enter_async_context(manifest)
            channel = await stack.enter_async_context(open_channel(service.target))
            await ask(channel, [5, 6, 7], 4)
            running.append((setup, service, channel))
            progress(f"service for `{setup.where}` is ready")

        for turn in range(rounds + 1):
            for number, prompt in enumerate(prompts):
                begun = {}
                for setup, service, channel in running:
                    if number < setup.prompts:
                        answer = await _ask(result, turn, number, prompt, setup, channel)
                        begun[setup.where] = statistics.median(gaps_ms(answer))
                        await _quiet(service)
                if "host" in begun:
                    result.slower.append(begun["host"] / begun["recomputed"])

        for setup, service, _ in running:
            result.tiers[setup.where] = _traffic(await asyncio.to_thread(service.figures, 0))
    return result


async def _ask(
    result: Pass, turn: int, number: int, prompt: list[int], setup: Setup, channel: Any
) -> Answer:
    where = setup.where if turn or setup.where == "recomputed" else "cold"
    # The blocks of a session are saved to files at their first use.
    session = f"session-{number}" if setup.file_share else ""
    answer = await ask(channel, prompt, OUTPUT, session)
    _check(answer, where, len(prompt))
    result.add(where, number, answer)
    times = f"first token {1e3 * answer.arrivals_s[0]:.0f} ms"
    progress(f"round {turn}, prompt {number}, {where}: {times}, {answer.cached_by_tier}")
    if setup.where == "host":
        again = await ask(channel, prompt, OUTPUT, session)
        _check(again, "device", len(prompt))
        result.add("device", number, again)
    return answer


def _check(answer: Answer, where: str, num_tokens: int) -> None:
    cached = answer.cached_by_tier
    if where in ("cold", "recomputed"):
        # The device has room for a few blocks next to the other prompt.
        is_so = answer.cached_tokens <= (1 - FROM_TIER) * num_tokens and not set(cached) - {
            "device"
        }
    else:
        is_so = cached.get(where, 0) >= FROM_TIER * (num_tokens - TAIL)
    if not is_so:
        raise SystemExit(f"error: an answer of the row `{where}` has {cached} of {num_tokens}")


async def _quiet(service: Service) -> None:
    """Wait until the tiers no longer copy blocks.

    Raises:
        SystemExit: the tiers still copy blocks after a minute.
    """
    names = ("queued", "blocks", "written_bytes_total")
    before: list[float] = []
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        figures = await asyncio.to_thread(service.figures, 0)
        now = [
            sum(value for key, value in figures.items() if key.startswith(f"ullage_kv_tier_{name}"))
            for name in names
        ]
        if now == before and now[0] == 0:
            return
        before = now
        await asyncio.sleep(0.2)
    raise SystemExit(f"error: tiers still copy after {WAIT_S:g} s: {before}")


def _traffic(figures: dict[str, float]) -> dict[str, float]:
    """Return the blocks and bytes of each tier, by `tier/figure`."""
    kinds = {"hits": "hits", "misses": "misses", "read_bytes": "read", "written_bytes": "written"}
    return {
        f"{tier}/{short}": figures[f"ullage_kv_tier_{kind}_total/{tier}"]
        for tier in ("host", "file")
        for kind, short in kinds.items()
        if f"ullage_kv_tier_{kind}_total/{tier}" in figures
    }


def measure_engine(num_tokens: int, rounds: int) -> dict[str, Any]:
    """Measure times with the fast kernels, then compare texts with the deterministic kernels.

    The comparison of texts uses shorter prompts.
    """
    with tempfile.TemporaryDirectory(prefix="ullage-tiers-") as name:
        times = asyncio.run(measure_pass(Path(name), num_tokens, rounds, is_deterministic=False))
        progress("texts of deterministic answers")
        short = min(num_tokens, TEXT_PROMPT)
        texts = asyncio.run(measure_pass(Path(name), short, 1, is_deterministic=True))

    rows = {where: row.figures() for where, row in times.rows.items()}
    recomputed = rows["recomputed"]["ttft_p50_ms"]

    equal, total = texts.equal_texts()
    fast_equal, fast_total = times.equal_texts()

    return {
        "prompt_tokens": num_tokens,
        "rows": rows,
        "tiers": times.tiers,
        "ttft_host_share": round(rows["host"]["ttft_p50_ms"] / recomputed, 3),
        "ttft_file_share": round(rows["file"]["ttft_p50_ms"] / recomputed, 3),
        "inter_token_share": round(statistics.median(times.slower), 3),
        "equal_texts": [equal, total],
        "equal_texts_fast": [fast_equal, fast_total],
    }


def print_engine(result: dict[str, Any]) -> bool:
    """Print the figures, and return whether all are within their limits."""
    names = ("ttft_p50_ms", "ttft_p99_ms", "inter_token_p50_ms", "inter_token_p99_ms", "hit_ratio")
    titles = ("ttft p50", "ttft p99", "token p50", "token p99", "hits")
    print(f"{'prefix of ' + str(result['prompt_tokens']) + ' tokens, ms':28}", end="")
    print("".join(f"{title:>11}" for title in titles))
    for where, row in result["rows"].items():
        print(f"{where:28}" + "".join(f"{row[name]:11.2f}" for name in names))

    for where, traffic in result["tiers"].items():
        amounts = {
            key: f"{value / MIB:.0f} MiB" if key.endswith(("read", "written")) else int(value)
            for key, value in traffic.items()
        }
        print(f"tiers of `{where}`: {amounts}")

    is_well = True
    for key, (most, title) in ENGINE_LIMITS.items():
        is_within = result[key] <= most
        is_well &= is_within
        print(f"{title:48} {result[key]:6.3f}  {'ok' if is_within else f'ABOVE {most:.3f}'}")

    (equal, total), fast = result["equal_texts"], result["equal_texts_fast"]
    is_equal = equal == total
    print(
        f"deterministic texts that are equal: {equal} of {total}; fast ones: {fast[0]} of {fast[1]}"
    )
    return is_well and is_equal


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
