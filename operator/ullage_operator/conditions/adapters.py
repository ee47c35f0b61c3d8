"""The AdaptersReady condition and status.adapters: the LoRA adapters that engines serve.

If an adapter fails to load, the service stays ready, because engines still serve the model and all
other adapters.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ullage.headroom.v1 import headroom_pb2
from ullage_operator.conditions.conditions import ADAPTERS_READY, Condition

Reports = Mapping[str, Sequence[headroom_pb2.AdapterState]]
"""Adapter states of ready engines, by pod name."""

_LONGEST = 512
"""Maximum number of characters shown of an engine's error message about an adapter."""


def adapters_status(names: Iterable[str], reports: Reports) -> list[dict[str, Any]]:
    """Return status.adapters, which lists each requested adapter's engine count and errors."""
    return [_status(name, reports) for name in names]


def _status(name: str, reports: Reports) -> dict[str, Any]:
    states = _states_of(name, reports)
    num_served = sum(_is_served(state) for state in states.values())
    message = _message(states)
    return {
        "name": name,
        "engines": f"{num_served}/{len(reports)}",
        **({"message": message} if message else {}),
    }


def adapters_condition(names: Sequence[str], reports: Reports) -> list[Condition]:
    """Return the AdaptersReady condition, or an empty list if it does not apply.

    It does not apply if the service has no adapters, or if all engines are asleep.
    """
    if not names or not reports:
        return []
    failed: list[str] = []
    differing: list[str] = []
    loading: list[str] = []
    for name in names:
        states = _states_of(name, reports)
        num_served = sum(_is_served(state) for state in states.values())
        if message := _message(states):
            failed.append(f"{name}: {message}")
        elif num_served < len(reports):
            loading.append(f"{name} is on {num_served} of {len(reports)} engines")
        elif len({state.digest for state in states.values()}) > 1:
            differing.append(f"{name} has different files on {' and '.join(sorted(states))}")

    if failed:
        return [Condition(ADAPTERS_READY, False, "AdapterFailed", "; ".join(failed))]
    if differing:
        return [Condition(ADAPTERS_READY, False, "AdaptersDiffer", "; ".join(differing))]
    if loading:
        return [Condition(ADAPTERS_READY, False, "AdaptersLoading", "; ".join(loading))]
    return [Condition(ADAPTERS_READY, True, "Loaded", f"all engines serve {', '.join(names)}")]


def _states_of(name: str, reports: Reports) -> dict[str, headroom_pb2.AdapterState]:
    return {pod: state for pod, states in reports.items() for state in states if state.name == name}


def _is_served(state: headroom_pb2.AdapterState) -> bool:
    return state.served and not state.error


def _message(states: Mapping[str, headroom_pb2.AdapterState]) -> str:
    """Return an error message about loading an adapter, with the names of the affected pods."""
    errors = {pod: state.error[:_LONGEST] for pod, state in sorted(states.items()) if state.error}
    if not errors:
        return ""
    first, *others = errors
    more = f" and {len(others)} more" if others else ""
    before = "; the engine still serves the previous files" if states[first].served else ""
    return f"{errors[first]} (pod {first}{more}){before}"
