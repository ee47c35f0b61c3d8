"""A Kubernetes API client for the operator's requests: get, list names, apply, delete.

Every failure is raised as `Temporary` (a retry may help) or `Permanent` (the API server rejects the
request).
"""

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.resource import Resource, Subresource

from ullage_operator.api.errors import (
    ClusterConflict,
    ClusterDenied,
    ClusterForgets,
    ClusterPostponed,
    ClusterRefused,
    ClusterUnavailable,
    KindAbsent,
    OperatorError,
)
from ullage_operator.api.naming import (
    API_VERSION,
    EVENT,
    FIELD_MANAGER,
    KIND,
    NODE,
    SCALE_MANAGER,
    SERVICE,
    Kind,
    kind_of,
)
from ullage_operator.kube.cache import is_created, is_own_update, revision_of
from ullage_operator.kube.connection import FAILURES, ApiConnection

Object = dict[str, Any]

_PAGE = 500
_REQUEST_S = 30.0
_CONNECT_S = 10.0
_NAMES_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_FORBIDDEN_DELAY_S = 30.0
_REVIEW = Kind("authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews")


_VERBS = {
    "get": ("GET", "get"),
    "create": ("POST", "create"),
    "replace": ("PUT", "update"),
    "server_side_apply": ("PATCH", "patch"),
    "patch": ("PATCH", "patch"),
    "delete": ("DELETE", "delete"),
}
"""The HTTP method and the RBAC verb of each method of the dynamic client."""


def unlimited() -> float:
    """Return the time limit in seconds for a write by a process without leader election.

    A leader must stop writing when its Lease runs out, but this process may always write. The limit
    is therefore the request timeout, which is no stricter than for other requests.
    """
    return _REQUEST_S


class _Meta(msgspec.Struct):
    name: str
    namespace: str = ""
    resource_version: str = msgspec.field(name="resourceVersion", default="0")


class _Item(msgspec.Struct):
    metadata: _Meta


class _ListMeta(msgspec.Struct):
    resource_version: str = msgspec.field(name="resourceVersion", default="0")
    following: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    """One page of a metadata list response."""

    metadata: _ListMeta
    items: list[_Item] | None = None


class Cluster:
    """A client for one API server. Callers must `close` it.

    Args:
        may_write_s: returns the seconds for which this process may still write. A write is refused
            if the result is 0, and cancelled once the time is up.
        connection: the connection to the API server, by default the one that the environment
            configures.
        on_missing: called with the kind and namespace of an object that turned out to be missing in
            a write.
    """

    def __init__(
        self,
        may_write_s: Callable[[], float] = unlimited,
        connection: ApiConnection | None = None,
        on_missing: Callable[[Kind, str], None] = lambda kind, namespace: None,
    ) -> None:
        self._may_write_s = may_write_s
        self._connection = connection or ApiConnection()
        self._on_missing = on_missing

    async def close(self) -> None:
        await self._connection.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return an object, or None if it does not exist."""
        return await self._ask("get", kind, namespace, name)

    async def warning(self, namespace: str, uid: str) -> Object | None:
        """Return the latest Warning Event about an object, or None.

        Raises:
            ClusterDenied: the operator may not list Events.
        """
        selector = f"regarding.uid={uid},type=Warning"
        answer = await self._ask("get", EVENT, namespace, field_selector=selector)
        return max((answer or {}).get("items") or (), key=_seen_at, default=None)

    async def check(self, kind: Kind, namespace: str) -> None:
        """Check that a kind can be watched.

        Raises:
            KindAbsent: the API server does not serve the kind.
            ClusterDenied: the operator may not list or watch the kind.
            ClusterUnavailable: the kind cannot be listed at the moment.
        """
        await self._names(kind, namespace, limit=1)
        request = _Request("get", kind, namespace, "")
        if not await self._may(request, "watch"):
            raise ClusterDenied(f"{request}?watch: forbidden", "watch", _FORBIDDEN_DELAY_S)

    async def versions(self, kind: Kind, namespace: str) -> tuple[dict[tuple[str, str], int], int]:
        """List the metadata of all objects of a kind that match its selector.

        Returns:
            The objects' versions by namespace and name, and the version of the list.

        Raises:
            KindAbsent: the API server does not serve the kind.
            ClusterForgets: the list expired during paging, so the caller must relist.
        """
        versions: dict[tuple[str, str], int] = {}
        page = await self._names(kind, namespace)
        while True:
            for item in page.items or ():
                meta = item.metadata
                versions[meta.namespace, meta.name] = revision_of(meta.resource_version)
            if not page.metadata.following:
                return versions, revision_of(page.metadata.resource_version)
            page = await self._names(kind, namespace, following=page.metadata.following)

    async def _names(
        self, kind: Kind, namespace: str, limit: int = _PAGE, following: str | None = None
    ) -> "_Page":
        text = await self._read(
            _Request("get", kind, namespace, ""),
            limit=limit,
            label_selector=kind.selector or None,
            _continue=following,
            header_params={"Accept": _NAMES_ONLY},
        )
        if text is None:
            raise KindAbsent(f"the API server does not serve {kind.qualified}")
        try:
            return msgspec.json.decode(text, type=_Page)
        except msgspec.DecodeError as error:
            raise ClusterUnavailable(f"{kind.qualified}: not a list: {error}") from error

    async def apply(self, obj: Object) -> Object:
        """Write the operator-owned fields of an object with server-side apply.

        The apply is forced, because the operator owns these fields. Fields of other managers are
        not touched. If nothing changes, the API server skips the write and the resourceVersion
        stays the same.
        """
        answer = await self._apply(_kind(obj), obj)
        if answer is None:
            raise ClusterUnavailable(f"{_named(obj)}: its namespace or API is gone")
        return answer

    async def keep_replicas(self, live: Object) -> None:
        """Keep an object's current replicas when the operator stops setting them.

        This makes a second field manager a co-owner of the replicas. Without it, an apply without
        replicas would reset them to their default.

        Raises:
            ClusterUnavailable: the object has changed since it was read.
        """
        meta = live["metadata"]
        body = {
            "apiVersion": live["apiVersion"],
            "kind": live["kind"],
            "metadata": {k: meta[k] for k in ("name", "namespace", "resourceVersion")},
            "spec": {"replicas": live["spec"]["replicas"]},
        }
        await self._apply(_kind(live), body, SCALE_MANAGER)

    async def apply_status(self, service: Object, status: Object) -> Object | None:
        """Write an LLMService's status, and return the new object (None if it no longer exists)."""
        meta = service["metadata"]
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {k: meta[k] for k in ("name", "namespace", "uid")},
            "status": status,
        }
        return await self._apply(SERVICE, body, subresource="status")

    async def create(self, obj: Object) -> Object:
        """Create an object.

        The created fields are owned under the Update operation. `claim_fields` must transfer them
        to the Apply operation before a server-side apply can remove any of them.

        Raises:
            ClusterConflict: the object exists already.
        """
        where = obj["metadata"]["namespace"]
        answer = await self._write(
            "create", _kind(obj), where, body=obj, field_manager=FIELD_MANAGER
        )
        if answer is None:
            raise ClusterUnavailable(f"{_named(obj)}: its namespace or API is gone")
        return answer

    async def claim_fields(self, live: Object) -> Object:
        """Transfer ownership of the fields that `create` set, so that an apply can remove them.

        Afterwards, a server-side apply removes every such field that its manifest omits.

        Raises:
            ClusterUnavailable: the object is gone, or has just changed.
        """
        meta = live["metadata"]
        current = await self.get(_kind(live), meta["namespace"], meta["name"])
        if current is None:
            raise ClusterUnavailable(f"{_named(live)} is gone", 1.0)
        entries = current["metadata"].get("managedFields") or ()
        if not is_created(entries):
            return current

        claimed = [
            each | {"operation": "Apply"} if is_own_update(each) else each for each in entries
        ]
        version = current["metadata"]["resourceVersion"]
        body = [
            {"op": "replace", "path": "/metadata/managedFields", "value": claimed},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": version},
        ]
        answer = await self._write(
            "patch",
            _kind(live),
            meta["namespace"],
            meta["name"],
            body=body,
            content_type="application/json-patch+json",
        )
        if answer is None:
            raise ClusterUnavailable(f"{_named(live)} is gone", 1.0)
        return answer

    async def create_lease(self, lease: Object) -> Object:
        """Create the Lease. A process that is not the leader may also create the Lease.

        Raises:
            ClusterConflict: the Lease exists already.
        """
        answer = await self._ask(
            "create",
            _kind(lease),
            lease["metadata"]["namespace"],
            body=lease,
            field_manager=FIELD_MANAGER,
        )
        if answer is None:
            raise ClusterUnavailable(f"{_named(lease)}: its namespace or API is gone")
        return answer

    async def replace(self, obj: Object) -> Object:
        """Replace a whole object.

        Raises:
            ClusterConflict: the resourceVersion of the object has changed.
            ClusterForgets: the object is gone.
        """
        meta = obj["metadata"]
        answer = await self._ask(
            "replace",
            _kind(obj),
            meta["namespace"],
            meta["name"],
            body=obj,
            field_manager=FIELD_MANAGER,
        )
        if answer is None:
            raise ClusterForgets(f"{_named(obj)} is gone", 1.0)
        return answer

    async def delete(self, obj: Mapping[str, Any], grace_s: int | None = None) -> None:
        """Delete this exact object, but not a newer object with the same name.

        Args:
            obj: the object.
            grace_s: the grace period of a pod, or None for its own. With 0, Kubernetes removes the
                pod without waiting for its node.
        """
        body: Object = {"propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        meta = obj["metadata"]
        if "uid" in meta:
            body["preconditions"] = {"uid": meta["uid"]}
        await self._write("delete", _kind(obj), meta["namespace"], meta["name"], body=body)

    async def _apply(
        self, kind: Kind, body: Object, manager: str = FIELD_MANAGER, subresource: str = ""
    ) -> Object | None:
        """Run a forced server-side apply, and return the new object.

        The result is None if the object or its API does not exist.
        """
        meta = body["metadata"]
        return await self._write(
            "server_side_apply",
            kind,
            meta["namespace"],
            meta["name"],
            subresource,
            body=body,
            field_manager=manager,
            force_conflicts="true",
        )

    async def _write(
        self,
        verb: str,
        kind: Kind,
        namespace: str,
        name: str = "",
        subresource: str = "",
        **arguments: Any,
    ) -> Object | None:
        """Send a write request that is cancelled once this process may no longer write."""
        request = _Request(verb, kind, namespace, name, subresource)
        left_s = self._may_write_s()
        if left_s <= 0:
            raise ClusterUnavailable(f"{request}: another operator leads", 1.0)
        text = await self._read(request, min(left_s, _REQUEST_S), **arguments)
        if text is None:
            self._on_missing(kind, namespace)
            return None
        return _decoded(text)

    async def _ask(
        self, verb: str, kind: Kind, namespace: str, name: str = "", **arguments: Any
    ) -> Object | None:
        """Send a request, and return the response body, or None for 404."""
        text = await self._read(_Request(verb, kind, namespace, name), **arguments)
        return None if text is None else _decoded(text)

    async def _read(
        self, request: "_Request", timeout_s: float = _REQUEST_S, **arguments: Any
    ) -> bytes | None:
        limits = aiohttp.ClientTimeout(total=timeout_s, connect=_CONNECT_S)
        try:
            # The timeout covers both tries, since the second one starts late after a renewal of
            # credentials.
            async with asyncio.timeout(timeout_s):
                response = await self._send(request, limits, arguments)
                return await response.read()
        except FAILURES as error:
            if request.verb != "get" and _has_hung(error):
                message = f"{request}: no answer in time; an admission webhook may hang"
                raise ClusterPostponed(message, 1.0) from error
            message = f"{request}: {str(error) or type(error).__name__}"
            raise ClusterUnavailable(message, 1.0) from error
        except ApiException as error:
            if error.status == 404:
                return None
            if error.status == 403 and not await self._may(request):
                # Admission, quotas and terminating namespaces also answer 403.
                message = f"{request}: forbidden"
                raise ClusterDenied(message, request.right, _FORBIDDEN_DELAY_S) from error
            raise _refusal(request, error) from error

    async def _may(self, request: "_Request", right: str = "") -> bool:
        """Return whether the operator's account has a permission (True if the check fails)."""
        attributes = {
            "verb": right or request.right,
            "group": request.kind.group,
            "resource": request.kind.plural,
            "subresource": request.subresource,
            "namespace": request.namespace,
            "name": request.name,
        }
        review = {
            "apiVersion": _REVIEW.api_version,
            "kind": _REVIEW.name,
            "spec": {"resourceAttributes": attributes},
        }
        limits = aiohttp.ClientTimeout(total=_REQUEST_S, connect=_CONNECT_S)
        try:
            asked = _Request("create", _REVIEW, "", "")
            response = await self._send(asked, limits, {"body": review})
            return bool(_decoded(await response.read())["status"]["allowed"])
        except (*FAILURES, ApiException, KeyError):
            return True

    async def _send(
        self, request: "_Request", limits: aiohttp.ClientTimeout, arguments: Mapping[str, Any]
    ) -> aiohttp.ClientResponse:
        """Send a request.

        If the credentials are refused or renewed, or the TLS handshake fails, retry once with
        fresh ones.
        """
        api = await self._connection.api()
        used = api.configuration
        try:
            return await request.send(api, limits, arguments)
        except ApiException as error:
            if error.status != 401:
                raise
        except aiohttp.ClientSSLError:
            pass  # the certificate of the API server or its authority may be a new one
        except (AssertionError, RuntimeError):
            # aiohttp raises these if another request has meanwhile renewed the credentials, and
            # with them closed this client before the request was sent.
            if api is await self._connection.api():
                raise
        await self._connection.renew(used)
        return await request.send(await self._connection.api(), limits, arguments)


class _Request(NamedTuple):
    """A request to the API server about an object or a list of objects, before it is sent."""

    verb: str
    """Name of the dynamic client's method for the request."""
    kind: Kind
    namespace: str
    name: str
    subresource: str = ""

    @property
    def right(self) -> str:
        """Return the RBAC verb of the request."""
        right = _VERBS[self.verb][1]
        return "list" if right == "get" and not self.name else right

    @property
    def resource(self) -> Resource:
        resource = resource_of(self.kind)
        return resource.subresources[self.subresource] if self.subresource else resource

    def __str__(self) -> str:
        name = None if self.verb == "create" else self.name
        path = self.resource.path(name=name, namespace=self.namespace)
        return f"{_VERBS[self.verb][0]} {path}"

    async def send(
        self, api: ApiClient, limits: aiohttp.ClientTimeout, arguments: Mapping[str, Any]
    ) -> aiohttp.ClientResponse:
        named = {"name": self.name} if self.name and self.verb != "create" else {}
        response: aiohttp.ClientResponse = await getattr(DynamicClient(api), self.verb)(
            self.resource,
            namespace=self.namespace,
            serialize=False,
            _request_timeout=limits,
            **named,
            **arguments,
        )
        return response


@functools.cache
def resource_of(kind: Kind) -> Resource:
    """Return the dynamic client's resource for a kind, without API discovery."""
    group, _, version = kind.api_version.rpartition("/")
    resource = Resource(
        prefix="apis" if group else "api",
        group=group,
        api_version=version,
        kind=kind.name,
        name=kind.plural,
        namespaced=kind not in (NODE, _REVIEW),
    )
    status = Subresource(resource, kind=kind.name, name=f"{kind.plural}/status", namespaced=True)
    resource.subresources["status"] = status
    return resource


def _has_hung(error: Exception) -> bool:
    """Return whether a request was sent but not answered in time.

    For a write, that concerns its object alone: reads and other writes may be answered.
    """
    return isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError)


def _seen_at(event: Mapping[str, Any]) -> str:
    """Return the time at which an Event last occurred.

    Events have four fields for this time, and each writer sets only some of them.
    """
    last = (event.get("series") or {}).get("lastObservedTime")
    times = (last, event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return next(filter(None, times), None) or str(event["metadata"].get("creationTimestamp", ""))


def _kind(obj: Mapping[str, Any]) -> Kind:
    return kind_of(obj["apiVersion"], obj["kind"])


def _named(obj: Object) -> str:
    return f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"


def _refusal(request: _Request, error: ApiException) -> OperatorError:
    waits = (error.headers or {}).get("Retry-After", "")
    return translated(error.status, str(request), _decoded((error.body or "").encode()), waits)


def _decoded(text: bytes) -> Object:
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {"message": text[:256].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {"message": str(answer)}


def translated(status: int, what: str, answer: Object, waits: str = "") -> OperatorError:
    """Convert an API server's error to an exception, which is `Temporary` if a retry may help.

    Args:
        status: the HTTP status.
        what: a description of the request, for the message.
        answer: the response body, a Kubernetes `Status`.
        waits: the value of the Retry-After header.
    """
    message = f"{what}: {status} {answer.get('message', '')}"
    if status in (400, 405, 413, 415, 422):
        return ClusterRefused(message)
    if status == 409:
        return ClusterConflict(message, 1.0)
    if status == 410:
        return ClusterForgets(message, 0.1)
    delay_s = _FORBIDDEN_DELAY_S if status in (401, 403) else 1.0
    retry_after_s = (answer.get("details") or {}).get("retryAfterSeconds")
    retry_after_s = retry_after_s or (float(waits) if waits.isdecimal() else 0)
    # Quotas, admission and terminating namespaces answer 403. A failing webhook answers 500.
    kind = ClusterPostponed if status in (403, 500) else ClusterUnavailable
    return kind(message, float(retry_after_s or delay_s))
