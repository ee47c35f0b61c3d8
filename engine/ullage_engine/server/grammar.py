"""Converts a request's grammar to llguidance's format, and checks it before it reaches a worker.

Errors are ServiceErrors with INVALID_ARGUMENT that name the kind of grammar. For a JSON Schema,
they also include the path of the invalid subschema.
"""

import asyncio
import json
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from llguidance import LLMatcher

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import MAX_SCHEMA_DEPTH
from ullage_engine.protocol.grammar import COMPACT, subschemas

_MAX_VERDICTS = 64
"""Maximum number of cached check results. Each cached grammar takes at most 64 KiB."""
_MAX_COMPILATIONS = 2
_COMPILE_TIMEOUT_S = 20.0
"""Wall-clock limit for compiling one grammar, in seconds. The CPU time limit is lower."""
_TOO_MUCH = "it takes too much time or memory to compile"
_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/")


class Interrupted(Exception):
    """Raised if the grammar compiler was killed from outside.

    It is then unknown whether the grammar is valid.
    """


class Verdict(NamedTuple):
    """Whether a grammar can be used."""

    error: str = ""
    """Why the grammar cannot be used (empty if it can)."""
    path: str = ""
    """Path to the invalid part of a JSON Schema (empty if unknown, or for the whole grammar)."""


async def compile_apart(text: str) -> Verdict:
    """Compile a grammar in a separate process.

    Raises:
        Interrupted: the process timed out or was killed, because the machine was overloaded or out
            of memory.
    """
    process = _compiler()
    try:
        output = await asyncio.to_thread(_communicate, process, text.encode())
    except asyncio.CancelledError:
        process.kill()  # ends the thread that waits for it, too
        raise
    if process.returncode == -signal.SIGKILL:  # the process's own limits send other signals
        raise Interrupted
    error, has_error, path = output.decode(errors="replace").partition("\n")
    if has_error:  # even if the search for the path took too much time or memory
        return Verdict(error, path)
    return Verdict(_TOO_MUCH if process.returncode else "")


def _compiler() -> "subprocess.Popen[bytes]":
    """Start a process that compiles a grammar.

    The process is started with `subprocess`, because asyncio may fork. See `ChildProcess`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "ullage_engine.protocol.grammar"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _communicate(process: "subprocess.Popen[bytes]", text: bytes) -> bytes:
    """Send a grammar to the compiler process and return the process's output.

    Raises:
        Interrupted: the process exceeded the time limit.
    """
    try:
        return process.communicate(text, _COMPILE_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise Interrupted from error


class GrammarCheck:
    """Checks grammars by compiling them in separate processes, because compilation may crash.

    Args:
        compiled: compiles a grammar.
    """

    def __init__(self, compiled: Callable[[str], Awaitable[Verdict]] = compile_apart) -> None:
        self._compiled = compiled
        self._turns = asyncio.Semaphore(_MAX_COMPILATIONS)
        self._alike: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One lock per grammar that is being compiled.

        Concurrent requests with the same grammar share a single compilation.
        """
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()

    async def text(self, request: pb.GenerateRequest) -> str:
        """Check a request's grammar. Return it in llguidance's format, or "" if there is none.

        Raises:
            ServiceError: the grammar is malformed, unsupported or too large.
        """
        if not request.HasField("grammar"):
            return ""
        field, text = grammar_text(request.grammar)
        verdict = await self._verdict(text)
        if verdict.error:
            raise _wrong(field + verdict.path, verdict.error)
        return after_reasoning(text, request.reasoning) if request.reasoning.end else text

    async def _verdict(self, text: str) -> Verdict:
        if text not in self._verdicts:
            async with self._alike.setdefault(text, asyncio.Lock()):
                if text not in self._verdicts:
                    return await self._compile(text)
        self._verdicts.move_to_end(text)
        return self._verdicts[text]

    async def _compile(self, text: str) -> Verdict:
        async with self._turns:
            try:
                verdict = await self._compiled(text)
            except Interrupted:
                return Verdict(
                    _TOO_MUCH
                )  # not cached: the next request with the grammar tries again
        self._verdicts[text] = verdict
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict


def grammar_text(grammar: pb.Grammar) -> tuple[str, str]:
    """Return the name of the grammar field that is set, and the grammar in llguidance's format.

    This function does not compile the grammar.
    """
    kind = grammar.WhichOneof("kind")
    field = f"grammar.{kind}"
    match kind:
        case "json_schema":
            return field, _from_schema(field, grammar.json_schema)
        case "json_object":
            return field, _from_schema(field, '{"type": "object"}')
        case "regex":
            return field, LLMatcher.grammar_from_regex(grammar.regex)
        case "lark":
            return field, LLMatcher.grammar_from_lark(grammar.lark)
        case "choice":
            return field, _from_choice(field, grammar.choice)
        case _:
            raise invalid("grammar", "grammar is empty; set json_schema, regex, lark or choice")


def after_reasoning(text: str, reasoning: pb.Reasoning) -> str:
    """Return a grammar for answers that may begin with reasoning, and then follow a grammar.

    The reasoning is any text up to the mark that ends it. If the prompt does not end with the mark
    that begins it, an answer may also do without.

    Args:
        text: the grammar after the reasoning, in llguidance's format.
        reasoning: the marks.
    """
    answer = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    if reasoning.HasField("end_token_id"):
        thought = f"thought: /(.|\\n)*/ <[{reasoning.end_token_id}]>"
    else:
        thought = f"thought[suffix={json.dumps(reasoning.end)}]: /(.|\\n)*/"

    begin = json.dumps(reasoning.begin)
    if reasoning.HasField("begin_token_id"):
        begin = f"<[{reasoning.begin_token_id}]>"
    start = f"({begin} thought BLANKS)?" if reasoning.begin else "thought BLANKS"
    lark = "\n".join([f"start: {start} @answer", thought, r"BLANKS: /\s{0,4}/"])
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}]})


def _from_choice(field: str, choice: pb.Choice) -> str:
    if not choice.texts or not all(choice.texts):
        raise invalid(field, f"{field} has no text, or an empty one; give at least one")
    return LLMatcher.grammar_from_regex("|".join(map(_escaped, choice.texts)))


def _escaped(text: str) -> str:
    """Return a regular expression that matches exactly the given text."""
    return "".join("\\" + each if each in _SPECIAL else each for each in text)


def _from_schema(field: str, text: str) -> str:
    schema = _parsed(field, text)
    if not isinstance(schema, dict):
        raise invalid(field, f"{field} is not a JSON object; send a JSON Schema")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise invalid(field, f"{field} is nested deeper than {MAX_SCHEMA_DEPTH}; flatten it")
    for path, part in subschemas(schema):
        # llguidance accepts these, but finds no next token for a name that both describe.
        if part.get("properties") and part.get("patternProperties"):
            raise _wrong(field + path, "patternProperties with properties is not supported")
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=COMPACT)
    except ValueError as error:
        raise _wrong(field, str(error)) from error


def _parsed(field: str, text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise invalid(field, f"{field} is nested too deeply; flatten it") from error
    except ValueError as error:
        raise invalid(field, f"{field} is not JSON: {error}; send a JSON Schema") from error


def _depth(value: object) -> int:
    """Return the nesting depth of the objects and arrays in a JSON value."""
    level: list[Any] = [value]
    depth = 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for items in inner for item in items]
    return depth


def _wrong(field: str, error: str) -> ServiceError:
    return invalid(field, f"{field}: {error}; change or simplify it")
