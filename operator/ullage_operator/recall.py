"""What a rollout remembers, as text in a ConfigMap; and what to do when that is lost. Pure.

Without its memory the operator cannot tell a stable revision from one that was rolled back. It then
leaves engines as they are and says so, rather than rolling out what nobody judged.
"""

import dataclasses
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from ullage_operator import naming
from ullage_operator.release import Release, overlaid, revision_of
from ullage_operator.rollout import TRYING, Command, Stage, State, initial

_TIMES = ("since", "unready_since", "unserved_since", "settled_since")


def recalled(text: str | None, wanted: Release) -> tuple[State, Release] | None:
    """The state and the stable release that were kept; None where they cannot be read."""
    try:
        kept = json.loads(text or "")
        state = msgspec.convert(kept["state"], State)
        return state, overlaid(wanted, kept["release"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def begun(wanted: Release, now: datetime) -> tuple[State, Release]:
    """Of a service that nothing was kept of."""
    return initial(revision_of(wanted), now), wanted


def is_measured(text: str | None) -> bool:
    """Whether a canary gets requests now, going by what was kept."""
    try:
        return bool(json.loads(text or "")["state"]["stage"] == Stage.CANARY)
    except (ValueError, KeyError, TypeError):
        return False


def kept_text(state: State, release: Release) -> str:
    """What must outlive the operator: decisions, and not what is measured meanwhile."""
    made = dataclasses.asdict(state)
    if state.stage in TRYING and not state.is_held:
        del made["reason"], made["message"]
    made |= {name: made[name].isoformat() for name in _TIMES if made[name]}
    return json.dumps({"state": made, "release": release}, sort_keys=True, indent=1)


def unseen(wanted: str, now: datetime) -> State:
    """Of a service whose ConfigMaps the operator cannot see: nothing is decided."""
    message = (
        "what was decided cannot be read: engines stay as they are until the operator may list and "
        "watch ConfigMaps"
    )
    return State("", now, canary=wanted, is_held=True, reason="MemoryUnseen", message=message)


def lost(
    name: str, live: Mapping[str, Mapping[str, Any]], wanted: str, annotation: str, now: datetime
) -> State | None:
    """A state that holds everything, where nothing is remembered and engines run what is not
    asked for; None where there is nothing to lose.

    Args:
        name: of the service.
        live: its pools' StatefulSets, by name.
    """
    running = {_revision(item) for item in live.values()} - {"", wanted}
    if not running or annotation == f"{Command.PROMOTE}:{wanted}":
        return None
    others = " and ".join(sorted(running))
    message = (
        f"what was decided is lost with ConfigMap {naming.rollout_name(name)}: engines run "
        f"revision {others} and the spec asks for {wanted}, which may have failed. They stay as "
        "they are until the ConfigMap is restored, the spec asks for what they run, or annotation "
        f"{naming.ROLLOUT}={Command.PROMOTE}:{wanted} rolls {wanted} out"
    )
    stable = sorted(running)[0]
    return State(stable, now, canary=wanted, is_held=True, reason="MemoryLost", message=message)


def _revision(item: Mapping[str, Any]) -> str:
    return str((item["metadata"].get("annotations") or {}).get(naming.REVISION, ""))
