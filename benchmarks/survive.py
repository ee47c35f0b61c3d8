"""Show what clients see if memory runs out, a worker dies or hangs, or a request is excessive.

Each server runs in a control group. Three clients each stream an answer from the server. The case
happens in the middle of their answers. The table has a row for each case and server:

who caused it  the answers to the requests that caused the case
bystanders     how many of the three streams ended well, with which words, and the longest pause
afterwards     seconds until the server answered a new request; "dead" if it did not in time, with
               what its /health reported then

The cases of requests, with 300 MiB of memory left, are those of `ullage verify oom`:

full-context  a prompt that fills the context
too-long      a prompt that is twice as long as the context
logprobs      `prompt_logprobs` and `echo` for a long prompt
images        four images of 8192 x 8192 pixels
choices       64 answers to a long prompt
schema        a JSON schema of 400 levels
long-answers  24 long answers at once
unique        120 prompts that no cache has seen
crowd         sixty long requests at once

The faults:

kill          SIGKILL to the process that computes
hang          SIGSTOP to the same process
oom           the kernel kills the largest process, because the group's memory is full

Peers are installed below DIR unless they are there, as by `python -m benchmarks compare`. Control
groups need root.

examples:
  python -m benchmarks survive .peers
  python -m benchmarks survive .peers --only ullage,vllm --cases oom,logprobs --json survive.json

exit status: 0 every bystander of Ullage got its whole answer, 1 one did not, 2 an option is wrong
or a server did not start, 130 interrupted
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.compare import servers
from benchmarks.compare.servers import ROOT, Running, Server, running
from benchmarks.support.load import ServerError
from benchmarks.support.options import new_parser
from ullage_verify.bystanders import bystanders, undisturbed
from ullage_verify.client import ChatAnswer, OpenAIClient
from ullage_verify.memory_limit import MemoryLimit, memory_limit
from ullage_verify.processes import ServerProcesses
from ullage_verify.scenarios import oom as requests
from ullage_verify.target import Target, TargetError, describe

OURS = ("ullage", "ullage+vllm")
LLAMA_OPTIONS = "-np 16 -c 65536"
"""Sixteen slots of 4096 tokens."""
CROWD = 60
CROWD_TOKENS = 600
LEFT_BYTES = 300 << 20
"""Memory that a server may still take during a case of requests."""
ROOM_BYTES = 128 << 20
"""Memory that is left when the group is filled until the kernel kills."""
GROUP = f"ullage-survive-{os.getpid()}"
FAILED = 2
INTERRUPTED = 130
TERMINATED = 143
PATIENCE_S = 150.0
"""Longest wait for a word, or for an answer after the case, seconds."""


class OptionError(Exception):
    """An option names something that does not exist."""


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    server: str
    case: str
    cause: str
    whole: int
    """Number of streams that ended well."""
    other_words: int | None
    """Number of whole streams whose words differ from an undisturbed run.

    None if the words of two undisturbed runs differ, too.
    """
    broken: int
    longest_pause_s: float
    back_s: float | None
    """Seconds until a new request was answered, or None if that took too long."""
    health: str = ""
    """Status of /health of a server that did not come back."""
    errors: list[str] = field(default_factory=list)

    @property
    def cells(self) -> list[str]:
        words = " with the same words" if self.whole and self.other_words == 0 else ""
        parts = [f"{self.whole} whole{words}"]
        parts += [f"{self.other_words} with other words"] if self.other_words else []
        parts += [f"{self.broken} broken"] if self.broken else []
        seen = f"{', '.join(parts)}, pause {self.longest_pause_s:.1f} s"

        if self.back_s is None:
            back = f"dead, /health: {self.health}"
        else:
            back = f"answers after {self.back_s:.1f} s"
        return [self.case, self.server, self.cause or "-", seen, back]


@dataclass(frozen=True)
class Scene:
    """A server in its control group, at the moment of a case."""

    target: Target
    running: Running
    group: MemoryLimit

    @property
    def processes(self) -> ServerProcesses:
        return ServerProcesses(self.running.process.pid)


Case = Callable[[Scene], Awaitable[Sequence[ChatAnswer]]]


# --- The cases ---


def of_requests(provoke: Callable[[Target], Awaitable[Sequence[ChatAnswer]]]) -> Case:
    """Return the case in which a client sends these requests while little memory is left."""

    async def case(scene: Scene) -> Sequence[ChatAnswer]:
        scene.group.allow(LEFT_BYTES)
        return await provoke(scene.target)

    return case


async def crowd(target: Target) -> Sequence[ChatAnswer]:
    tokens = min(CROWD_TOKENS, target.usable // 3)
    asked = (
        target.client.chat(target.model, target.prompt(7_000 + number, tokens), 32)
        for number in range(CROWD)
    )
    return await asyncio.gather(*asked)


async def kill(scene: Scene) -> Sequence[ChatAnswer]:
    await asyncio.to_thread(scene.processes.send, signal.SIGKILL)
    return ()


async def hang(scene: Scene) -> Sequence[ChatAnswer]:
    await asyncio.to_thread(scene.processes.send, signal.SIGSTOP)
    return ()


async def oom(scene: Scene) -> Sequence[ChatAnswer]:
    scene.group.allow(ROOM_BYTES)
    await asyncio.to_thread(scene.group.kill_largest)
    return ()


FAULTS: Mapping[str, Case] = {"kill": kill, "hang": hang, "oom": oom}
CASES: Mapping[str, Case] = {
    "full-context": of_requests(requests.full_context),
    "too-long": of_requests(requests.too_long),
    "logprobs": of_requests(requests.prompt_logprobs),
    "images": of_requests(requests.images),
    "choices": of_requests(requests.choices),
    "schema": of_requests(requests.deep_schema),
    "long-answers": of_requests(requests.long_answers),
    "unique": of_requests(requests.unique_prompts),
    "crowd": of_requests(crowd),
    **FAULTS,
}


# --- A case from beginning to end ---


async def play(server: Server, case: str, started: Running, group: MemoryLimit) -> Outcome:
    """Let a case happen in the middle of three answers."""
    async with OpenAIClient(started.url, silence_s=PATIENCE_S) as client:
        target = await describe(client, server.model)
        reference = await undisturbed(target)
        async with bystanders(target, reference) as others:
            causes = await CASES[case](Scene(target, started, group))

        back_s = await seconds_to_answer(target)
        health = "" if back_s is not None else await health_of(client)

    whole = sum(answer.is_whole for answer in others.answers)
    other_words = whole - others.num_same() if reference.texts else None
    return Outcome(
        server=server.name,
        case=case,
        cause=counted(causes),
        whole=whole,
        other_words=other_words,
        broken=len(others.answers) - whole,
        longest_pause_s=round(max(answer.longest_gap_s for answer in others.answers), 2),
        back_s=None if back_s is None else round(back_s, 1),
        health=health,
        errors=[answer.error for answer in others.answers if answer.error],
    )


async def seconds_to_answer(target: Target) -> float | None:
    """Return how long the server takes to answer a new request, or None if it is too long."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        answer = await target.client.chat(target.model, target.prompt(1, 16), 4)
        if answer.is_whole:
            return time.monotonic() - began
        await asyncio.sleep(0.2)
    return None


async def health_of(client: OpenAIClient) -> str:
    """Return "200" if a server that answers no request still calls itself healthy."""
    return "200" if await client.page("/health") is not None else "not 200"


def counted(answers: Sequence[ChatAnswer]) -> str:
    counts = Counter(answer.outcome for answer in answers)
    if len(answers) == 1:
        return answers[0].outcome
    return ", ".join(f"{count} of {len(answers)}: {each}" for each, count in sorted(counts.items()))


@contextlib.contextmanager
def in_group(server: Server, logs: Path) -> Iterator[tuple[Running, MemoryLimit]]:
    """Run a server in a new control group."""
    with memory_limit(GROUP) as group:
        inside = replace(server, command=lambda port: group.inside(server.command(port)))
        with running(inside, logs / f"{server.name}-{time.time():.0f}.log") as started:
            yield started, group


def outcomes_of(server: Server, cases: Sequence[str], logs: Path) -> Iterator[Outcome]:
    """Yield the outcome of each case.

    A server serves one case of requests after the other while it lives. Each fault gets a new
    server.
    """
    waiting = list(cases)
    while waiting:
        with in_group(server, logs) as (started, group):
            while waiting:
                case = waiting.pop(0)
                outcome = asyncio.run(play(server, case, started, group))
                group.lift()
                yield outcome
                if outcome.back_s is None or case in FAULTS:
                    break


# --- The servers ---


def llama_cpp(folder: Path) -> Server:
    server = servers.llama_cpp(folder)

    def command(port: int) -> list[str]:
        words = server.command(port)
        plain = words[: words.index("-np")]
        return [*plain, *LLAMA_OPTIONS.split()]

    return replace(server, command=command, how=LLAMA_OPTIONS)


def ullage(folder: Path) -> Server:
    return servers.ullage(servers.MANIFEST)


def ullage_vllm(folder: Path) -> Server:
    """Return a server that runs Ullage with vLLM, from the environment that has vLLM."""
    python = folder / "vllm" / "bin" / "python"
    server = servers.ullage(ROOT / "examples" / "vllm.yaml")
    return replace(
        server,
        name="ullage+vllm",
        command=lambda port: [str(python), *server.command(port)[1:]],
        environment={"HF_HUB_OFFLINE": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"},
    )


SERVERS: Mapping[str, Callable[[Path], Server]] = {
    "llama.cpp": llama_cpp,
    "vllm": servers.vllm,
    "ullage+vllm": ullage_vllm,
    "ullage": ullage,
}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a Markdown table, ordered by case."""
    head = ["case", "server", "who caused it", "bystanders", "afterwards"]
    rows = [outcome.cells for outcome in outcomes]
    rows.sort(key=lambda row: list(CASES).index(row[0]))
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(outcome: Outcome) -> None:
    print(" | ".join(outcome.cells), flush=True)
    for error in sorted(set(outcome.errors)):
        print(f"    {error}", flush=True)


def chosen(wanted: str, known: Mapping[str, object], option: str) -> list[str]:
    names = wanted.split(",") if wanted else list(known)
    if unknown := [name for name in names if name not in known]:
        raise OptionError(f"{option} {unknown[0]!r} is none of {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser("survive", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", default="", metavar="NAMES", help="servers, joined by commas")
    parser.add_argument("--cases", default="", metavar="NAMES", help="cases, joined by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    options = parser.parse_args(arguments)
    try:
        names = chosen(options.only, SERVERS, "--only")
        cases = chosen(options.cases, CASES, "--cases")
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED

    try:
        with memory_limit(GROUP):
            pass
    except OSError as error:
        print(
            f"error: no control group for the servers: {error}; run this as root, on the host",
            file=sys.stderr,
        )
        return FAILED

    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # As an exception, the signal ends the server of the case, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    outcomes = list[Outcome]()
    try:
        with tempfile.TemporaryDirectory(prefix="ullage-survive-") as logs:
            for name in names:
                for outcome in outcomes_of(SERVERS[name](folder), cases, Path(logs)):
                    show(outcome)
                    outcomes.append(outcome)
                    if options.json:
                        options.json.write_text(json.dumps([asdict(each) for each in outcomes]))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ServerError, TargetError) as error:
        print(f"error: {str(error).removeprefix('error: ')}", file=sys.stderr)
        return FAILED
    finally:
        if outcomes:
            print(f"\n{table(outcomes)}")

    ours = [outcome for outcome in outcomes if outcome.server in OURS]
    return int(any(outcome.broken for outcome in ours))


if __name__ == "__main__":
    sys.exit(main())
