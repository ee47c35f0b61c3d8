"""Decides which operator leads, with a state machine over a Lease of coordination.k8s.io.

This module has no I/O and no clock. Callers pass the current time.

Clocks of different machines are never compared. Each operator uses its own monotonic clock to
measure how long the Lease has stayed unchanged. A Lease that stays unchanged for its whole duration
has expired.

A leader stops writing well before its Lease expires: `renew_deadline_s` after it *began* its last
successful renewal. The remaining third of the duration allows for clocks that run at different
speeds, and for writes that are still in flight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ullage_operator.api.naming import LEASE

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Times:
    """Timing of a Lease, in seconds."""

    duration_s: float = 15.0

    @property
    def renew_deadline_s(self) -> float:
        """Return the seconds without a successful renewal after which a leader stops writing."""
        return self.duration_s * 2 / 3

    @property
    def retry_s(self) -> float:
        """Return the seconds between attempts to acquire or renew the Lease."""
        return self.duration_s * 2 / 15


@dataclass(frozen=True, slots=True)
class Candidacy:
    """The state of the leader election as one operator sees it."""

    identity: str
    times: Times = Times()
    record: Object | None = None
    """The spec of the Lease when it was last read."""
    since_s: float = 0.0
    """Time at which this operator first saw `record`."""
    renewed_s: float | None = None
    """Time at which the last successful renewal began, or None if this operator does not lead."""

    def leads_for_s(self, now_s: float) -> float:
        """Return the seconds for which this operator may still write (0 if it does not lead)."""
        if self.renewed_s is None:
            return 0.0
        return max(0.0, self.renewed_s + self.times.renew_deadline_s - now_s)

    def saw(self, lease: Mapping[str, Any] | None, now_s: float) -> "Candidacy":
        """Return the state of the election, updated with the Lease that was just read.

        If another operator holds the Lease now, this operator no longer leads.

        Args:
            lease: the Lease, or None if it does not exist.
            now_s: the current time.
        """
        record = None if lease is None else dict(lease.get("spec") or {})
        if record == self.record:
            return self
        is_mine = record is not None and record.get("holderIdentity") == self.identity
        renewed_s = self.renewed_s if is_mine else None
        return replace(self, record=record, since_s=now_s, renewed_s=renewed_s)

    def may_take(self, now_s: float) -> bool:
        """Return whether this operator may acquire or renew the Lease.

        This is the case if the operator already holds the Lease, if nobody holds it, or if it has
        expired.
        """
        record = self.record or {}
        holder = record.get("holderIdentity") or ""
        if holder in ("", self.identity):
            return True
        lasts_s = record.get("leaseDurationSeconds") or self.times.duration_s
        return now_s >= self.since_s + lasts_s

    def took(self, lease: Mapping[str, Any], begun_s: float, now_s: float) -> "Candidacy":
        """Return the state after this operator has acquired or renewed the Lease.

        Args:
            lease: the Lease that was written.
            begun_s: the time at which the write began. The leadership is counted from this time.
            now_s: the current time.
        """
        record = dict(lease["spec"])
        return replace(self, record=record, since_s=now_s, renewed_s=begun_s)

    def resigned(self) -> "Candidacy":
        return replace(self, renewed_s=None)


def claim(
    candidacy: Candidacy, lease: Object | None, where: tuple[str, str], now: datetime
) -> Object:
    """Return the Lease with this operator as its holder.

    Args:
        candidacy: the state of the election.
        lease: the Lease that was read, or None if it does not exist. The result keeps its
            resourceVersion.
        where: the namespace and name of the Lease.
        now: the current time.
    """
    before = (lease or {}).get("spec") or {}
    is_mine = before.get("holderIdentity") == candidacy.identity
    spec = {
        "holderIdentity": candidacy.identity,
        "leaseDurationSeconds": max(1, round(candidacy.times.duration_s)),
        "acquireTime": before.get("acquireTime") if is_mine else micro_time(now),
        "renewTime": micro_time(now),
        "leaseTransitions": (before.get("leaseTransitions") or 0) + (not is_mine and bool(before)),
    }
    return lease_with(lease, where, spec)


def release(lease: Object, where: tuple[str, str], now: datetime) -> Object:
    """Return a released Lease, which another operator may acquire immediately."""
    spec = lease["spec"] | {
        "holderIdentity": "",
        "leaseDurationSeconds": 1,
        "renewTime": micro_time(now),
    }
    return lease_with(lease, where, spec)


def lease_with(lease: Object | None, where: tuple[str, str], spec: Object) -> Object:
    """Return a Lease with the given spec and the resourceVersion of the Lease that was read."""
    namespace, name = where
    meta = {"namespace": namespace, "name": name}
    if lease is not None:
        meta["resourceVersion"] = lease["metadata"]["resourceVersion"]
    return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": meta, "spec": spec}


def micro_time(now: datetime) -> str:
    """Format a time as Leases do: RFC 3339, with microseconds."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def is_of(lease: Object, identity: str) -> bool:
    return bool((lease.get("spec") or {}).get("holderIdentity") == identity)
