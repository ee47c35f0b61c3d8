"""What a rollout remembers, as text in a ConfigMap; and what to do when that is lost. Pure.

Without its memory the operator cannot tell a stable revision from one that was rolled back. It then
leaves engines as they are and says so, rather than rolling out what nobody judged.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from ullage_operator import naming
from ullage_operator.release import Release, changed_pools, is_same, overlaid, revision_of
from ullage_operator.rollout import TRYING, Command, Stage, State, initial

_TIMES = ("since", "unready_since", "unserved_since", "settled_since")


@dataclass(frozen=True, slots=True)
class Memory:
    """What was decided, and about which releases."""

    state: State
    release: Release
    """Of the stable engines."""
    tried: Release | None = None
    """Of the other revision that the state names; None: it names none."""

    def revision(self, wanted: Release) -> str:
        """What `state` calls the release that the spec asks for.

        A revision's name is of all its fields, and an operator that knows one more would call the
        same release otherwise: what failed would be tried again.
        """
        if not changed_pools(wanted, self.release):
            return self.state.stable
        other = _other(self.state)
        return other if other and self.tried == wanted else revision_of(wanted)

    def then(self, state: State, wanted: Release) -> "Memory":
        """With what was decided about the release that the spec asks for."""
        revision, other = self.revision(wanted), _other(state)
        known = {_other(self.state): self.tried, revision: wanted}
        release = wanted if state.stable == revision else self.release
        return Memory(state, release, known.get(other) if other else None)


def _other(state: State) -> str:
    """The revision beside the stable one that a state is about; no state is about two."""
    other = state.canary or state.failed
    return "" if other == state.stable else other


def recalled(text: str | None, wanted: Release) -> Memory | None:
    """What was kept, in the form of what the spec asks for; None where it cannot be read."""
    try:
        kept = json.loads(text or "")
        state, tried = msgspec.convert(kept["state"], State), kept.get("tried")
        if tried is not None and is_same(wanted, tried):
            tried = wanted
        return Memory(state, overlaid(wanted, kept["release"]), tried)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def begun(wanted: Release, now: datetime) -> Memory:
    """Of a service that nothing was kept of."""
    return Memory(initial(revision_of(wanted), now), wanted)


def is_measured(text: str | None) -> bool:
    """Whether a canary gets requests now, going by what was kept."""
    try:
        return bool(json.loads(text or "")["state"]["stage"] == Stage.CANARY)
    except (ValueError, KeyError, TypeError):
        return False


def kept_text(memory: Memory) -> str:
    """What must outlive the operator: decisions, and not what is measured meanwhile."""
    state = memory.state
    made = dataclasses.asdict(state)
    if state.stage in TRYING and not state.is_held:
        del made["reason"], made["message"]
    made |= {name: made[name].isoformat() for name in _TIMES if made[name]}
    told = {"state": made, "release": memory.release}
    if memory.tried is not None:
        told["tried"] = memory.tried
    return json.dumps(told, sort_keys=True, indent=1)


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
