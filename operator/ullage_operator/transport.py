"""HTTP to one API server: credentials, their renewal, and errors as the operator's own.

Everything that can go wrong leaves as Temporary (worth another try) or Permanent (the API server
refuses).
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import kopf
import msgspec

from ullage_operator.errors import (
    ClusterConflict,
    ClusterDenied,
    ClusterForgets,
    ClusterPostponed,
    ClusterRefused,
    ClusterUnavailable,
    KindAbsent,
    OperatorError,
)
from ullage_operator.naming import FIELD_MANAGER

Object = dict[str, Any]

_TIMEOUT_S = 30.0
_CONNECT_S = 10.0
_SILENT_S = 150.0
"""A watch on which nothing came for so long may be dead, and is begun anew. It need not be: where
etcd tells no progress, API servers send bookmarks only of kinds that change."""
_FORBIDDEN_DELAY_S = 30.0
_MAX_LINE_BYTES = 16 << 20
_DENIED = re.compile(r"cannot (\w+) resource")
"""How every authorizer's refusal reads; admission, quotas and ending namespaces answer 403, too."""


def connection() -> kopf.ConnectionInfo:
    """The service account's connection inside a pod, else what KUBECONFIG or ~/.kube names."""
    logger, settings = logging.getLogger(__name__), kopf.OperatorSettings()
    found = kopf.login_with_service_account(logger=logger, settings=settings)
    found = found or kopf.login_with_kubeconfig(logger=logger, settings=settings)
    if found is None:
        raise OperatorError(
            "no Kubernetes API found: run inside a pod with a service account, or set KUBECONFIG"
        )
    return found


class Transport:
    """A client of one API server; `close` it.

    Args:
        connect: reads where it is and with which credentials to go there.
        silent_s: how long a watch may tell nothing.
    """

    def __init__(
        self, connect: Callable[[], kopf.ConnectionInfo] = connection, silent_s: float = _SILENT_S
    ) -> None:
        self._connect = connect
        self._silent_s = silent_s
        self._connection = connect()
        self._session = self._open()
        self._renewing = asyncio.Lock()

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._connection.as_ssl_context(), limit=0),
            headers={"User-Agent": FIELD_MANAGER} | self._connection.as_http_headers(),
            proxy=self._connection.proxy_url,
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        timeout_s: float = _TIMEOUT_S,
    ) -> Object | None:
        """The answer's body; None for 404. A refused token is read anew once."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=_CONNECT_S)
        sent: dict[str, Any] = {
            "params": params,
            "data": None if body is None else json.dumps(body),
            "headers": {"Content-Type": content_type},
            "timeout": timeout,
        }
        for is_last in (False, True):
            used = self._session
            try:
                async with used.request(method, self._url(path), **sent) as response:
                    status, text = response.status, await response.read()
                    waits = response.headers.get("Retry-After", "")
            except _FAILURES as error:
                if used is self._session or is_last:
                    raise _unreachable(f"{method} {path}", error, used) from error
                continue  # closed under it, for its credentials were refused to another
            if status != 401 or is_last:
                break
            await self._renew(used)
        return _checked(f"{method} {path}", status, text, waits)

    async def stream(
        self, path: str, params: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[Object]:
        """The lines of a watch, until the API server ends it or is silent, or to the time limit."""
        silent_s = self._silent_s
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=_CONNECT_S, sock_read=silent_s)
        used = self._session
        what = f"GET {path}?watch"
        try:
            async with used.get(self._url(path), params=params, timeout=timeout) as response:
                await self._check_stream(what, response, used)
                async for line in _lines(response.content):
                    yield msgspec.json.decode(line)
        except aiohttp.SocketTimeoutError:
            return
        except _FAILURES as error:
            raise _unreachable(what, error, used) from error
        except msgspec.DecodeError as error:
            raise ClusterUnavailable(f"{what}: an event is not JSON: {error}") from error

    async def _check_stream(
        self, what: str, response: aiohttp.ClientResponse, used: aiohttp.ClientSession
    ) -> None:
        if response.status == 401:
            await self._renew(used)
            raise ClusterUnavailable(f"{what}: the token was refused, and is read anew", 0.0)
        if response.status == 404:
            raise KindAbsent(f"{what}: the API server does not serve it")
        if response.status != 200:
            waits = response.headers.get("Retry-After", "")
            _checked(what, response.status, await response.read(), waits)
            raise ClusterUnavailable(f"{what}: {response.status}")

    def _url(self, path: str) -> str:
        return self._connection.server.rstrip("/") + path

    async def _renew(self, refused: aiohttp.ClientSession) -> None:
        """Reads the credentials anew, once for all requests that were refused together."""
        async with self._renewing:
            if self._session is refused:
                self._connection = self._connect()
                self._session = self._open()
                await refused.close()


_FAILURES = (TimeoutError, aiohttp.ClientError, OSError, RuntimeError)


def _unreachable(what: str, error: Exception, used: aiohttp.ClientSession) -> Exception:
    if isinstance(error, RuntimeError) and not used.closed:
        return error  # a bug; aiohttp has no type of its own for `Session is closed`
    return ClusterUnavailable(f"{what}: {error or type(error).__name__}", 1.0)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines, however long: aiohttp's own reader ends at 128 KiB."""
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        if b"\n" in chunk:
            *whole, last = rest.split(b"\n")
            rest = bytearray(last)
            for line in whole:
                if line:
                    yield bytes(line)
        if len(rest) > _MAX_LINE_BYTES:
            raise ClusterUnavailable(f"an event of more than {_MAX_LINE_BYTES} bytes")


def _checked(what: str, status: int, text: bytes, waits: str) -> Object | None:
    if status == 404:
        return None
    answer = _parsed(text)
    if status >= 400:
        raise translated(status, what, answer, waits)
    return answer


def _parsed(text: bytes) -> Object:
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {"message": text[:256].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {"message": str(answer)}


def translated(status: int, what: str, answer: Object, waits: str = "") -> OperatorError:
    """The API server's refusal: what another try may mend is Temporary.

    Args:
        status: the HTTP status, or the code of a watch's error.
        what: the request.
        answer: a Kubernetes `Status`.
        waits: the header Retry-After.
    """
    said = answer.get("message", "")
    message = f"{what}: {status} {said}"
    if status in (400, 405, 413, 415, 422):
        return ClusterRefused(message)
    if status == 403 and (found := _DENIED.search(said)):
        return ClusterDenied(message, found[1], _FORBIDDEN_DELAY_S)
    if status == 409:
        return ClusterConflict(message, 1.0)
    if status == 410:
        return ClusterForgets(message, 0.1)
    delay_s = _FORBIDDEN_DELAY_S if status in (401, 403) else 1.0
    told_s = (answer.get("details") or {}).get("retryAfterSeconds")
    told_s = told_s or (float(waits) if waits.isdecimal() else 0)
    # What refuses a request besides the authorizer, and how the failure of a webhook reads.
    kind = ClusterPostponed if status in (403, 500) else ClusterUnavailable
    return kind(message, float(told_s or delay_s))
