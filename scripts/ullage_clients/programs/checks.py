"""Runs the checks of a program, and prints a line of JSON with the result of each."""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

MODEL = os.environ["SERVICE_MODEL"]
CONTEXT = int(os.environ["SERVICE_CONTEXT"])
URL = os.environ["SERVICE_URL"]

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Schema of the arguments of a tool. A list of values ends at any model's size."""
PAINT = {
    "type": "object",
    "properties": {
        "color": {"type": "string", "enum": ["red", "blue"]},
        "coats": {"type": "integer", "enum": [1, 2]},
    },
    "required": ["color", "coats"],
    "additionalProperties": False,
}
LONG = "word " * (2 * CONTEXT)
"""A prompt beyond the context."""

_checks: list[tuple[str, Callable[[], Any]]] = []


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function as a check. It returns what it saw, and raises if that is wrong."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks.append((name, function))
        return function

    return register


def run() -> None:
    """Run all checks in their order, coroutines in one event loop."""
    with asyncio.Runner() as loop:
        for name, function in _checks:
            try:
                seen = function()
                if inspect.iscoroutine(seen):
                    seen = loop.run(seen)
                passed = True
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                seen = f"{type(error).__name__}: {error}"
                passed = False
            print(json.dumps({"check": name, "passed": passed, "seen": str(seen)}), flush=True)


def expect(condition: object, seen: object) -> None:
    """Fail the check if a condition does not hold."""
    if not condition:
        raise AssertionError(str(seen))


def raised(kind: type[BaseException], function: Callable[[], object]) -> BaseException:
    """Return the exception of this type that a function raises."""
    try:
        answer = function()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {answer!r}")


async def raised_async(kind: type[BaseException], awaitable: Awaitable[object]) -> BaseException:
    """Return the exception of this type that an awaitable raises."""
    try:
        answer = await awaitable
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {answer!r}")


def is_city(arguments: str) -> bool:
    """Return whether arguments are what the schema CITY allows."""
    value = json.loads(arguments)
    return set(value) == {"city"} and value["city"] in ("Paris", "Rome")


def is_paint(text: str) -> bool:
    """Return whether a text is JSON that the schema PAINT allows."""
    value = json.loads(text)
    return (
        set(value) == {"color", "coats"}
        and value["color"] in ("red", "blue")
        and value["coats"] in (1, 2)
    )
