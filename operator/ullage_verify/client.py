"""A client of OpenAI's HTTP API that records statuses, texts, pauses and failures of responses."""

import asyncio
import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import aiohttp

SILENCE_S = 60.0
"""Maximum number of seconds to wait for the next byte of a response."""
MAX_ERROR_CHARS = 300
CONNECT_S = 10.0
DEFAULT_BUFFER_BYTES = 1 << 16
RETRY_S = 1.0
"""Seconds before the next request after a failure, or after a refusal without a Retry-After."""
MAX_PAUSE_S = 60.0
MAX_TRIES = 10
"""Maximum number of times that a client sends a request if it obeys Retry-After."""
MAX_RETRY_AFTER_S = 120.0
"""Longest Retry-After, in seconds, for which a client waits before it retries."""
_TEXT_FIELDS = ("reasoning_content", "reasoning", "content", "text")

Document = Mapping[str, Any]
"""A parsed JSON object."""
Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat, in OpenAI's format."""


@dataclass
class ChatAnswer:
    """The outcome of one request. Times are in seconds, on the monotonic clock."""

    began_at: float
    status: int = 0
    """HTTP status, or 0 if the server sent none."""
    retry_after_s: float | None = None
    error: str = ""
    """Description of the failure (empty for a complete response)."""
    texts: dict[int, str] = field(default_factory=dict)
    """Text of each choice, with the names and arguments of its tool calls."""
    finish_reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_pieces: int = 0
    """Number of stream events that contained text."""
    first_at: float | None = None
    """Time at which the first text arrived."""
    last_at: float | None = None
    """Time at which the last text arrived."""
    ended_at: float = 0.0
    longest_gap_s: float = 0.0
    """Longest time between two events with text, or between the last one and the end."""
    body: Document = field(default_factory=dict)
    """Parsed body of a response that is not a stream."""
    engine: str = ""
    """Name of the engine that answered, which Ullage states (empty if unknown)."""
    degraded: str = ""
    """Parameters that Ullage says it lowered for lack of memory, such as `top_p=0.9`."""

    @property
    def text(self) -> str:
        """Return the texts of all choices, in the order of their indices."""
        return "".join(self.texts[index] for index in sorted(self.texts))

    @property
    def is_whole(self) -> bool:
        """Return whether the response is complete and ended as OpenAI's API specifies."""
        return self.status == 200 and not self.error

    @property
    def is_refused(self) -> bool:
        """Return whether the server refused the request with status 429 or 503."""
        return self.status in (429, 503)

    @property
    def pause_s(self) -> float:
        """Return how many seconds a client waits after a failure or a refusal, at most a minute."""
        return min(self.retry_after_s or RETRY_S, MAX_PAUSE_S)

    @property
    def ttft_s(self) -> float:
        """Return the seconds to the first token, or to the end of a response that has no text."""
        return (self.first_at or self.ended_at) - self.began_at

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at

    @property
    def outcome(self) -> str:
        """Return the outcome as a word for tables: an HTTP status, "broken" or "silent"."""
        if self.status == 200 and self.error:
            return "silent" if self.error.startswith("silent") else "broken"
        return str(self.status) if self.status else self.error.partition(" ")[0]

    def add_text(self, text: str, index: int = 0) -> None:
        """Append newly arrived text to a choice, and update the response's timing."""
        now = time.monotonic()
        if self.last_at is not None:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
        self.first_at = self.first_at or now
        self.last_at = now
        self.texts[index] = self.texts.get(index, "") + text
        self.num_pieces += 1


@dataclass(frozen=True)
class Page:
    """The outcome of a GET request."""

    status: int
    """HTTP status, or 0 if the server sent none."""
    text: str
    """The response body, or a description of the failure if `status` is 0."""


class OpenAIClient:
    """An HTTP client of one server.

    Args:
        url: base URL, with or without /v1.
        key: API key (empty if the server needs none).
        silence_s: maximum number of seconds to wait for the next byte of a response.
        buffer_bytes: size of the receive buffers (0 for the system's default). If they are small,
            the server soon notices that a client reads slowly.
    """

    def __init__(
        self, url: str, key: str = "", silence_s: float = SILENCE_S, buffer_bytes: int = 0
    ) -> None:
        self._key = key
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=silence_s)
        self._http = aiohttp.ClientSession(
            # Some servers close a connection after a stream, while the next request is in flight.
            connector=aiohttp.TCPConnector(
                limit=0,
                force_close=True,
                socket_factory=partial(_socket, buffer_bytes) if buffer_bytes else None,
            ),
            read_bufsize=buffer_bytes or DEFAULT_BUFFER_BYTES,
            timeout=timeout,
            headers=headers,
            trust_env=False,
        )

    def with_buffers(self, num_bytes: int) -> "OpenAIClient":
        """Return another client of the same server, with receive buffers of `num_bytes`."""
        return OpenAIClient(self.url, self._key, buffer_bytes=num_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._http.close()

    async def chat(
        self,
        model: str,
        messages: Messages,
        max_tokens: int,
        on_text: Callable[[ChatAnswer], Any] | None = None,
        traceparent: str = "",
        **fields: Any,
    ) -> ChatAnswer:
        """Request a greedy chat completion as a stream, and read it to its end.

        Args:
            model: name of the model.
            messages: the prompt.
            max_tokens: maximum number of tokens in the response.
            on_text: called after each event with text. If it returns an awaitable, the client
                awaits it before it reads on.
            traceparent: W3C trace context that the server continues (empty for none).
            fields: further fields of the request, which take precedence over all others.
        """
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        return await self.post("chat/completions", body, on_text, traceparent)

    async def post(
        self,
        path: str,
        body: Document,
        on_text: Callable[[ChatAnswer], Any] | None = None,
        traceparent: str = "",
    ) -> ChatAnswer:
        """Send a request to a path below /v1, and read the response to its end.

        If the server fails, no exception is raised. The returned answer describes the failure.
        """
        answer = ChatAnswer(time.monotonic())
        headers = {"traceparent": traceparent} if traceparent else {}
        url = f"{self.url}/v1/{path}"
        try:
            async with self._http.post(url, json=body, headers=headers) as response:
                answer.status = response.status
                answer.retry_after_s = _seconds(response.headers.get("retry-after"))
                answer.engine = response.headers.get("x-ullage-engine", "")
                answer.degraded = response.headers.get("x-ullage-degraded", "")
                if response.status != 200:
                    answer.error = (await response.text())[:MAX_ERROR_CHARS]
                elif body.get("stream"):
                    await _read_stream(response, answer, on_text)
                else:
                    _read_body(await response.json(), answer)
        except TimeoutError:
            since = answer.last_at or answer.began_at
            answer.longest_gap_s = max(answer.longest_gap_s, time.monotonic() - since)
            answer.error = f"silent for {time.monotonic() - since:.0f} s"
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            answer.error = f"broken off: {error or type(error).__name__}"[:MAX_ERROR_CHARS]
        except (TypeError, AttributeError) as error:
            answer.error = f"broken off: a field has another type than in OpenAI's API ({error})"
        answer.ended_at = time.monotonic()
        if answer.last_at is not None:
            answer.longest_gap_s = max(answer.longest_gap_s, answer.ended_at - answer.last_at)
        return answer

    async def obey(
        self, model: str, messages: Messages, max_tokens: int, **fields: Any
    ) -> Sequence[ChatAnswer]:
        """Send a request, and retry it after each refusal once its Retry-After has expired.

        Returns:
            The responses to all attempts, in order. The last one is a refusal only if the server
            refused MAX_TRIES attempts, or if its last refusal had no Retry-After or one above
            MAX_RETRY_AFTER_S.
        """
        answers: list[ChatAnswer] = []
        for _ in range(MAX_TRIES):
            answers.append(await self.chat(model, messages, max_tokens, **fields))
            wait_s = answers[-1].retry_after_s or 0.0
            if not answers[-1].is_refused or not 0 < wait_s <= MAX_RETRY_AFTER_S:
                break
            await asyncio.sleep(wait_s)
        return answers

    async def get(self, path: str) -> Page:
        """Fetch a page from the server. If there is no response, `status` is 0 in the result."""
        try:
            async with self._http.get(f"{self.url}{path}") as response:
                return Page(response.status, await response.text(errors="replace"))
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            return Page(0, str(error) or type(error).__name__)

    async def page(self, path: str) -> str | None:
        """Return the text of a page, or None if the status of the response is not 200."""
        page = await self.get(path)
        return page.text if page.status == 200 else None

    async def document(self, path: str) -> Document:
        """Return the JSON object at a path (empty if the server does not serve one there)."""
        text = await self.page(path)
        try:
            document = json.loads(text) if text else None
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}


async def _read_stream(
    response: aiohttp.ClientResponse,
    answer: ChatAnswer,
    on_text: Callable[[ChatAnswer], Any] | None,
) -> None:
    is_done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue  # a comment that keeps the connection alive, or an empty line
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            is_done = True
            continue

        event = _object(json.loads(data))
        if event.get("error"):
            answer.error = f"broken off: {json.dumps(event['error'])}"[:MAX_ERROR_CHARS]
        _add_usage(event, answer)
        for choice in event.get("choices") or ():
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            text = _text_of(choice.get("delta") or choice)
            if not text:
                continue
            answer.add_text(text, choice.get("index") or 0)
            if on_text and (waiting := on_text(answer)) is not None:
                await waiting

    if not answer.error and not (is_done and answer.finish_reason):
        answer.error = "broken off: the stream ended without a finish reason"


def _read_body(body: object, answer: ChatAnswer) -> None:
    answer.body = _object(body)
    _add_usage(answer.body, answer)
    for choice in answer.body.get("choices") or ():
        answer.finish_reason = choice.get("finish_reason") or ""
        answer.texts[choice.get("index") or 0] = _text_of(choice.get("message") or choice)


def _object(value: object) -> Document:
    """Return a parsed JSON value after checking that it is an object.

    Raises:
        ValueError: the value is not an object.
    """
    if not isinstance(value, dict):
        raise ValueError(f"the server sent {str(value)[:40]!r} in place of an object")
    return value


def _text_of(part: Document) -> str:
    """Return the text of a message, delta or choice, including its reasoning and tool calls."""
    calls = [call.get("function") or {} for call in part.get("tool_calls") or ()]
    words = [part.get(name) or "" for name in _TEXT_FIELDS]
    words += [f"{call.get('name') or ''}{call.get('arguments') or ''}" for call in calls]
    return "".join(word for word in words if isinstance(word, str))


def _add_usage(document: Document, answer: ChatAnswer) -> None:
    usage = document.get("usage") or {}
    answer.prompt_tokens = usage.get("prompt_tokens") or answer.prompt_tokens
    answer.output_tokens = usage.get("completion_tokens") or answer.output_tokens


def _socket(num_bytes: int, address: Any) -> socket.socket:
    """Return a socket with a receive buffer of the given size."""
    family, kind, protocol, _, _ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)
    return connection


def _seconds(header: str | None) -> float | None:
    """Return the seconds in a Retry-After header, or None if it contains no positive number."""
    try:
        seconds = float(header) if header else 0.0
    except ValueError:
        return None  # the header may have a date, and no server of this kind sends one
    return seconds if 0 < seconds < math.inf else None
