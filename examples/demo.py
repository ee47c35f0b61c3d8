#!/usr/bin/env python3
"""Start Ullage with a real model on this machine, put it through its paces, stop it.

usage: demo.py [-f examples/smollm2.yaml] [--json] [--verbose]

Against a running `ullage up` it streams a chat answer, runs eight requests at once, sends a prompt
for the large pool, one that fits nowhere and an overload, tells one refusal's story from the logs,
and kills a worker in the middle of an answer. The exit status is 0 when every one of them ended as
promised and no process is left.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
SENTENCE = "The harbour keeps a ledger of every ship, its cargo, its captain and its debts. "


@dataclass(slots=True)
class Row:
    """One line of the closing table."""

    request: str
    status: int = 0
    predicted_bytes: int | None = None
    action: str = ""
    route: str = ""
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    count: int = 1
    note: str = ""


@dataclass(slots=True)
class Answer:
    """What one HTTP request gave."""

    status: int
    headers: httpx.Headers
    text: str = ""
    error: str = ""
    tokens: int = 0
    ttft_s: float | None = None
    duration_s: float = 0.0

    def row(self, name: str, note: str = "") -> Row:
        predicted = self.headers.get("x-ullage-predicted-kv-bytes")
        return Row(
            request=name,
            status=self.status,
            predicted_bytes=int(predicted) if predicted else None,
            action=self.headers.get("x-ullage-action", ""),
            route=self.headers.get("x-ullage-route", ""),
            ttft_s=self.ttft_s,
            tokens_per_s=self.tokens / self.duration_s if self.tokens else None,
            note=note,
        )


@dataclass(slots=True)
class Demo:
    """The running service, the client that talks to it and what was seen."""

    client: httpx.AsyncClient
    model: str
    engine_pids: dict[str, int]
    run_dir: str
    console: Console
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refused_id: str = ""
    """Header x-request-id of a refusal."""

    def expect(self, held: bool, promise: str) -> None:
        self.console.print(f"  [green]✓[/] {promise}" if held else f"  [red]✗ {promise}[/]")
        if not held:
            self.failures.append(promise)

    async def ask(
        self,
        prompt: str,
        max_tokens: int,
        on_text: Callable[[Answer, str], None] = lambda answer, text: None,
    ) -> Answer:
        """Streams one greedy chat answer; a refusal comes back as an Answer too."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            answer = Answer(response.status_code, response.headers)
            if response.status_code != 200:
                answer.error = json.loads(await response.aread())["error"]["message"]
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    absorb(answer, json.loads(line[6:]), started, on_text)
        answer.duration_s = time.perf_counter() - started
        return answer


def absorb(
    answer: Answer, event: dict[str, Any], started: float, on_text: Callable[[Answer, str], None]
) -> None:
    """Adds one server-sent event to the answer."""
    if "error" in event:
        answer.error = event["error"]["message"]
    for choice in event.get("choices", []):
        if text := choice["delta"].get("content"):
            answer.ttft_s = answer.ttft_s or time.perf_counter() - started
            answer.text += text
            on_text(answer, text)
    if usage := event.get("usage"):
        answer.tokens = usage["completion_tokens"]


# The scenes --------------------------------------------------------------------------------------


async def chat(demo: Demo) -> None:
    """A streamed answer"""

    def show(answer: Answer, text: str) -> None:
        demo.console.print(text, end="", style="italic", highlight=False, markup=False)

    answer = await demo.ask("Why is the sky blue? Answer in two sentences.", 64, show)
    demo.console.print()
    demo.rows.append(answer.row("chat"))
    demo.expect(answer.status == 200 and not answer.error, "the answer streamed to its end")


async def concurrent(demo: Demo) -> None:
    """Eight requests at once"""
    topics = ["tides", "bread", "chess", "rust", "clouds", "bees", "maps", "salt"]
    started = time.perf_counter()
    answers = await asyncio.gather(*(demo.ask(f"Tell me about {topic}.", 48) for topic in topics))
    seconds = time.perf_counter() - started
    tokens = sum(answer.tokens for answer in answers)
    demo.rows.append(summary("8 at once", answers, tokens / seconds))
    demo.expect(all(a.status == 200 and not a.error for a in answers), "all eight were served")


async def large(demo: Demo) -> None:
    """A prompt above largeRequestTokens"""
    answer = await demo.ask(SENTENCE * 150 + "Summarise the text above.", 32)
    demo.rows.append(answer.row("large prompt"))
    demo.expect(
        answer.status == 200 and answer.headers.get("x-ullage-route") in ("large", "tp2pp2"),
        "the large pool served it",
    )


async def impossible(demo: Demo) -> None:
    """A prompt that fits nowhere"""
    answer = await demo.ask(SENTENCE * 800, 32)
    demo.console.print(f"  {answer.error}", style="dim", highlight=False, markup=False)
    demo.rows.append(answer.row("impossible prompt"))
    demo.expect(answer.status == 400, "it was refused with 400 before any engine saw it")


async def overload(demo: Demo) -> None:
    """Sixty long requests at once"""
    prompts = [f"Report {number}. " + SENTENCE * 75 + "Summarise." for number in range(60)]
    answers = await asyncio.gather(*(demo.ask(prompt, 256) for prompt in prompts))
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 429]
    waits = [int(answer.headers.get("retry-after", 0)) for answer in refused]
    if served:
        demo.rows.append(summary("overload, served", served, None))
    if refused:
        demo.refused_id = refused[0].headers["x-request-id"]
        note = f"Retry-After {min(waits)}-{max(waits)} s"
        demo.rows.append(summary("overload, refused", refused, None, note))
    others = sorted({a.status for a in answers} - {200, 429})
    demo.expect(not others, f"nothing but success and 429 (other statuses: {others or 'none'})")
    demo.expect(not any(a.error for a in served), "every answer that began ended well")
    demo.expect(bool(refused) and min(waits) >= 1, "every 429 says when to come back")


async def story(demo: Demo) -> None:
    """The story of one refusal: ullage trace, with the id of its header x-request-id"""
    command = [sys.executable, "-m", "ullage_cli.main", "trace", demo.refused_id]
    process = await asyncio.create_subprocess_exec(
        *command, "--logs", demo.run_dir, stdout=subprocess.PIPE
    )
    story_text = (await process.communicate())[0].decode()
    demo.console.print(
        story_text.rstrip(), style="dim", highlight=False, markup=False, soft_wrap=True
    )
    demo.expect("admission_action=reject" in story_text, "the decision is there, with its reason")


async def kill(demo: Demo) -> None:
    """A worker killed in the middle of an answer"""
    prompt = "Write a short story about a lighthouse keeper."
    undisturbed = await demo.ask(prompt, 120)
    killed: list[int] = []

    def strike(answer: Answer, text: str) -> None:
        if len(answer.text) > 120 and not killed:
            killed.append(worker_pid(demo.engine_pids[answer.headers["x-ullage-engine"]]))
            os.kill(killed[0], signal.SIGKILL)

    answer = await demo.ask(prompt, 120, strike)
    same = answer.text == undisturbed.text
    demo.console.print(f"  killed worker process {killed}; same text as undisturbed: {same}")
    demo.rows.append(answer.row("worker killed", f"same text: {'yes' if same else 'no'}"))
    demo.expect(bool(killed), "the worker was killed while the answer streamed")
    demo.expect(
        answer.status == 200 and not answer.error and answer.tokens == undisturbed.tokens,
        f"the answer continued without an error, {answer.duration_s:.1f} s in all",
    )


SCENES: list[Callable[[Demo], Awaitable[None]]] = [
    chat,
    concurrent,
    large,
    impossible,
    overload,
    story,
    kill,
]


def summary(name: str, answers: list[Answer], tokens_per_s: float | None, note: str = "") -> Row:
    """One row for many answers: middle TTFT, the actions taken."""
    row = answers[0].row(name, note)
    firsts = sorted(answer.ttft_s for answer in answers if answer.ttft_s is not None)
    row.ttft_s = firsts[len(firsts) // 2] if firsts else None
    row.tokens_per_s = tokens_per_s
    row.action = tally(answer.headers.get("x-ullage-action", "") for answer in answers)
    row.route = tally(answer.headers.get("x-ullage-route", "") for answer in answers)
    row.count = len(answers)
    return row


def tally(words: Any) -> str:
    counts: dict[str, int] = {}
    for word in filter(None, words):
        counts[word] = counts.get(word, 0) + 1
    return " ".join(f"{w}:{n}" if len(counts) > 1 else w for w, n in sorted(counts.items()))


def worker_pid(engine_pid: int) -> int:
    """The process that holds the model, a descendant of the engine's server process."""
    children = psutil.Process(engine_pid).children(recursive=True)
    return next(c.pid for c in children if "ullage_engine.worker.main" in c.cmdline())


# Starting and stopping ---------------------------------------------------------------------------


def start(manifest: Path, state_file: Path, verbose: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ullage_cli.main", "up", "-f", str(manifest)]
    command += ["--http-port", "0", "--grpc-port", "0"]
    command += ["--state-file", str(state_file)] + (["--verbose"] if verbose else [])
    return subprocess.Popen(command, stdout=sys.stderr)


def wait_ready(service: subprocess.Popen[bytes], state_file: Path) -> dict[str, Any]:
    """The state that `ullage up` writes once everything serves."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not state_file.exists():
        if service.poll() is not None:
            raise SystemExit(f"error: ullage up exited with status {service.returncode}")
        if time.monotonic() > deadline:
            raise SystemExit(f"error: not ready after {READY_TIMEOUT_S:.0f} s")
        time.sleep(0.05)
    state: dict[str, Any] = json.loads(state_file.read_text())
    return state


def stop(service: subprocess.Popen[bytes]) -> list[str]:
    """Stops the service as Ctrl-C would; returns what went wrong."""
    if service.poll() is not None:
        return [f"ullage up ended by itself with status {service.returncode}"]
    family = psutil.Process(service.pid).children(recursive=True)
    service.send_signal(signal.SIGINT)
    try:
        status = service.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        service.kill()
        return [f"ullage up did not stop within {STOP_TIMEOUT_S:.0f} s"]
    survivors = [p.pid for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    problems = [f"processes left behind: {survivors}"] if survivors else []
    return problems + ([f"ullage up exited with status {status}"] if status else [])


async def play(state: dict[str, Any], console: Console) -> Demo:
    pids = {engine["id"]: int(engine["pid"]) for engine in state["engines"]}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=state["http_url"], timeout=120.0, limits=limits, trust_env=False
    ) as client:
        demo = Demo(client, state["model"], pids, state["run_dir"], console)
        for scene in SCENES:
            console.print(f"\n[bold]{scene.__doc__}[/]")
            await scene(demo)
        return demo


def report(rows: list[Row], console: Console) -> None:
    table = Table(title="What happened")
    for column in ("request", "n", "predicted", "action", "route", "status", "TTFT", "tokens/s"):
        table.add_column(column)
    table.add_column("")
    for row in rows:
        table.add_row(
            row.request,
            str(row.count),
            f"{row.predicted_bytes / 2**20:.1f} MiB" if row.predicted_bytes else "",
            row.action,
            row.route,
            str(row.status),
            f"{row.ttft_s * 1000:.0f} ms" if row.ttft_s else "",
            f"{row.tokens_per_s:.1f}" if row.tokens_per_s else "",
            row.note,
        )
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="examples:\n  demo.py\n  demo.py --json | tail -n 1\n  make demo ARGS=--json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = HERE / "smollm2.yaml"
    parser.add_argument("-f", "--file", type=Path, default=default, help="LLMService manifest")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON last")
    parser.add_argument("--verbose", action="store_true", help="show the processes' logs")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    # As by Ctrl-C, so that the service is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Where there is no terminal to ask for its width, the table still needs a wide one.
    console = Console(stderr=options.json)
    if not console.is_terminal:
        console.width = 110
    with tempfile.TemporaryDirectory(prefix="ullage-demo-") as folder:
        state_file = Path(folder, "state.json")
        service = start(options.file, state_file, options.verbose)
        try:
            demo = asyncio.run(play(wait_ready(service, state_file), console))
        finally:
            problems = stop(service)
    console.print()
    report(demo.rows, console)
    failures = demo.failures + problems
    if options.json:
        rows = [asdict(row) for row in demo.rows]
        print(json.dumps({"ok": not failures, "failures": failures, "requests": rows}))
    if not failures:
        console.print("See it live: make up, then open http://127.0.0.1:8000/console")
    for failure in failures:
        console.print(f"[red]failed:[/] {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
