"""Names of the operator's own metrics, `ullage_operator_*`."""

from ullage_common.process.metrics import CounterName, GaugeName, HistogramName

RECONCILE = CounterName(
    "ullage_operator_reconcile",
    "Reconciliations of an LLMService by result: ok, denied, invalid, gone, temporary, permanent, "
    "yielded (to another operator) or bug",
    ("result",),
)
RECONCILE_SECONDS = HistogramName(
    "ullage_operator_reconcile_seconds",
    "Time of one reconciliation",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
LEADER = GaugeName(
    "ullage_operator_leader", "1 for the operator that acts, 0 for one that stands by"
)
WATCH_RESTARTS = CounterName(
    "ullage_operator_watch_restarts",
    "Watches restarted, by reason: ended, forgotten, absent, denied, unavailable, refused or bug",
    ("kind", "reason"),
)
OBJECTS = GaugeName("ullage_operator_objects", "Objects that the operator watches", ("kind",))
