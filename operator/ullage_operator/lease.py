"""Who leads, of several operators: a pure state machine over a coordination.k8s.io Lease.

No two clocks are compared. Everybody measures, on a clock of its own that never goes back, since
when the record has not changed; a record that stays so for its whole duration is dead. A leader
stops writing well before: `renew_deadline_s` after it *began* its last successful renewal. What is
between the two, a third of the duration, is for clocks that run at different speeds and for writes
that are on their way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ullage_operator.kinds import LEASE

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Times:
    """How long a lead lasts without renewal, in seconds."""

    duration_s: float = 15.0

    @property
    def renew_deadline_s(self) -> float:
        """After which a leader that could not renew writes no more."""
        return self.duration_s * 2 / 3

    @property
    def retry_s(self) -> float:
        """Between two attempts to lead, or to go on leading."""
        return self.duration_s * 2 / 15


@dataclass(frozen=True, slots=True)
class Candidacy:
    """What one operator knows of the lead."""

    identity: str
    times: Times = Times()
    record: Object | None = None
    """The Lease's spec as last seen."""
    since_s: float = 0.0
    """When it was first seen to be so."""
    renewed_s: float | None = None
    """When the last renewal that succeeded was begun; None for who does not lead."""

    def leads_for_s(self, now_s: float) -> float:
        """For how many seconds from now this operator may write; 0 for who does not lead."""
        if self.renewed_s is None:
            return 0.0
        return max(0.0, self.renewed_s + self.times.renew_deadline_s - now_s)

    def saw(self, lease: Mapping[str, Any] | None, now_s: float) -> "Candidacy":
        """After the Lease was read; None where there is none."""
        record = None if lease is None else dict(lease.get("spec") or {})
        if record == self.record:
            return self
        is_mine = record is not None and record.get("holderIdentity") == self.identity
        renewed_s = self.renewed_s if is_mine else None
        return replace(self, record=record, since_s=now_s, renewed_s=renewed_s)

    def may_take(self, now_s: float) -> bool:
        """Whether to write the Lease: it is ours, nobody's, or of somebody who is gone."""
        record = self.record or {}
        holder = record.get("holderIdentity") or ""
        if holder in ("", self.identity):
            return True
        lasts_s = record.get("leaseDurationSeconds") or self.times.duration_s
        return now_s >= self.since_s + lasts_s

    def took(self, lease: Mapping[str, Any], begun_s: float, now_s: float) -> "Candidacy":
        """After the API server has taken the Lease that names us, asked for at `begun_s`."""
        record = dict(lease["spec"])
        return replace(self, record=record, since_s=now_s, renewed_s=begun_s)

    def resigned(self) -> "Candidacy":
        return replace(self, renewed_s=None)


def claim(
    candidacy: Candidacy, lease: Object | None, where: tuple[str, str], now: datetime
) -> Object:
    """The Lease that names this operator; with the resourceVersion of the one that was read."""
    before = (lease or {}).get("spec") or {}
    is_mine = before.get("holderIdentity") == candidacy.identity
    spec = {
        "holderIdentity": candidacy.identity,
        "leaseDurationSeconds": max(1, round(candidacy.times.duration_s)),
        "acquireTime": before.get("acquireTime") if is_mine else micro_time(now),
        "renewTime": micro_time(now),
        "leaseTransitions": (before.get("leaseTransitions") or 0) + (not is_mine and bool(before)),
    }
    return made(lease, where, spec)


def release(lease: Object, where: tuple[str, str], now: datetime) -> Object:
    """The Lease that anybody may take at once."""
    spec = lease["spec"] | {
        "holderIdentity": "",
        "leaseDurationSeconds": 1,
        "renewTime": micro_time(now),
    }
    return made(lease, where, spec)


def made(lease: Object | None, where: tuple[str, str], spec: Object) -> Object:
    namespace, name = where
    meta = {"namespace": namespace, "name": name}
    if lease is not None:
        meta["resourceVersion"] = lease["metadata"]["resourceVersion"]
    return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": meta, "spec": spec}


def micro_time(now: datetime) -> str:
    """RFC 3339 in microseconds, as Leases have it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
