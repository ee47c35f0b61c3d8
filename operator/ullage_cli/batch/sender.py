"""Sends the requests of a batch to a server, and obeys its Retry-After."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from ullage_cli.batch.lines import SUCCESS, BatchRequest
from ullage_operator.api.errors import LocalFailure

CONNECT_S = 10.0
READ_S = 24 * 3600.0
"""Longest silence of a server before an answer. A request may wait and run for hours."""
PROBE_INTERVAL_S = 60.0
"""Seconds of silence after which the server is asked for its models, to see whether it runs."""
PROBE_TIMEOUT_S = 30.0
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
MAX_REFUSED_S = 3600.0
"""Seconds after which a refusal is a request's answer, if the server refuses it again and again."""
MAX_LOST_S = 300.0
"""Seconds after which the batch stops if the server does not answer."""
MAX_FAULTS = 3
"""Number of faults of the server after which a fault is a request's answer."""
MAX_ERROR_CHARS = 300

BUSY = (429, 503)
FAULTS = (408, 500, 502, 504)
UNAUTHORIZED = 401
REDIRECTS = range(300, 400)
BAD_GATEWAY = 502
"""Status of an answer with the status of success that is not JSON."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The HTTP answer to a request."""

    status: int
    request_id: str
    body: Any
    """The parsed body."""

    @property
    def is_failed(self) -> bool:
        return self.status not in SUCCESS


@dataclass
class Tries:
    """The attempts to send one request, and how long they have lasted."""

    began_at: float
    """Monotonic time of the first attempt, in seconds."""
    count: int = 0
    faults: int = 0
    lost_at: float | None = None
    """Monotonic time since which the server has not answered (None if it answered last)."""

    @property
    def backoff_s(self) -> float:
        return float(min(FIRST_PAUSE_S * 2 ** min(self.count - 1, 10), MAX_PAUSE_S))


def pause_s(tries: Tries, status: int, retry_after_s: float | None, now: float) -> float | None:
    """Return the seconds before a request is sent again, or None if the answer counts.

    Args:
        tries: the attempts so far, including the one with this answer.
        status: the HTTP status.
        retry_after_s: the Retry-After header in seconds, or None if there is none.
        now: monotonic time in seconds.
    """
    if status in BUSY:
        pause = tries.backoff_s if retry_after_s is None else retry_after_s
        return pause if now + pause - tries.began_at <= MAX_REFUSED_S else None
    if status in FAULTS and tries.faults < MAX_FAULTS:
        return tries.backoff_s
    return None


class LineSender:
    """An HTTP client of one server.

    Args:
        url: base URL, with or without /v1.
        key: API key (empty if the server needs none).
        concurrency: most requests to send at a time.
        failure: returns why the server has ended (empty while it runs, or if nobody knows).
    """

    def __init__(
        self, url: str, key: str, concurrency: int, failure: Callable[[], str] = lambda: ""
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._failure = failure
        self._answered_at = time.monotonic()
        self._probing = asyncio.Lock()
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=concurrency + 1),  # and a probe
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def models(self) -> set[str]:
        """Return the names of the served models (empty if the server does not list them).

        Raises:
            LocalFailure: the server does not answer, refuses the API key, or redirects.
        """
        try:
            response = await self._http.get(f"{self._url}/v1/models", timeout=CONNECT_S)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise LocalFailure(
                f"--url {self._url}: {error or type(error).__name__}; start the server, or give "
                "another URL"
            ) from None
        self._check_server(response)
        try:
            listed = response.json()["data"]
            return {str(model["id"]) for model in listed}
        except (ValueError, LookupError, TypeError):
            return set()

    async def send(self, request: BatchRequest) -> LineAnswer:
        """Send a request until its answer counts.

        Raises:
            LocalFailure: the server has ended, does not answer, refuses the API key, or redirects.
        """
        tries = Tries(time.monotonic())
        while True:
            tries.count += 1
            try:
                response = await self._post(request)
            except httpx.TransportError as error:
                self._check_lost(tries, error)
                await asyncio.sleep(tries.backoff_s)
                continue

            tries.lost_at = None
            self._check_server(response)
            answer = _answer(response)
            tries.faults += answer.status in FAULTS
            retry_after_s = seconds_of(response.headers.get("retry-after", ""))
            pause = pause_s(tries, answer.status, retry_after_s, time.monotonic())
            if pause is None:
                return answer
            await asyncio.sleep(pause)

    async def _post(self, request: BatchRequest) -> httpx.Response:
        """Send a request once, and probe the server while it is silent.

        Raises:
            TransportError: the request was not answered.
            LocalFailure: the server has ended, or does not answer probes either.
        """
        sent_at = time.monotonic()
        posting = asyncio.create_task(
            self._http.post(
                f"{self._url}{request.url}",
                content=request.body,
                headers={"content-type": "application/json"},
            )
        )
        try:
            while not (await asyncio.wait({posting}, timeout=PROBE_INTERVAL_S))[0]:
                await self._probe(sent_at)
            response = await posting
        except BaseException:
            posting.cancel()
            raise
        self._answered_at = time.monotonic()
        return response

    async def _probe(self, sent_at: float) -> None:
        """Ask a silent server for its models. One probe is under way at a time.

        Args:
            sent_at: monotonic time in seconds at which the waiting request was sent.

        Raises:
            LocalFailure: the server has ended, or has answered nothing for MAX_LOST_S.
        """
        async with self._probing:
            if time.monotonic() - self._answered_at < PROBE_INTERVAL_S:
                return
            if reason := self._failure():
                raise LocalFailure(f"the service has ended: {reason}")
            try:
                await self._http.get(f"{self._url}/v1/models", timeout=PROBE_TIMEOUT_S)
                self._answered_at = time.monotonic()
            except httpx.TransportError as error:
                if time.monotonic() - max(self._answered_at, sent_at) > MAX_LOST_S:
                    raise self._lost(error) from None

    def _check_server(self, response: httpx.Response) -> None:
        """Raise an error if no request can be answered by this server with these options.

        Raises:
            LocalFailure: the server refuses the API key, or redirects.
        """
        status = response.status_code
        if status == UNAUTHORIZED:
            raise LocalFailure(
                f"{self._url} answers {status}: {response.text[:MAX_ERROR_CHARS]}; "
                "set --api-key or ULLAGE_API_KEY"
            )
        if status in REDIRECTS:
            location = response.headers.get("location", "no Location")
            raise LocalFailure(
                f"--url {self._url}: {response.url.path} answers {status} ({location}); give the "
                "URL of the server itself"
            )

    def _check_lost(self, tries: Tries, error: httpx.TransportError) -> None:
        """Raise an error if the server is lost for good.

        Raises:
            LocalFailure: the server has ended, or has not answered for MAX_LOST_S.
        """
        if reason := self._failure():
            raise LocalFailure(f"the service has ended: {reason}")
        now = time.monotonic()
        if tries.lost_at is None:
            tries.lost_at = now
        if now - tries.lost_at > MAX_LOST_S:
            raise self._lost(error)

    def _lost(self, error: httpx.TransportError) -> LocalFailure:
        return LocalFailure(
            f"{self._url} has not answered for {MAX_LOST_S:.0f} s "
            f"({str(error) or type(error).__name__}); run the same command to go on"
        )


def seconds_of(header: str) -> float | None:
    """Return the seconds in a Retry-After header, or None if it has no such number."""
    try:
        seconds = float(header)
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _answer(response: httpx.Response) -> LineAnswer:
    """Return an answer. Text that is not JSON becomes the message of an error."""
    status = response.status_code
    request_id = response.headers.get("x-request-id", "")
    try:
        return LineAnswer(status, request_id, msgspec.json.decode(response.content))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        message = response.text[:MAX_ERROR_CHARS]

    # A page of a proxy says nothing about the request, and is no success.
    if status in SUCCESS:
        message = f"the server answers {status} with a body that is not JSON: {message}"
        status = BAD_GATEWAY
    error = {"message": message, "type": "not_json", "param": None, "code": None}
    return LineAnswer(status, request_id, {"error": error})
