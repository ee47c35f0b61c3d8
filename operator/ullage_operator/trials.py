"""What routers tell of a canary's trial, read from the text of their metrics."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from ullage_operator.judgement import Side, add

METRIC = "ullage_router_trial"
_PREFIXES = (METRIC, f"# HELP {METRIC}", f"# TYPE {METRIC}")


@dataclass(frozen=True, slots=True)
class Trial:
    """One router's counts."""

    name: str
    """Revision and step."""
    canary: Side
    stable: Side


def name_of(revision: str, step: int) -> str:
    """As routers name what is tried. Not by weight, which changes with the pools' sizes: counts of
    both sides are compared as shares, and a trial that scales would never see enough of them."""
    return f"{revision}/{step}"


def read(text: str) -> list[Trial]:
    """The trials of a router, one of each of its processes; none where there is no canary."""
    own = "\n".join(line for line in text.splitlines() if line.startswith(_PREFIXES))
    counts: dict[tuple[str, str], dict[str, dict[tuple[str, str], float]]] = {}
    for family in text_string_to_metric_families(f"{own}\n"):
        for sample in family.samples:
            labels = sample.labels
            whose = counts.setdefault((labels.get("process", ""), labels["trial"]), {})
            side = whose.setdefault(labels["side"], defaultdict(float))
            side[labels["what"], labels["le"]] += sample.value
    return [
        Trial(name, _side(sides.get("canary", {})), _side(sides.get("stable", {})))
        for (_, name), sides in counts.items()
    ]


def _side(counts: dict[tuple[str, str], float]) -> Side:
    def times(what: str) -> dict[float, int]:
        return {_end(le): int(count) for (name, le), count in counts.items() if name == what}

    def number(what: str) -> int:
        return int(counts.get((what, ""), 0))

    return Side(
        number("succeeded"),
        number("failed"),
        number("declined"),
        number("restarts"),
        times("ttft"),
        times("e2e"),
    )


def _end(le: str) -> float:
    return math.inf if le == "+Inf" else float(le)


def together(trials: Iterable[Trial], name: str) -> tuple[Side, Side, int]:
    """(canary, stable, routers) of those who are at that step already."""
    # Older routers, which a pinned image keeps, add the weight: `name/weight`.
    current = [trial for trial in trials if f"{trial.name}/".startswith(f"{name}/")]
    return add(t.canary for t in current), add(t.stable for t in current), len(current)
