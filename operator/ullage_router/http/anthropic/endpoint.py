"""The dialects of /v1/messages and /v1/messages/count_tokens."""

import functools
from collections.abc import Mapping

from ullage_router.http.anthropic import requests
from ullage_router.http.anthropic.answer import MessagesAnswer
from ullage_router.http.anthropic.errors import ERRORS
from ullage_router.http.messages import Body, Headers
from ullage_router.http.openai.endpoint import CountAnswer, Dialect, Parsed, bearer
from ullage_router.http.openai.errors import sse_event
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.session import TenantSession

PING = sse_event(b'{"type":"ping"}', "ping")


def _parse_messages(body: Body, _: TenantSession) -> Parsed:
    asked, ignored = requests.parse_messages(body.take())
    shows_thinking = requests.shows_thinking(asked)
    return Parsed(
        [requests.from_messages(asked)],
        is_streamed=bool(asked.stream),
        answer=functools.partial(MessagesAnswer, shows_thinking=shows_thinking),
        ignored=ignored,
    )


def _parse_count(body: Body, _: TenantSession) -> Parsed:
    asked, ignored = requests.parse_count(body.take())
    requests.shows_thinking(asked)
    return Parsed(
        [requests.from_count(asked)],
        is_streamed=False,
        answer=lambda _: CountAnswer(ERRORS),
        ignored=ignored,
        counts_only=True,
    )


def credentials(headers: Mapping[str, str]) -> str | None:
    """Return a request's credentials: the `authorization` header, or a key in `x-api-key`."""
    key = headers.get("x-api-key")
    return bearer(headers) or (f"Bearer {key}" if key else None)


def _headers(record: RequestRecord) -> Headers:
    return [(b"request-id", record.request_id.encode())]


MESSAGES = Dialect(_parse_messages, ERRORS, PING, credentials, _headers)
COUNT_TOKENS = Dialect(_parse_count, ERRORS, PING, credentials, _headers)
