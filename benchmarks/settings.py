"""Compare the default settings with static ones while prompts become 80 times longer and back.

The benchmark starts `ullage up` with SmolLM2 once for each setting, and sends the same work each
time: short prompts of 100 tokens, long ones of 8,000 tokens, and short ones again, from clients
that send the next prompt when the last one is answered. A refused client returns when it is told
to. The goodput is the number of answers per second over the whole run. All settings are measured
in turn, `--rounds` times, and the table shows medians.

A setting fails if an answer is lost or a response has a status of 5xx. The table also counts
preemptions, after which a sequence's KV is computed again or copied back.

examples:
  python -m benchmarks settings
  python -m benchmarks settings --only default,chunk-64 --rounds 3 --json settings.json

exit status: 0 success, 1 an answer failed, the default preempted, or it has less than 95 % of the
best goodput
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.local_service import Service, service_up
from benchmarks.support.options import new_parser
from ullage_verify.client import ChatAnswer, OpenAIClient
from ullage_verify.target import Target, describe

MIN_SHARE = 0.95
"""Minimum goodput of the default settings, as a share of the best static setting's."""
MAX_KV = "420Mi"
"""KV of the engine: two long prompts, or many short ones."""
ANSWER_TOKENS = 32
NUM_CLIENTS = 12
SILENCE_S = 300.0
SHORT_TOKENS = 100
LONG_TOKENS = 8_000
MAX_ERROR_CHARS = 200
DEFAULT = "default"
PREEMPTIONS = "ullage_preemptions_total"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    DEFAULT: {},
    "sequences-4": {"maxSequences": 4},
    "sequences-16": {"maxSequences": 16},
    "chunk-64": {"prefillChunkTokens": 64},
    "chunk-256": {"prefillChunkTokens": 256},
    "chunk-2048": {"prefillChunkTokens": 2048},
    "no-windows": {"prefillWindow": "0s", "decodeWindow": "0s"},
}
"""Fields of `spec.batching` by the name of the setting."""


@dataclass(frozen=True)
class Run:
    """The outcome of one run with one setting."""

    seconds: float
    answers: Sequence[ChatAnswer]
    phases_s: Sequence[float]
    """Seconds of each phase."""
    num_preemptions: float

    @property
    def goodput(self) -> float:
        """Return the answers per second."""
        return sum(answer.is_whole for answer in self.answers) / self.seconds

    @property
    def failures(self) -> Counter[str]:
        """Return the outcomes of requests that were neither answered nor refused with 429."""
        return Counter(
            f"{answer.outcome}: {answer.error[:MAX_ERROR_CHARS]}"
            for answer in self.answers
            if not (answer.is_whole or is_refusal(answer))
        )


def is_refusal(answer: ChatAnswer) -> bool:
    """Return whether the server refused the request for lack of room, which is no failure.

    Clients retry after 503, too, but that status counts as a failure of the server.
    """
    return answer.status == 429


async def phase(
    target: Target, numbers: "itertools.count[int]", tokens: int, count: int
) -> list[ChatAnswer]:
    """Send `count` prompts of `tokens` tokens from all clients. Return every response."""
    answers: list[ChatAnswer] = []
    turns = iter(range(count))

    async def client() -> None:
        for _ in turns:
            prompt = target.prompt(next(numbers), tokens)
            answers.extend(
                await target.client.obey(target.model, prompt, ANSWER_TOKENS, ignore_eos=True)
            )

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return answers


async def measure(service: Service, options: argparse.Namespace) -> Run:
    """Send the work to one service."""
    async with OpenAIClient(service.state["http_url"], silence_s=SILENCE_S) as client:
        target = await describe(client)
        long_tokens = min(LONG_TOKENS, target.usable - ANSWER_TOKENS)
        numbers = itertools.count(50_000)
        work = [
            (SHORT_TOKENS, options.short),
            (long_tokens, options.long),
            (SHORT_TOKENS, options.short),
        ]
        answers: list[ChatAnswer] = []
        phases_s: list[float] = []
        began = time.monotonic()
        for tokens, count in work:
            phase_began = time.monotonic()
            answers += await phase(target, numbers, tokens, count)
            phases_s.append(time.monotonic() - phase_began)
        seconds = time.monotonic() - began
        figures = await asyncio.to_thread(service.figures, 0)
    return Run(seconds, answers, phases_s, figures.get(PREEMPTIONS, 0.0))


async def run_all(
    names: Sequence[str], options: argparse.Namespace, folder: Path
) -> Mapping[str, Sequence[Run]]:
    """Measure every setting in turn, for as many rounds as asked."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(options.rounds):
        # Every other round goes backwards, so that no setting always follows the same one.
        for name in names if number % 2 == 0 else reversed(names):
            async with service_up(folder, MAX_KV, {}, batching=SETTINGS[name]) as service:
                run = await measure(service, options)
            runs[name].append(run)
            print(
                f"round {number + 1}, {name}: {run.goodput:.3f} answers/s, {run.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            for failure, count in run.failures.items():
                print(f"    {count} x {failure}", file=sys.stderr, flush=True)
    return runs


def summary(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return the figures of all settings as a JSON object."""
    rows = {
        name: {
            "goodput": round(statistics.median(run.goodput for run in each), 4),
            "phases_s": [
                round(statistics.median(run.phases_s[place] for run in each), 1)
                for place in range(3)
            ],
            "answers": sum(answer.is_whole for run in each for answer in run.answers),
            "refused": sum(is_refusal(answer) for run in each for answer in run.answers),
            "failed": sum(run.failures.total() for run in each),
            "preemptions": sum(run.num_preemptions for run in each),
        }
        for name, each in runs.items()
    }
    best = max(rows, key=lambda name: rows[name]["goodput"])
    result: dict[str, Any] = {"settings": rows, "best": best}
    if DEFAULT in rows:
        result["share_of_best"] = round(rows[DEFAULT]["goodput"] / rows[best]["goodput"], 3)
    return result


def table(result: Mapping[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| setting | answers/s | short, long, short (s) | refused | failed | preemptions |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["settings"].items():
        phases = ", ".join(f"{seconds:g}" for seconds in row["phases_s"])
        lines.append(
            f"| {name} | {row['goodput']:.3f} | {phases} | {row['refused']} | {row['failed']} "
            f"| {row['preemptions']:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = new_parser("settings", __doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--short", type=int, default=48, help="prompts of each short phase")
    parser.add_argument("--long", type=int, default=2, help="prompts of the long phase")
    parser.add_argument("--only", help="names of settings, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()

    names = options.only.split(",") if options.only else list(SETTINGS)
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"--only {','.join(unknown)}: choose from {', '.join(SETTINGS)}")

    with tempfile.TemporaryDirectory(prefix="ull") as folder:
        runs = asyncio.run(run_all(names, options, Path(folder)))
    result = summary(runs)
    print(table(result))
    if "share_of_best" in result:
        print(f"default: {result['share_of_best']:.1%} of the best ({result['best']})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))

    rows = result["settings"]
    failed = any(row["failed"] for row in rows.values()) or rows.get(DEFAULT, {}).get("preemptions")
    return int(bool(failed) or result.get("share_of_best", 1.0) < MIN_SHARE)
