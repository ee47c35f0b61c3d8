"""The Kubernetes API, as far as the operator writes to it and asks it outside of watches.

The only module beside kopf's watches that speaks HTTP to the API server. Everything that can go
wrong there leaves as Temporary (worth another try) or Permanent (the API server refuses).
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf

from ullage_operator.errors import ClusterRefused, ClusterUnavailable, OperatorError
from ullage_operator.naming import API_VERSION, FIELD_MANAGER, KIND

Object = dict[str, Any]

_TIMEOUT = aiohttp.ClientTimeout(total=30, connect=10)
_DISCOVERY_MAX_AGE_S = 60.0
_APPLY = {"Content-Type": "application/apply-patch+yaml"}
_BACKGROUND = {"propagationPolicy": "Background"}
_FORBIDDEN_DELAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Resource:
    """What discovery says about one kind."""

    plural: str
    namespaced: bool


@dataclass(frozen=True, slots=True)
class _Discovered:
    kinds: Mapping[str, Resource]
    at: float


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


class Cluster:
    """A client of one API server; `close` it."""

    def __init__(self) -> None:
        self._connection = connection()
        self._session = self._open()
        self._renewing = asyncio.Lock()
        self._discovered: dict[str, _Discovered] = {}

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._connection.as_ssl_context()),
            headers={"User-Agent": FIELD_MANAGER} | self._connection.as_http_headers(),
            proxy=self._connection.proxy_url,
            timeout=_TIMEOUT,
        )

    async def close(self) -> None:
        await self._session.close()

    async def service(self, namespace: str, name: str) -> Object | None:
        """The LLMService, or None where it is gone."""
        return await self.get(API_VERSION, KIND, namespace, name)

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        """One object, or None."""
        found = await self._resource(api_version, kind)
        if found is None:
            return None
        return await self._ask("GET", f"{_collection(api_version, found, namespace)}/{name}")

    async def listed(
        self, api_version: str, kind: str, namespace: str, selector: str
    ) -> list[Object]:
        """Objects of a kind that carry the labels; none where the API does not know the kind."""
        found = await self._resource(api_version, kind)
        if found is None:
            return []
        path = _collection(api_version, found, namespace)
        answer = await self._ask("GET", path, params={"labelSelector": selector})
        named = {"apiVersion": api_version, "kind": kind}  # items of a list do not carry them
        return [named | item for item in (answer or {}).get("items", ())]

    async def serves(self, api_version: str, kind: str) -> bool:
        """Whether the API server knows the kind, such as PodMonitor."""
        return await self._resource(api_version, kind) is not None

    async def apply(self, obj: Object) -> Object:
        """Server-side apply: our fields as given, everybody else's as they are.

        Forced, because what a service's object says is ours to say; an unchanged object is not
        written by the API server and keeps its resourceVersion.
        """
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        answer = await self._ask("PATCH", await self._path(obj), params, obj, _APPLY)
        if answer is None:
            raise ClusterUnavailable(f"{_named(obj)}: its namespace or API is gone")
        return answer

    async def apply_status(self, service: Object, status: Object) -> None:
        """Sets the LLMService's status; nothing happens where the service is gone."""
        meta = service["metadata"]
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {k: meta[k] for k in ("name", "namespace", "uid")},
            "status": status,
        }
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        await self._ask("PATCH", f"{await self._path(body)}/status", params, body, _APPLY)

    async def delete(self, obj: Mapping[str, Any]) -> None:
        """Deletes exactly this object, not another that has taken its name since."""
        meta = obj["metadata"]
        body: Object = dict(_BACKGROUND)
        if "uid" in meta:
            body["preconditions"] = {"uid": meta["uid"]}
        await self._ask("DELETE", await self._path(obj), body=body)

    async def _path(self, obj: Mapping[str, Any]) -> str:
        api_version, kind, meta = obj["apiVersion"], obj["kind"], obj["metadata"]
        found = await self._resource(api_version, kind)
        if found is None:
            raise ClusterUnavailable(f"the API server does not serve {kind} of {api_version}")
        return f"{_collection(api_version, found, meta['namespace'])}/{meta['name']}"

    async def _resource(self, api_version: str, kind: str) -> Resource | None:
        known = self._discovered.get(api_version)
        fresh = known is not None and time.monotonic() - known.at < _DISCOVERY_MAX_AGE_S
        if known is None or (kind not in known.kinds and not fresh):
            known = _Discovered(await self._discover(api_version), time.monotonic())
            self._discovered[api_version] = known
        return known.kinds.get(kind)

    async def _discover(self, api_version: str) -> dict[str, Resource]:
        answer = await self._ask("GET", f"{_root(api_version)}/{api_version}")
        return {
            entry["kind"]: Resource(entry["name"], entry["namespaced"])
            for entry in (answer or {}).get("resources", ())
            if "/" not in entry["name"]
        }

    async def _ask(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Object | None:
        """The answer's body; None for 404. A refused token is read anew once."""
        used = self._session
        status, answer = await self._send(method, path, params, body, headers)
        if status == 401:
            await self._renew(used)
            status, answer = await self._send(method, path, params, body, headers)
        if status == 404:
            return None
        if status >= 400:
            raise _translated(status, f"{method} {path}", answer)
        return answer

    async def _renew(self, refused: aiohttp.ClientSession) -> None:
        """Reads the credentials anew, once for all requests that were refused together."""
        async with self._renewing:
            if self._session is refused:
                self._connection = connection()
                self._session = self._open()
                await refused.close()

    async def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        body: Object | None,
        headers: Mapping[str, str] | None,
    ) -> tuple[int, Object]:
        url = self._connection.server.rstrip("/") + path
        data = None if body is None else json.dumps(body)
        sent = {"Content-Type": "application/json"} | dict(headers or {})
        session = self._session
        try:
            async with session.request(
                method, url, params=params, data=data, headers=sent
            ) as response:
                return response.status, _parsed(await response.read())
        except (TimeoutError, aiohttp.ClientError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not session.closed:
                raise  # aiohttp has no type of its own for `Session is closed`
            if session is not self._session:
                return 401, {}  # closed under it, for its credentials were refused to another
            raise ClusterUnavailable(f"{method} {path}: {error or type(error).__name__}") from error


def _parsed(text: bytes) -> Object:
    try:
        answer = json.loads(text)
    except ValueError:
        return {"message": text[:256].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {"message": str(answer)}


def _translated(status: int, what: str, answer: Object) -> OperatorError:
    """The API server's refusal: what another try may mend is Temporary."""
    message = f"{what}: {status} {answer.get('message', '')}"
    if status in (400, 405, 413, 415, 422):
        return ClusterRefused(message)
    delay_s = _FORBIDDEN_DELAY_S if status in (401, 403) else 1.0
    wait_s = (answer.get("details") or {}).get("retryAfterSeconds") or delay_s
    return ClusterUnavailable(message, float(wait_s))


def _root(api_version: str) -> str:
    return "/apis" if "/" in api_version else "/api"


def _collection(api_version: str, resource: Resource, namespace: str) -> str:
    scope = f"/namespaces/{namespace}" if resource.namespaced else ""
    return f"{_root(api_version)}/{api_version}{scope}/{resource.plural}"


def _named(obj: Object) -> str:
    return f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
