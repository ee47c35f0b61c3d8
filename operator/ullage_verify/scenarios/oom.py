"""Sends requests that have crashed other engines, and checks that other streams are unharmed."""

import asyncio
import base64
import struct
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ullage_verify.bystanders import bystanders, undisturbed
from ullage_verify.client import ChatAnswer
from ullage_verify.criteria import Checks
from ullage_verify.kv_cache import PeakUse, capacity_tokens, watched_use
from ullage_verify.scenarios.settings import ScenarioSettings
from ullage_verify.target import Target

LARGE_PROMPT_TOKENS = 12_000
LARGE_ANSWER_TOKENS = 1_000
"""Number of output tokens of each large request in scenario 1 of the requirements."""
NUM_LARGE = 4
MAX_GAP_S = 30.0
"""Maximum pause, in seconds, in the streams of other clients."""
BACK_WITHIN_S = 30.0
"""Seconds within which the memory of all requests must be free again."""
REFUSED_WITHIN_S = 10.0
"""Seconds within which a request that can never fit must be refused."""
NUM_LONG_ANSWERS = 24
KV_EXCESS = 1.25
"""Tokens of the requests that fill the KV cache, as a multiple of what the cache holds."""
KV_CONTEXTS = 4
"""Assumed size of a KV cache that the server does not report, in contexts."""
MAX_FILLING = 96
"""Maximum number of requests that fill the KV cache."""
FULL_SHARE = 0.7
"""Minimum share of the KV cache in use for a full cache. The next request may need the rest."""
NUM_UNIQUE = 120
NUM_AT_ONCE = 8
NUM_CHOICES = 64
GROWTH_SHARE = 0.05
"""Maximum fraction of the initially free memory that may still be missing after the run."""
IMAGE_SIDE = 8_192
NUM_IMAGES = 4
SCHEMA_DEPTH = 400


@dataclass(frozen=True)
class Case:
    """One or more requests that may crash an engine, for example those from a public bug report."""

    name: str
    report: str
    """Public bug reports of such a crash, as project#number (empty without one)."""
    provoke: Callable[[Target], Awaitable[Sequence[ChatAnswer]]]
    must_refuse: bool = False
    """Whether the server must refuse the request, because it can never be served."""
    fills_kv: bool = False
    """Whether the requests together exceed the KV cache."""


async def full_context(target: Target) -> Sequence[ChatAnswer]:
    prompt = target.prompt(1, target.usable - 16)
    return [await target.client.chat(target.model, prompt, 16)]


async def too_long(target: Target) -> Sequence[ChatAnswer]:
    prompt = target.prompt(2, 2 * target.context)
    return [await target.client.chat(target.model, prompt, 16)]


async def prompt_logprobs(target: Target) -> Sequence[ChatAnswer]:
    text = target.prompt(3, target.usable * 3 // 4)[0]["content"]
    body = {"model": target.model, "prompt": text, "max_tokens": 1, "prompt_logprobs": 20}
    shorter = target.prompt(3, target.usable // 2)[0]["content"]
    echo = {"model": target.model, "prompt": shorter, "max_tokens": 1, "echo": True, "logprobs": 5}
    return [
        await target.client.post("completions", body),
        await target.client.post("completions", echo),
    ]


async def adapters(target: Target) -> Sequence[ChatAnswer]:
    prompt = target.prompt(4, target.usable - 16)
    return await asyncio.gather(*(target.client.chat(name, prompt, 16) for name in target.adapters))


async def images(target: Target) -> Sequence[ChatAnswer]:
    url = await asyncio.to_thread(_blank_png, IMAGE_SIDE)  # the other streams must not wait for it
    picture = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "What is this?"}
    messages = [{"role": "user", "content": [text, *[picture] * NUM_IMAGES]}]
    return [await target.client.chat(target.model, messages, 16)]


async def long_answers(target: Target) -> Sequence[ChatAnswer]:
    tokens = min(512, target.usable // 4)
    requests = (
        target.client.chat(target.model, target.prompt(100 + number, 64), tokens, ignore_eos=True)
        for number in range(NUM_LONG_ANSWERS)
    )
    return await asyncio.gather(*requests)


async def full_kv_cache(target: Target) -> Sequence[ChatAnswer]:
    capacity = await capacity_tokens(target) or KV_CONTEXTS * target.context
    tokens = min(int(KV_EXCESS * capacity / NUM_LONG_ANSWERS), target.usable)
    answer_tokens = min(tokens // 4, LARGE_ANSWER_TOKENS)
    # If the context limits the size of a request, more requests fill the cache.
    count = min(int(KV_EXCESS * capacity / tokens) + 1, MAX_FILLING)
    requests = (
        target.client.chat(
            target.model,
            target.prompt(300 + number, tokens - answer_tokens),
            answer_tokens,
            ignore_eos=True,
        )
        for number in range(count)
    )
    return await asyncio.gather(*requests)


async def choices(target: Target) -> Sequence[ChatAnswer]:
    prompt = target.prompt(5, target.usable // 2)
    fields: dict[str, Any] = {"n": NUM_CHOICES, "temperature": 1.0}
    return [await target.client.chat(target.model, prompt, 64, **fields)]


async def unique_prompts(target: Target) -> Sequence[ChatAnswer]:
    numbers = iter(range(1_000, 1_000 + NUM_UNIQUE))
    answers: list[ChatAnswer] = []

    async def ask() -> None:
        for number in numbers:
            prompt = target.prompt(number, min(256, target.usable // 4))
            answers.append(await target.client.chat(target.model, prompt, 4))

    await asyncio.gather(*(ask() for _ in range(NUM_AT_ONCE)))
    return answers


async def deep_schema(target: Target) -> Sequence[ChatAnswer]:
    wanted = {"name": "deep", "schema": _deep_schema(SCHEMA_DEPTH)}
    fields: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": wanted}}
    return [await target.client.chat(target.model, target.prompt(6, 64), 32, **fields)]


CASES = (
    Case("a prompt that fills the context", "vllm#52871", full_context),
    Case("a prompt that never fits", "ollama#16830", too_long, must_refuse=True),
    Case("log-probabilities of a long prompt", "vllm#14239, gonka#1171", prompt_logprobs),
    Case("a long prompt to each adapter", "vllm#15039", adapters),
    Case("images of 8192 x 8192", "vllm#48469, vllm#35191", images),
    Case("many long answers at once", "vllm#25538, vllm-ascend#16315", long_answers),
    Case(
        "more than the KV cache holds",
        "sglang#14972, sglang#23181",
        full_kv_cache,
        fills_kv=True,
    ),
    Case("64 answers to a long prompt", "", choices),
    Case("a stream of unique prompts", "llama.cpp#23181", unique_prompts),
    Case("a schema of 400 levels", "", deep_schema),
)


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Send large requests, then run each case alongside three streams and check those streams."""
    before = await _headroom(target)
    await _large_prompts(target, checks)

    reference = await undisturbed(target)
    for case in CASES:
        if case.provoke is adapters and not target.adapters:
            checks.skip(case.name, "the server lists no adapters")
            continue
        settings.progress(case.name)
        use: PeakUse | None = None
        async with bystanders(target, reference) as crowd:
            if case.fills_kv:
                async with watched_use(target) as use:
                    answers = await case.provoke(target)
            else:
                answers = await case.provoke(target)
        _check_statuses(checks, case, answers)
        if use:
            _check_full(target, checks, case, answers, use)
        crowd.check(checks, case.name, MAX_GAP_S)

        hello = await target.client.chat(target.model, target.prompt(7, 16), 4)
        checks.holds(f"{case.name}: a new request afterwards", hello.is_whole, "200", hello.outcome)
        if not hello.is_whole and not hello.is_refused:
            checks.skip("all later cases", "the server no longer answers")
            return

    await _memory_returns(target, checks, before)


async def _large_prompts(target: Target, checks: Checks) -> None:
    """Run scenario 1: four prompts of 12,000 tokens at once, with 1,000 output tokens each."""
    answer_tokens = min(LARGE_ANSWER_TOKENS, target.usable // 8)
    prompt_tokens = min(LARGE_PROMPT_TOKENS, target.usable - answer_tokens)
    requests = (
        target.client.chat(
            target.model, target.prompt(number, prompt_tokens), answer_tokens, ignore_eos=True
        )
        for number in range(NUM_LARGE)
    )
    answers = await asyncio.gather(*requests)
    name = f"{NUM_LARGE} x {prompt_tokens} tokens at once, {answer_tokens} in each answer"
    statuses = {answer.outcome for answer in answers}
    is_served = "200" in statuses and statuses <= {"200", "429"}
    checks.holds(name, is_served, "200 or 429 only, and a 200", _counted(answers))


def _check_statuses(checks: Checks, case: Case, answers: Sequence[ChatAnswer]) -> None:
    name = f"{case.name}: the answer"
    is_orderly = all(a.is_whole or 400 <= a.status < 500 or a.status == 503 for a in answers)
    if not case.must_refuse:
        checks.holds(name, is_orderly, "200, 4xx or 503", _counted(answers))
        return
    (answer,) = answers
    checks.holds(name, 400 <= answer.status < 500, "4xx", _counted(answers))
    checks.at_most(f"{case.name}: time to the refusal", answer.seconds, REFUSED_WITHIN_S)


def _check_full(
    target: Target, checks: Checks, case: Case, answers: Sequence[ChatAnswer], use: PeakUse
) -> None:
    """Check that the KV cache was full, because the case proves nothing otherwise."""
    name = f"{case.name}: the cache was full"
    num_refused = sum(answer.is_refused for answer in answers)
    if num_refused:
        checks.holds(name, True, "", f"{num_refused} of {len(answers)} requests were refused")
    elif use.share is None:
        checks.skip(name, target.unreported("the use of its KV cache (/stats, /metrics)"))
    elif use.share < FULL_SHARE:
        checks.skip(name, f"at most {use.share:.0%} of it was in use; limit the cache to play this")
    else:
        checks.holds(name, True, "", f"{use.share:.0%} of it was in use")


async def _memory_returns(target: Target, checks: Checks, before: float | None) -> None:
    name = "free memory returns to its start value"
    if not before:
        checks.skip(name, target.unreported("its free memory (/stats)"))
        return
    for _ in range(int(BACK_WITHIN_S)):
        share = (await _headroom(target) or 0.0) / before
        if share >= 1 - GROWTH_SHARE:
            break
        await asyncio.sleep(1.0)
    checks.at_least(name, share, 1 - GROWTH_SHARE, "of it")


async def _headroom(target: Target) -> float | None:
    """Return the total free KV bytes of all engines, or None if none are reported."""
    stats = await target.stats()
    return sum(engine.get("headroom_bytes", 0) for engine in stats.get("engines", ())) or None


def _counted(answers: Sequence[ChatAnswer]) -> str:
    counts = sorted(Counter(answer.outcome for answer in answers).items())
    if len(answers) == 1:
        return counts[0][0]
    return ", ".join(f"{count} x {outcome}" for outcome, count in counts) or "none"


def _deep_schema(depth: int) -> dict[str, object]:
    """Return a JSON schema with `depth` levels of nested objects.

    The objects of each level have two properties, and both refer to the next level's schema.
    """
    levels: dict[str, object] = {
        f"level{number}": {
            "type": "object",
            "properties": {
                name: {"$ref": f"#/$defs/level{number + 1}"} for name in ("left", "right")
            },
            "required": ["left"],
        }
        for number in range(depth)
    }
    levels[f"level{depth}"] = {"type": "string"}
    return {"$ref": "#/$defs/level0", "$defs": levels}


def _blank_png(side: int) -> str:
    """Return a data URL of a white square PNG, which is small but decodes to a large image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\xff" * side) * side, 9)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)
    return "data:image/png;base64," + base64.b64encode(png + chunk(b"IEND", b"")).decode()
