"""The Kubernetes API as far as the operator needs it: get, list, watch, apply, delete.

The only module that knows which requests these are.
"""

import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal, NamedTuple

from ullage_operator.errors import ClusterForgets, ClusterUnavailable, KindAbsent
from ullage_operator.kinds import SERVICE, Kind, kind_of
from ullage_operator.naming import API_VERSION, FIELD_MANAGER, KIND, SCALE_MANAGER
from ullage_operator.transport import Transport, translated

Object = dict[str, Any]

_APPLY = "application/apply-patch+yaml"
_PAGE = "500"
_WRITE_S = 30.0
_WATCH_S = (240.0, 360.0)
"""How long a watch lasts: bounded, for one that a middlebox forgot would never end."""
_WATCH_MARGIN_S = 30.0


class Event(NamedTuple):
    """One line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object


def unlimited() -> float:
    """For operators that need not be elected."""
    return _WRITE_S


class Cluster:
    """A client of one API server; `close` it.

    Args:
        may_write_s: for how many seconds from now this process may write; a write is refused when
            there are none left, and given up when they are over.
        transport: how the API server is reached; by default as the environment says.
    """

    def __init__(
        self, may_write_s: Callable[[], float] = unlimited, transport: Transport | None = None
    ) -> None:
        self._may_write_s = may_write_s
        self._transport = transport or Transport()

    async def close(self) -> None:
        await self._transport.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """One object, or None."""
        return await self._transport.ask("GET", kind.path(namespace, name))

    async def pages(self, kind: Kind, namespace: str) -> AsyncIterator[tuple[list[Object], str]]:
        """All objects of a kind that its selector chooses, with the list's resourceVersion.

        Raises:
            KindAbsent: the API server does not serve the kind.
            ClusterForgets: paging took so long that the list is gone; begin anew.
        """
        params = {"limit": _PAGE} | _selection(kind)
        while True:
            answer = await self._transport.ask("GET", kind.path(namespace), params)
            if answer is None:
                raise KindAbsent(f"the API server does not serve {kind.qualified}")
            meta = answer.get("metadata") or {}
            yield answer.get("items") or [], meta.get("resourceVersion", "0")
            if not meta.get("continue"):
                return
            params = {**params, "continue": meta["continue"]}

    async def watch(self, kind: Kind, namespace: str, since: str) -> AsyncIterator[Event]:
        """What happens to objects of a kind after a resourceVersion, for some minutes.

        Raises:
            ClusterForgets: that version is too old; list anew.
            ClusterUnavailable: the API server says that the watch has failed.
        """
        lasts_s = random.uniform(*_WATCH_S)
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(int(lasts_s)),
        }
        path = kind.path(namespace)
        lines = self._transport.stream(path, params | _selection(kind), lasts_s + _WATCH_MARGIN_S)
        async for line in lines:
            if line["type"] == "ERROR":
                status = line["object"]
                raise translated(status.get("code", 500), f"watch {path}", status)
            yield Event(line["type"], line["object"])

    async def apply(self, obj: Object) -> Object:
        """Server-side apply: our fields as given, everybody else's as they are.

        Forced, because what a service's object says is ours to say; an unchanged object is not
        written by the API server and keeps its resourceVersion.
        """
        answer = await self._write("PATCH", path_of(obj), obj, _APPLY)
        if answer is None:
            raise ClusterUnavailable(f"{_named(obj)}: its namespace or API is gone")
        return answer

    async def keep_replicas(self, live: Object) -> None:
        """Makes the number of an object's pods belong to another manager too.

        What nobody else owns an apply that leaves it out would set back to its default.

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
        await self._write("PATCH", path_of(live), body, _APPLY, SCALE_MANAGER)

    async def apply_status(self, service: Object, status: Object) -> Object | None:
        """Sets the LLMService's status; None where the service is gone."""
        meta = service["metadata"]
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {k: meta[k] for k in ("name", "namespace", "uid")},
            "status": status,
        }
        path = SERVICE.path(meta["namespace"], meta["name"])
        return await self._write("PATCH", f"{path}/status", body, _APPLY)

    async def create(self, obj: Object) -> Object:
        """Makes an object that must not exist yet.

        Raises:
            ClusterConflict: it does.
        """
        kind = kind_of(obj["apiVersion"], obj["kind"])
        path = kind.path(obj["metadata"]["namespace"])
        answer = await self._transport.ask("POST", path, _MANAGER, obj)
        if answer is None:
            raise ClusterUnavailable(f"{_named(obj)}: its namespace or API is gone")
        return answer

    async def replace(self, obj: Object) -> Object:
        """Writes an object whole.

        Raises:
            ClusterConflict: it is no longer of the resourceVersion that `obj` carries, or is gone.
        """
        answer = await self._transport.ask("PUT", path_of(obj), _MANAGER, obj)
        if answer is None:
            raise ClusterForgets(f"{_named(obj)} is gone", 1.0)
        return answer

    async def delete(self, obj: Mapping[str, Any], grace_s: int | None = None) -> None:
        """Deletes exactly this object, not another that has taken its name since.

        Args:
            grace_s: a pod's, by default its own; 0 forgets it without its node's word.
        """
        body: Object = {"propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        if "uid" in obj["metadata"]:
            body["preconditions"] = {"uid": obj["metadata"]["uid"]}
        await self._write("DELETE", path_of(obj), body)

    async def _write(
        self,
        method: str,
        path: str,
        body: Object,
        content_type: str = "application/json",
        manager: str = FIELD_MANAGER,
    ) -> Object | None:
        left_s = self._may_write_s()
        if left_s <= 0:
            raise ClusterUnavailable(f"{method} {path}: another operator leads", 1.0)
        params = {"fieldManager": manager} | ({"force": "true"} if content_type == _APPLY else {})
        timeout_s = min(left_s, _WRITE_S)
        return await self._transport.ask(method, path, params, body, content_type, timeout_s)


_MANAGER = {"fieldManager": FIELD_MANAGER}


def path_of(obj: Mapping[str, Any]) -> str:
    meta = obj["metadata"]
    return kind_of(obj["apiVersion"], obj["kind"]).path(meta["namespace"], meta["name"])


def _selection(kind: Kind) -> dict[str, str]:
    return {"labelSelector": kind.selector} if kind.selector else {}


def _named(obj: Object) -> str:
    return f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
