"""Instructor: objects of pydantic from tools and JSON schemas."""

from typing import Literal

import instructor
import openai
from checks import LONG, MODEL, check, expect, run
from instructor.core import InstructorRetryException
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Choose the paint of a wall."}]


class Paint(BaseModel):
    color: Literal["red", "blue"]
    coats: Literal[1, 2]


tools = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.TOOLS)
schemas = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.JSON_SCHEMA)


def paint(client, model=MODEL, messages=MESSAGES, **options):
    return client.chat.completions.create(
        model=model,
        messages=messages,
        response_model=Paint,
        max_tokens=64,
        max_retries=0,
        **options,
    )


@check("tools")
def from_tools():
    answer = paint(tools)
    expect(isinstance(answer, Paint), answer)
    return repr(answer)


@check("JSON schema")
def json_schema():
    answer = paint(schemas)
    expect(isinstance(answer, Paint), answer)
    return repr(answer)


@check("partial")
def partial():
    parts = list(
        tools.chat.completions.create_partial(
            model=MODEL, messages=MESSAGES, response_model=Paint, max_tokens=64, max_retries=0
        )
    )
    expect(parts and parts[-1].color and parts[-1].coats, parts)
    return f"{len(parts)} parts, {parts[-1]!r}"


def status(error):
    """Return the HTTP status of an error, or of the error that Instructor wraps."""
    while error:
        if isinstance(error, openai.APIStatusError):
            return error.status_code
        error = error.__cause__
    return None


def refused(expected, **options):
    try:
        answer = paint(tools, **options)
    except (openai.APIStatusError, InstructorRetryException) as error:
        expect(status(error) == expected, repr(error))
        return f"{type(error).__name__}, {expected}"
    raise AssertionError(f"no error, but {answer!r}")


@check("wrong model")
def wrong_model():
    return refused(404, model="absent")


@check("long prompt")
def long_prompt():
    return refused(400, messages=[{"role": "user", "content": LONG}])


run()
