"""Conditions about what the cluster gives the operator, rather than about the service itself.

MissingPermission    only there while it holds: a right that the operator lacks, by name
MonitoringAvailable  whether the kinds exist by which a Prometheus operator finds the pods
"""

from collections.abc import Collection, Sequence

from ullage_operator.conditions import Finding
from ullage_operator.kinds import MONITORING_API, OWNED

MISSING_PERMISSION = "MissingPermission"
MONITORING_AVAILABLE = "MonitoringAvailable"
MONITORING = tuple(kind.name for kind in OWNED if kind.api_version == MONITORING_API)


def surroundings(serves: Collection[str], missing: Sequence[str]) -> list[Finding]:
    """The conditions, from the optional kinds that are served and the rights that are missing."""
    return [monitoring(serves), *lacking(missing)]


def monitoring(serves: Collection[str]) -> Finding:
    absent = [kind for kind in MONITORING if kind not in serves]
    if not absent:
        message = "PodMonitors tell Prometheus what to scrape, and PrometheusRules when to alert"
        return Finding(MONITORING_AVAILABLE, True, "Served", message)
    message = (
        f"the cluster does not serve {' and '.join(absent)} of {MONITORING_API}: "
        "install the Prometheus operator, or scrape the pods' port named metrics"
    )
    return Finding(MONITORING_AVAILABLE, False, "KindsAbsent", message)


def lacking(missing: Sequence[str]) -> list[Finding]:
    if not missing:
        return []
    message = f"the operator may not {'; '.join(missing)}: grant it; all else goes on"
    return [Finding(MISSING_PERMISSION, True, "Forbidden", message)]
