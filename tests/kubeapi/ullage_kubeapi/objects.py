"""What the server holds: objects, the revision counter, the event history, the watchers."""

import asyncio
import collections
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ullage_kubeapi.resources import BUILTINS, Resource
from ullage_kubeapi.status import ApiError, expired

Object = dict[str, Any]
Table = tuple[str, str]  # group, plural
Key = tuple[str, str]  # namespace ("" for cluster scope), name
_HISTORY = 4096


@dataclass(frozen=True)
class Change:
    """One event of the history; `before` is the object it replaced."""

    revision: int
    table: Table
    kind: str
    obj: Object
    before: Object | None


def key_of(obj: Mapping[str, Any]) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def table_of(resource: Resource) -> Table:
    return resource.group, resource.plural


class Objects:
    """All state. Every object handed out is the stored one: callers copy before they change."""

    def __init__(self) -> None:
        self.revision = 1000
        self.resources: dict[tuple[str, str, str], Resource] = {}
        self.woken = asyncio.Event()
        self._tables: dict[Table, dict[Key, Object]] = {}
        self._history: collections.deque[Change] = collections.deque()
        self.oldest = self.revision
        self._watchers: set[asyncio.Queue[Change | ApiError | None]] = set()
        for resource in BUILTINS:
            self.register(resource)

    def register(self, resource: Resource) -> None:
        self.resources[resource.group, resource.version, resource.plural] = resource
        self._tables.setdefault(table_of(resource), {})

    def unregister(self, group: str, plural: str) -> None:
        for key in [k for k in self.resources if (k[0], k[2]) == (group, plural)]:
            del self.resources[key]

    def find(self, resource: Resource, key: Key) -> Object | None:
        return self._tables[table_of(resource)].get(key)

    def listed(self, resource: Resource, namespace: str) -> list[Object]:
        table = self._tables[table_of(resource)]
        return [obj for key, obj in sorted(table.items()) if namespace in ("", key[0])]

    def everything(self) -> Iterator[tuple[Resource, Object]]:
        """Every object once, with a resource that serves it."""
        by_table = {table_of(resource): resource for resource in self.resources.values()}
        for table, resource in by_table.items():
            for obj in list(self._tables[table].values()):
                yield resource, obj

    def put(self, resource: Resource, obj: Object) -> Object:
        """Stores `obj` under a new resourceVersion and tells the watchers."""
        table = self._tables[table_of(resource)]
        before = table.get(key_of(obj))
        stored = self._stamped(obj)
        table[key_of(obj)] = stored
        self._record(resource, "MODIFIED" if before else "ADDED", stored, before)
        return stored

    def drop(self, resource: Resource, obj: Object) -> Object:
        """Forgets `obj`; the DELETED event carries its last state under a new resourceVersion."""
        before = self._tables[table_of(resource)].pop(key_of(obj))
        last = self._stamped(obj)
        self._record(resource, "DELETED", last, before)
        return last

    def _stamped(self, obj: Object) -> Object:
        self.revision += 1
        stored = copy.deepcopy(obj)
        stored["metadata"]["resourceVersion"] = str(self.revision)
        return stored

    def _record(self, resource: Resource, kind: str, obj: Object, before: Object | None) -> None:
        change = Change(self.revision, table_of(resource), kind, obj, before)
        self._history.append(change)
        if len(self._history) > _HISTORY:
            self.oldest = self._history.popleft().revision
        for queue in self._watchers:
            queue.put_nowait(change)
        self.woken.set()

    def compact(self) -> None:
        """Forgets the history, as etcd's compaction does: older watches get 410."""
        self._history.clear()
        self.oldest = self.revision

    def restore(self, revision: int) -> None:
        """Counts from an earlier revision, as after a restore of etcd, and forgets the history.

        Objects of later revisions get this one.
        """
        self.revision = revision
        self.compact()
        for _, obj in self.everything():
            if int(obj["metadata"]["resourceVersion"]) > revision:
                obj["metadata"]["resourceVersion"] = str(revision)

    def since(self, revision: int) -> list[Change]:
        """The changes after `revision`; raises Expired where they are forgotten.

        A revision of the future is from before a restore.
        """
        if revision > self.revision:
            raise ApiError(504, "Timeout", f"Too large resource version: {revision}")
        if revision < self.oldest:
            raise expired(revision, self.oldest)
        return [change for change in self._history if change.revision > revision]

    def subscribe(self) -> asyncio.Queue[Change | ApiError | None]:
        queue: asyncio.Queue[Change | ApiError | None] = asyncio.Queue()
        self._watchers.add(queue)
        return queue

    def close(self, error: ApiError | None = None) -> None:
        """Ends every watch, with an error where one is given."""
        for queue in self._watchers:
            queue.put_nowait(error)

    def unsubscribe(self, queue: asyncio.Queue[Change | ApiError | None]) -> None:
        self._watchers.discard(queue)
