"""The garbage collector and the namespace controller, as one pass over all objects."""

import asyncio
import copy

from ullage_kubeapi.objects import Object, Objects
from ullage_kubeapi.resources import Resource
from ullage_kubeapi.writes import Request, Writer


class Collector:
    """Deletes what lost its owner, and finishes deletions that wait for dependents."""

    def __init__(self, objects: Objects, writer: Writer) -> None:
        self._objects = objects
        self._writer = writer

    async def run(self) -> None:
        while True:
            await self._objects.woken.wait()
            self._objects.woken.clear()
            await asyncio.sleep(0.01)  # in the background: a client sees the owner go first
            self.collect()

    def collect(self) -> None:
        """One pass; what it changes wakes the next."""
        owners = {obj["metadata"]["uid"]: obj for _, obj in self._objects.everything()}
        for resource, obj in list(self._objects.everything()):
            if self._objects.find(resource, _key(obj)) is not obj:
                continue
            if obj["metadata"].get("ownerReferences"):
                self._check_owners(resource, obj, owners)
            if obj["metadata"].get("deletionTimestamp"):
                self._finish(resource, obj)

    def _check_owners(self, resource: Resource, obj: Object, owners: dict[str, Object]) -> None:
        references = obj["metadata"]["ownerReferences"]
        living = [ref for ref in references if self._lives(ref, obj, owners)]
        leaving = [r for r in living if "foregroundDeletion" in _finalizers(owners[r["uid"]])]
        if len(living) == len(leaving):
            self._delete(resource, obj)
        elif len(living) < len(references):
            kept = copy.deepcopy(obj)
            kept["metadata"]["ownerReferences"] = living
            self._objects.put(resource, kept)

    @staticmethod
    def _lives(ref: dict[str, str], obj: Object, owners: dict[str, Object]) -> bool:
        owner = owners.get(ref["uid"])
        if owner is None or owner["metadata"]["name"] != ref["name"]:
            return False
        home = owner["metadata"].get("namespace")
        return home is None or home == obj["metadata"].get("namespace")

    def _finish(self, resource: Resource, obj: Object) -> None:
        finalizers = _finalizers(obj)
        if "orphan" in finalizers:
            self._orphan(obj)
            self._writer.strip_finalizer(resource, obj, "orphan")
        elif "foregroundDeletion" in finalizers and not self._dependents(obj):
            self._writer.strip_finalizer(resource, obj, "foregroundDeletion")
        elif "kubernetes" in finalizers and resource.kind == "Namespace":
            self._empty(resource, obj)

    def _dependents(self, owner: Object) -> list[tuple[Resource, Object]]:
        uid = owner["metadata"]["uid"]
        return [
            (resource, obj)
            for resource, obj in self._objects.everything()
            if any(ref["uid"] == uid for ref in obj["metadata"].get("ownerReferences") or ())
        ]

    def _orphan(self, owner: Object) -> None:
        uid = owner["metadata"]["uid"]
        for resource, obj in self._dependents(owner):
            kept = copy.deepcopy(obj)
            references = kept["metadata"]["ownerReferences"]
            kept["metadata"]["ownerReferences"] = [r for r in references if r["uid"] != uid]
            self._objects.put(resource, kept)

    def _empty(self, resource: Resource, namespace: Object) -> None:
        name = namespace["metadata"]["name"]
        inside = [
            (r, o) for r, o in self._objects.everything() if o["metadata"].get("namespace") == name
        ]
        for each, obj in inside:
            self._delete(each, obj)
        if not inside:
            self._writer.strip_finalizer(resource, namespace, "kubernetes")

    def _delete(self, resource: Resource, obj: Object) -> None:
        if not obj["metadata"].get("deletionTimestamp"):
            namespace, name = _key(obj)
            self._writer.delete(Request(resource, namespace, name, "garbage-collector"), {})


def _key(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _finalizers(obj: Object) -> list[str]:
    return obj["metadata"].get("finalizers") or []
