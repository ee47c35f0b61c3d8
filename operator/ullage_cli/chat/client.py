"""A client of OpenAI's chat API that streams an answer, and says what happened to it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

CONNECT_S = 10.0
"""Timeout for connecting to the server, in seconds."""
SILENCE_S = 600.0
"""Maximum number of seconds to wait for the next bytes of an answer, which may be queued."""

DEGRADED = "x-ullage-degraded"
RESUMED_COMMENT = ": x-ullage-resumed-inexact: true"
"""Comment with which a stream says that another engine has continued it, and computes otherwise."""

Message = Mapping[str, Any]
"""A message of a chat, in OpenAI's format."""


class ChatFailure(Exception):
    """The server refused a request, or ended an answer with an error.

    Args:
        message: the reason, in one line.
        retry_after_s: seconds after which a retry may succeed, or None.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """A part of an answer, as it arrives."""

    text: str = ""
    thought: str = ""
    """Text of the model's reasoning, which is not part of the answer."""
    note: str = ""
    """What happened to the answer, for example that another engine continued it."""


class ChatClient:
    """A client of one server. Use it as a context manager.

    Args:
        url: base URL, with or without /v1.
        key: API key (empty if the server needs none).
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        # As in `ullage batch`, variables of a proxy do not apply.
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Return the names of the server's models.

        Raises:
            ChatFailure: the server does not answer, or refuses.
        """
        try:
            response = self._http.get("/v1/models")
            _check(response)
            return [str(model["id"]) for model in response.json()["data"]]
        except httpx.HTTPError as error:
            raise ChatFailure(self._unreachable(error)) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ChatFailure(
                f"{self.url}/v1/models does not list models; check the URL"
            ) from error

    def answer(
        self, model: str, messages: Sequence[Message], settings: Mapping[str, Any]
    ) -> Iterator[ChatPiece]:
        """Yield an answer's pieces as they arrive. Closing the iterator cancels the request.

        Args:
            model: name of the model.
            messages: the conversation, which ends with the user's message.
            settings: more fields of the request, such as temperature.

        Raises:
            ChatFailure: the server refuses, or the answer ends early.
        """
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                _check(response)
                if degraded := response.headers.get(DEGRADED):
                    yield ChatPiece(note=f"memory is short, so the request was changed: {degraded}")
                yield from _pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise ChatFailure(self._unreachable(error)) from error

    def _unreachable(self, error: httpx.HTTPError) -> str:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError):
            return f"{self.url}: {reason}; start a service with ullage serve MODEL, or name its URL"
        return f"{self.url}: {reason}"


def _pieces(lines: Iterator[str]) -> Iterator[ChatPiece]:
    """Yield the pieces of a stream of server-sent events.

    Raises:
        ChatFailure: the stream has an error, or ends without [DONE].
    """
    for line in lines:
        if line == RESUMED_COMMENT:
            yield ChatPiece(
                note="an engine was lost, and another one continued with small differences"
            )
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise ChatFailure(f"the server sent {data[:80]!r}, which is not JSON") from error
        yield from _chunk_pieces(chunk)
    raise ChatFailure("the stream ended early; the answer is not complete")


def _chunk_pieces(chunk: Mapping[str, Any]) -> Iterator[ChatPiece]:
    if error := chunk.get("error"):
        raise ChatFailure(str(error.get("message", error)), error.get("retry_after"))

    if engines := (chunk.get("ullage") or {}).get("resumed_on"):
        yield ChatPiece(note=f"continued by {', '.join(engines)}")

    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        if thought or delta.get("content"):
            yield ChatPiece(text=delta.get("content") or "", thought=thought)
        if choice.get("finish_reason") == "length":
            yield ChatPiece(note="the answer reached its maximum length")


def _check(response: httpx.Response) -> None:
    """Raise a `ChatFailure` for a response that is not successful."""
    if response.status_code == httpx.codes.OK:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = " ".join(response.text.split())[:200] or response.reason_phrase
    seconds = response.headers.get("retry-after", "")
    retry_after_s = float(seconds) if seconds.isdecimal() else None
    raise ChatFailure(f"{message} (status {response.status_code})", retry_after_s)
