"""Watch streams: changes since a revision, bookmarks, time limits, 410 where history is gone."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from ullage_kubeapi.objects import Change, Objects, table_of
from ullage_kubeapi.resources import Resource
from ullage_kubeapi.selectors import Selector
from ullage_kubeapi.status import ApiError

_END_OF_INITIAL = {"k8s.io/initial-events-end": "true"}


@dataclass(frozen=True)
class Watch:
    """What one client asked to watch; `since` is empty for "from now, current state first"."""

    resource: Resource
    namespace: str
    selector: Selector
    since: str
    bookmarks: bool
    initial_events: bool
    timeout: float
    bookmark_interval: float


async def stream(objects: Objects, watch: Watch) -> AsyncIterator[bytes]:
    """The stream's lines, until the time limit."""
    queue = objects.subscribe()
    try:
        async for event in _events(objects, watch, queue):
            yield json.dumps(event).encode() + b"\n"
    except ApiError as error:
        yield json.dumps({"type": "ERROR", "object": error.body()}).encode() + b"\n"
    finally:
        objects.unsubscribe(queue)


async def _events(
    objects: Objects, watch: Watch, queue: asyncio.Queue[Change | ApiError | None]
) -> AsyncIterator[dict[str, Any]]:
    if watch.initial_events or watch.since in ("", "0"):
        revision = objects.revision
        for obj in objects.listed(watch.resource, watch.namespace):
            if watch.selector(obj):
                yield {"type": "ADDED", "object": served(obj, watch.resource)}
        if watch.initial_events:
            yield _bookmark(watch.resource, revision, _END_OF_INITIAL)
    else:
        revision = int(watch.since)
        for change in objects.since(revision):
            revision = change.revision
            for event in _seen(change, watch):
                yield event
    async for event in _follow(watch, queue, revision, objects):
        yield event


async def _follow(
    watch: Watch, queue: asyncio.Queue[Change | ApiError | None], revision: int, objects: Objects
) -> AsyncIterator[dict[str, Any]]:
    loop = asyncio.get_running_loop()
    end = loop.time() + watch.timeout
    while (remaining_s := end - loop.time()) > 0:
        try:
            async with asyncio.timeout(min(remaining_s, watch.bookmark_interval)):
                change = await queue.get()
        except TimeoutError:
            if watch.bookmarks:
                yield _bookmark(watch.resource, objects.revision, {})
            continue
        if change is None:
            return
        if isinstance(change, ApiError):
            raise change
        if change.revision > revision:
            for event in _seen(change, watch):
                yield event


def _seen(change: Change, watch: Watch) -> list[dict[str, Any]]:
    """A change as this watcher sees it: to leave its selection is to be deleted."""
    if change.table != table_of(watch.resource):
        return []
    if watch.namespace not in ("", change.obj["metadata"].get("namespace", "")):
        return []
    now = watch.selector(change.obj)
    before = change.before is not None and watch.selector(change.before)
    kind = change.kind
    if kind == "MODIFIED" and now and not before:
        kind = "ADDED"
    elif kind == "MODIFIED" and before and not now:
        kind = "DELETED"
    elif not now:
        return []
    return [{"type": kind, "object": served(change.obj, watch.resource)}]


def served(obj: Mapping[str, Any], resource: Resource) -> dict[str, Any]:
    """The object in the version asked for (versions differ in name only)."""
    return {**obj, "apiVersion": resource.api_version, "kind": resource.kind}


def _bookmark(resource: Resource, revision: int, annotations: Mapping[str, str]) -> dict[str, Any]:
    meta: dict[str, Any] = {"resourceVersion": str(revision), "creationTimestamp": None}
    if annotations:
        meta["annotations"] = dict(annotations)
    obj = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta}
    return {"type": "BOOKMARK", "object": obj}
