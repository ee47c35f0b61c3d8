"""What routers measure, added up by pool: see `ullage_rpc.measures` for each number."""

from collections.abc import Iterable, Mapping

import msgspec

from ullage_operator.autoscale import Load
from ullage_rpc.measures import PoolReport

Report = Mapping[str, PoolReport]
"""By pool, of one process."""


def parse(body: bytes) -> list[Report]:
    """The reports of all processes of a router.

    Raises:
        ValueError: it is something else.
    """
    reports: list[Report] = msgspec.json.decode(body, type=list[dict[str, PoolReport]])
    return reports


def is_wanted(reports: Iterable[Report]) -> bool:
    """Whether a pool that sleeps should wake."""
    return any(pool.wanted for report in reports for pool in report.values())


def load_of(name: str, reports: Iterable[Report], is_partial: bool) -> Load:
    """One pool as all routers see it.

    What engines tell every router alike is taken from the one that sees most of them; what each
    router has by itself is added up.
    """
    seen = [report[name] for report in reports if name in report]
    if not seen:
        return Load(is_partial=True)
    best = max(seen, key=lambda each: (each.ready, -each.headroom_bytes))
    credit = sum(each.credit_bytes for each in seen)
    claimed = best.capacity_bytes - best.headroom_bytes + credit
    return Load(
        ready=best.ready,
        capacity=best.capacity_bytes,
        claimed=max(0, min(best.capacity_bytes, claimed)),
        waiting=sum(each.queue_bytes for each in seen),
        queue_s=max(each.queue_s for each in seen),
        answered=sum(each.answered for each in seen),
        late=sum(each.late for each in seen),
        active=max(each.engine_requests for each in seen)
        + sum(each.queued + each.held for each in seen),
        wanted=sum(each.wanted for each in seen),
        idle_s=min(each.idle_s for each in seen),
        is_partial=is_partial,
    )
