"""Show what clients see if memory runs out, a worker dies or hangs, or a request is excessive.

Each case starts a new server in a control group. Three clients each stream an answer from the
server. The case happens in the middle of their answers. The table has a row for each case and
server:

who caused it  the answer to the request that caused the case
bystanders     how many of the three streams ended as they do without the case, how many ended
               with other words, how many broke off, and the longest pause between two words
afterwards     seconds until the server answered a new request; "dead" if it did not in time

The cases:

too-long   a prompt that is longer than the context
crowd      sixty long requests at once
kill       SIGKILL to the largest process, which computes the model
hang       SIGSTOP to the same process
oom        the kernel kills the largest process, because the group's memory is full
logprobs   `prompt_logprobs` for a long prompt, with 300 MiB of memory left

The other servers are installed in DIR unless they are there, as by `python -m benchmarks compare`.
Control groups need root.

examples:
  python -m benchmarks survive .peers
  python -m benchmarks survive .peers --only ullage,vllm --cases oom,logprobs --json survive.json

exit status: 0 every bystander of Ullage got its whole answer, 1 one did not, 2 an option is wrong
or a server did not start, 130 interrupted
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.compare import servers
from benchmarks.compare.servers import ROOT, Running, Server, running
from benchmarks.support.load import ServerError, messages
from benchmarks.support.options import new_parser
from ullage_verify.memory_limit import MemoryLimit, memory_limit

OURS = ("ullage", "ullage+vllm")
LLAMA_OPTIONS = "-np 16 -c 65536"
"""Options for sixteen slots of 4096 tokens each."""
STORIES = ("Why is the sky blue?", "What is gravity?", "Tell me about the sea.")
STORY_TOKENS = 250
BEGUN_WORDS = 10
"""Number of pieces that each stream must receive before the case happens."""
CROWD = 60
CROWD_WORDS = 600
TOO_MANY_WORDS = 20_000
LOGPROBS_WORDS = 3_000
LEFT_BYTES = 300 << 20
ROOM_BYTES = 128 << 20
GROUP = f"ullage-survive-{os.getpid()}"
FAILED = 2
INTERRUPTED = 130
TERMINATED = 143
PATIENCE_S = 150.0
"""Maximum seconds to wait for a word, or for an answer after the case."""


class OptionError(Exception):
    """An option names something that does not exist."""


@dataclass
class Stream:
    """The answer that one bystander received."""

    text: str = ""
    pieces: int = 0
    longest_pause_s: float = 0.0
    error: str = ""
    is_whole: bool = False


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    server: str
    case: str
    cause: str
    whole: int
    other_words: int
    broken: int
    longest_pause_s: float
    back_s: float | None
    errors: list[str] = field(default_factory=list)

    @property
    def cells(self) -> list[str]:
        parts = [f"{self.whole} whole"]
        parts += [f"{self.other_words} with other words"] if self.other_words else []
        parts += [f"{self.broken} broken"] if self.broken else []
        seen = f"{', '.join(parts)}, pause {self.longest_pause_s:.1f} s"
        back = "dead" if self.back_s is None else f"answers after {self.back_s:.1f} s"
        return [self.case, self.server, self.cause or "-", seen, back]


@dataclass(frozen=True)
class Scene:
    """A server in the middle of a case."""

    session: aiohttp.ClientSession
    running: Running
    model: str
    group: MemoryLimit

    @property
    def worker(self) -> psutil.Process:
        """The process that computes the model."""
        return max(self.running.family(), key=lambda process: process.memory_info().rss)

    async def post(self, path: str, **body: Any) -> str:
        """Send a request, and return the HTTP status of the answer."""
        url = f"{self.running.url}/v1/{path}"
        try:
            async with self.session.post(url, json={"model": self.model, **body}) as response:
                await response.read()
                return str(response.status)
        except TimeoutError:
            return "silence"
        except aiohttp.ClientError:
            return "broken"


# --- The cases ---


async def too_long(scene: Scene) -> str:
    prompt = messages(1, TOO_MANY_WORDS)
    return await scene.post("chat/completions", messages=prompt, max_tokens=16)


async def crowd(scene: Scene) -> str:
    requests = [
        scene.post("chat/completions", messages=messages(number, CROWD_WORDS), max_tokens=32)
        for number in range(CROWD)
    ]
    statuses = Counter(await asyncio.gather(*requests))
    return ", ".join(f"{count} of {CROWD}: {status}" for status, count in sorted(statuses.items()))


async def kill(scene: Scene) -> str:
    scene.worker.send_signal(signal.SIGKILL)
    return ""


async def hang(scene: Scene) -> str:
    scene.worker.send_signal(signal.SIGSTOP)
    return ""


async def oom(scene: Scene) -> str:
    scene.group.allow(ROOM_BYTES)
    await asyncio.to_thread(scene.group.kill_largest)
    return ""


async def logprobs(scene: Scene) -> str:
    scene.group.allow(LEFT_BYTES)
    prompt = messages(2, LOGPROBS_WORDS)[0]["content"]
    return await scene.post("completions", prompt=prompt, max_tokens=1, prompt_logprobs=5)


CASES: Mapping[str, Callable[[Scene], Awaitable[str]]] = {
    "too-long": too_long,
    "crowd": crowd,
    "kill": kill,
    "hang": hang,
    "oom": oom,
    "logprobs": logprobs,
}


# --- The bystanders ---


async def follow(scene: Scene, question: str, stream: Stream) -> None:
    """Stream an answer to its end, or until the stream breaks."""
    body = {
        "model": scene.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": STORY_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    last = time.monotonic()
    url = f"{scene.running.url}/v1/chat/completions"
    try:
        async with scene.session.post(url, json=body) as response:
            if response.status != 200:
                stream.error = str(response.status)
                return
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    stream.is_whole = not stream.error
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    stream.error = json.dumps(event["error"])[:200]
                for choice in event.get("choices", ()):
                    if not (text := choice["delta"].get("content")):
                        continue
                    now = time.monotonic()
                    if stream.pieces:
                        stream.longest_pause_s = max(stream.longest_pause_s, now - last)
                    last = now
                    stream.text += text
                    stream.pieces += 1
    except TimeoutError:
        stream.error = "silence"
        stream.longest_pause_s = max(stream.longest_pause_s, time.monotonic() - last)
    except (aiohttp.ClientError, json.JSONDecodeError) as error:
        stream.error = type(error).__name__
    if not stream.is_whole and not stream.error:
        stream.error = "the stream ended early"


def has_begun(stream: Stream, follower: asyncio.Task[None]) -> bool:
    return stream.pieces >= BEGUN_WORDS or follower.done()


async def seconds_to_answer(scene: Scene) -> float | None:
    """Return the seconds until the server answers a new request (None if it does not in time)."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        prompt = [{"role": "user", "content": "Hello"}]
        status = await scene.post("chat/completions", messages=prompt, max_tokens=4)
        if status == "200":
            return time.monotonic() - began
        await asyncio.sleep(0.2)
    return None


async def play(server: Server, case: str, scene: Scene) -> Outcome:
    """Let a case happen in the middle of the three clients' answers."""
    expected = [Stream() for _ in STORIES]
    await asyncio.gather(*map(partial(follow, scene), STORIES, expected))

    seen = [Stream() for _ in STORIES]
    followers = [
        asyncio.create_task(follow(scene, story, stream))
        for story, stream in zip(STORIES, seen, strict=True)
    ]
    while not all(map(has_begun, seen, followers)):  # noqa: ASYNC110 - of several streams
        await asyncio.sleep(0.01)

    cause = await CASES[case](scene)
    await asyncio.gather(*followers)
    back_s = await seconds_to_answer(scene)

    whole = [s for s in seen if s.is_whole]
    same = sum(s.is_whole and s.text == e.text for s, e in zip(seen, expected, strict=True))
    return Outcome(
        server=server.name,
        case=case,
        cause=cause,
        whole=same,
        other_words=len(whole) - same,
        broken=len(seen) - len(whole),
        longest_pause_s=round(max(s.longest_pause_s for s in seen), 2),
        back_s=None if back_s is None else round(back_s, 1),
        errors=[s.error for s in seen if s.error],
    )


async def run_case(server: Server, case: str, logs: Path) -> Outcome:
    """Start a server in a control group, let a case happen, and end the server."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    with memory_limit(GROUP) as group:
        inside = replace(server, command=lambda port: group.inside(server.command(port)))
        log = logs / f"{server.name}-{case}.log"
        with running(inside, log) as started:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                return await play(server, case, Scene(session, started, server.model, group))


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
            for name, case in itertools.product(names, cases):
                outcome = asyncio.run(run_case(SERVERS[name](folder), case, Path(logs)))
                show(outcome)
                outcomes.append(outcome)
                if options.json:
                    options.json.write_text(json.dumps([asdict(each) for each in outcomes]))
    except KeyboardInterrupt:
        return INTERRUPTED
    except ServerError as error:
        print(error, file=sys.stderr)
        return FAILED
    finally:
        if outcomes:
            print(f"\n{table(outcomes)}")

    ours = [outcome for outcome in outcomes if outcome.server in OURS]
    return int(any(outcome.broken or outcome.other_words for outcome in ours))


if __name__ == "__main__":
    sys.exit(main())
