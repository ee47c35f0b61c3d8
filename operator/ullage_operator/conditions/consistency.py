"""The EnginesConsistent condition: whether all engines generate the same text.

Engines with different fingerprints still serve, but do not share KV. If a request moves from one
such engine to another, its remaining text may differ from what the first engine would have
generated.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ullage_common.wire.fingerprint import Fingerprint, describe, differences
from ullage_operator.conditions.conditions import ENGINES_CONSISTENT, Condition

DIFFER = "EnginesDiffer"
TWO_REVISIONS = "TwoRevisions"
POOLS_DIFFER = "PoolsDiffer"


@dataclass(frozen=True, slots=True)
class EngineNumerics:
    """An engine's fingerprint, with its pool and revision."""

    pool: str
    """Pool in the spec, even if the engine belongs to the pool's canary."""
    revision: str
    """Revision of the pod, which distinguishes old from new engines of the same pool."""
    fingerprint: Fingerprint


def consistency_condition(engines: Mapping[str, EngineNumerics]) -> list[Condition]:
    """Return the EnginesConsistent condition (empty until an engine reports a fingerprint).

    Args:
        engines: the engines, by pod name.
    """
    if not any(each.fingerprint.digest for each in engines.values()):
        return []
    by_pool: dict[str, dict[str, Fingerprint]] = {}
    by_revision: dict[tuple[str, str], dict[str, Fingerprint]] = {}
    for name, each in engines.items():
        by_pool.setdefault(each.pool, {})[name] = each.fingerprint
        by_revision.setdefault((each.pool, each.revision), {})[name] = each.fingerprint
    if texts := _differing(by_revision.values()):
        message = f"engines of one pool and revision differ, and so may their answers: {texts}"
        return [Condition(ENGINES_CONSISTENT, False, DIFFER, message)]
    if texts := _differing(by_pool.values()):
        message = f"engines of two revisions run, on purpose while a change is rolled out: {texts}"
        return [Condition(ENGINES_CONSISTENT, False, TWO_REVISIONS, message)]
    every = {name: each.fingerprint for name, each in engines.items()}
    if texts := _differing([every]):
        message = f"engines of different pools differ, and so may their answers: {texts}"
        return [Condition(ENGINES_CONSISTENT, False, POOLS_DIFFER, message)]
    [digest] = {each.digest for each in every.values()}
    number = "1 engine has" if len(every) == 1 else f"{len(every)} engines have"
    return [Condition(ENGINES_CONSISTENT, True, "Alike", f"{number} the fingerprint {digest}")]


def _differing(groups: Iterable[Mapping[str, Fingerprint]]) -> str:
    """Describe how the fingerprints of engines in the same group differ (empty if they do not).

    Args:
        groups: groups of engines whose fingerprints should be equal, each a mapping from pod name
            to fingerprint.
    """
    return "; ".join(filter(None, (describe(differences(group)) for group in groups)))
