"""Kubernetes Events (events.k8s.io/v1) of an LLMService: every decision once, at a bounded rate.

Pure: what is recorded becomes a manifest to apply, or nothing. A decision that repeats becomes a
series of one Event, and a service that decides too much is cut short, as `kubectl describe` and
etcd want it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from ullage_operator import naming
from ullage_operator.drift import was_edited

Manifest = dict[str, Any]

API_VERSION = "events.k8s.io/v1"
KIND = "Event"
CONTROLLER = f"{naming.GROUP}/operator"
MAX_NOTE_BYTES = 1024
"""Kubernetes refuses longer ones."""
SERIES_S = 360.0
"""What repeats within this time belongs to one Event."""
REPEAT_S = 60.0
"""A series is told again at most this often."""
BURST, REFILL_S = 25, 30.0
"""Events of one service at once, and seconds until one more is allowed."""
MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Note:
    """A decision about a service."""

    reason: str
    """Why, in CamelCase."""
    action: str
    """What was done, in CamelCase."""
    message: str
    warning: bool = False


class _Key(NamedTuple):
    uid: str
    note: Note


@dataclass(frozen=True, slots=True)
class _Series:
    begun: datetime
    last: datetime
    told: datetime
    count: int = 1


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Of one service; how many Events it may still make."""

    tokens: float
    at: datetime


class Recorder:
    """Remembers what was told; memory is bounded by forgetting the oldest.

    Args:
        instance: name of this operator's pod or host.
    """

    def __init__(self, instance: str) -> None:
        self._instance = instance[:128] or "operator"
        self._series: OrderedDict[_Key, _Series] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self.dropped = 0
        """Decisions that were not told, for there were too many."""

    def record(self, service: Mapping[str, Any], note: Note, now: datetime) -> Manifest | None:
        """The Event to apply, if the decision is worth one.

        Args:
            service: the LLMService that it is about.
            now: in UTC.
        """
        note = replace(note, message=clipped(note.message))
        key = _Key(str(service["metadata"].get("uid", "")), note)
        known = self._series.pop(key, None)
        if known is None or (now - known.last).total_seconds() > SERIES_S:
            return self._begin(key, service, now)
        series = replace(known, last=now, count=known.count + 1)
        is_due = (now - known.told).total_seconds() >= REPEAT_S
        self._remember(key, replace(series, told=now) if is_due else series)
        return self._manifest(service, note, series) if is_due else None

    def _begin(self, key: _Key, service: Mapping[str, Any], now: datetime) -> Manifest | None:
        if not self._may_tell(key.uid, now):
            self.dropped += 1
            return None
        series = _Series(now, now, now)
        self._remember(key, series)
        return self._manifest(service, key.note, series)

    def _remember(self, key: _Key, series: _Series) -> None:
        self._series[key] = series
        if len(self._series) > MAX_REMEMBERED:
            self._series.popitem(last=False)

    def _may_tell(self, uid: str, now: datetime) -> bool:
        bucket = self._buckets.pop(uid, _Bucket(BURST, now))
        refilled = bucket.tokens + (now - bucket.at).total_seconds() / REFILL_S
        tokens = min(float(BURST), refilled)
        may = tokens >= 1
        self._buckets[uid] = _Bucket(tokens - may, now)
        if len(self._buckets) > MAX_REMEMBERED:
            self._buckets.popitem(last=False)
        return may

    def _manifest(self, service: Mapping[str, Any], note: Note, series: _Series) -> Manifest:
        meta = service["metadata"]
        regarding = {k: meta[k] for k in ("name", "namespace", "uid") if k in meta}
        made = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                "name": f"{meta['name'][:200]}.{abs(hash((note, series.begun))):016x}",
                "namespace": meta["namespace"],
            },
            "eventTime": micro_time(series.begun),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "action": note.action,
            "reason": note.reason,
            "regarding": {"apiVersion": naming.API_VERSION, "kind": naming.KIND, **regarding},
            "note": note.message,
            "type": "Warning" if note.warning else "Normal",
        }
        if series.count > 1:
            last = micro_time(series.last)
            made["series"] = {"count": series.count, "lastObservedTime": last}
        return made


def transitions(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]
) -> list[Note]:
    """What the change of a service's conditions is worth telling.

    A condition is told when its status or its reason changes. Of a new service only what is out
    of the ordinary: that nothing serves yet goes without saying.
    """
    known = {condition["type"]: condition for condition in before}
    notes = [
        Note(_title(each), "Observe", each["message"], _is_bad(each))
        for each in after
        if _is_news(known.get(each["type"]), each)
    ]
    worst = sorted(notes, key=lambda note: note.warning)  # Ready and Degraded often say the same
    return list({(note.reason, note.message): note for note in worst}.values())


def _is_news(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    if before is None:
        return bool(now["status"] == "True" and now["reason"] != "Stable")
    return any(before[key] != now[key] for key in ("status", "reason"))


def _is_bad(condition: Mapping[str, Any]) -> bool:
    is_fault = condition["type"] in ("Degraded", "MissingPermission")
    if condition["type"] in ("Progressing", "MonitoringAvailable"):
        return False
    return bool((condition["status"] == "True") == is_fault)


def _title(condition: Mapping[str, Any]) -> str:
    """`Ready` and `Recovered` say what became of the service; the rest is the reason itself."""
    match condition["type"], condition["status"]:
        case "Ready", "True":
            return "Ready"
        case "Degraded", "False":
            return "Recovered"
    return str(condition["reason"])


@dataclass(frozen=True, slots=True)
class Deeds:
    """What one reconciliation wrote, each as `Kind name`."""

    created: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    """Somebody else had changed them."""
    deleted: list[str] = field(default_factory=list)

    def applied(self, desired: Manifest, before: Manifest | None, after: Manifest) -> None:
        """`desired`, which is stamped, was applied; `before` and `after` are the live object."""
        if before is None:
            self.created.append(named(desired))
        elif _version(before) != _version(after):  # the API server may rewrite what we give
            whose = self.repaired if was_edited(desired, before) else self.updated
            whose.append(named(desired))

    def notes(self) -> list[Note]:
        """One decision for all objects of a kind of deed."""
        told = (
            ("Created", "Create", self.created),
            ("Updated", "Apply", self.updated),
            ("DriftRepaired", "Apply", self.repaired),
            ("Deleted", "Delete", self.deleted),
        )
        return [Note(reason, act, ", ".join(names)) for reason, act, names in told if names]


def named(obj: Mapping[str, Any]) -> str:
    return f"{obj['kind']} {obj['metadata']['name']}"


def _version(obj: Mapping[str, Any]) -> Any:
    return obj["metadata"].get("resourceVersion")


def clipped(text: str) -> str:
    """At most what an Event may say, without splitting a character."""
    data = text.encode()
    if len(data) <= MAX_NOTE_BYTES:
        return text
    return data[: MAX_NOTE_BYTES - 3].decode(errors="ignore") + "…"


def micro_time(now: datetime) -> str:
    """RFC 3339 in microseconds; `now` is in UTC."""
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
