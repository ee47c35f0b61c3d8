"""What a rollout remembers comes back as it was; what is lost holds engines where they are."""

import hashlib
import json
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.api import naming
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.rollout.falls import FallCount
from ullage_operator.rollout.observation import RolloutObservation
from ullage_operator.rollout.plan import plan_rollout
from ullage_operator.rollout.release import release_of, revision_of
from ullage_operator.rollout.stages import TRYING, RolloutProgress, RolloutStage
from ullage_operator.rollout.state import (
    RolloutState,
    dump,
    initial,
    is_canary_running,
    load,
    missing,
    unreadable,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
times = st.integers(0, 10**6).map(lambda s: NOW + timedelta(seconds=s))
states = st.builds(
    RolloutProgress,
    stable=st.text(max_size=5),
    since=times,
    stage=st.sampled_from(RolloutStage),
    canary=st.text(max_size=5),
    step=st.integers(0, 5),
    failed=st.text(max_size=5),
    unready_since=st.none() | times,
    unserved_since=st.none() | times,
    settled_since=st.none() | times,
    is_asleep=st.booleans(),
    is_held=st.booleans(),
    reason=st.text(max_size=5),
    message=st.text(max_size=5),
    seen=st.text(max_size=5),
    replaces=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    falls=st.dictionaries(
        st.text(max_size=5),
        st.builds(FallCount, *[st.booleans(), *[st.integers(0, 2**64 - 1)] * 4]),
        max_size=2,
    ),
)
SERVING = {
    "metadata": {"generation": 1},
    "spec": {"replicas": 1},
    "status": {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1},
}
BROKEN = json.dumps({"state": {"stable": "a", "since": str(NOW)}, "release": {}, "tried": 3})


@pytest.fixture
def release(manifest):
    return release_of(parse(manifest()), Settings())


@given(states)
def test_every_decision_is_kept(state):
    memory = RolloutState(state, {"image": "one"})
    told = json.loads(dump(memory))
    is_volatile = state.stage in TRYING and not state.is_held
    assert ("message" in told["state"]) == ("reason" in told["state"]) == (not is_volatile)
    kept = dict(told["state"])
    if is_volatile:
        kept |= {"reason": state.reason, "message": state.message}
    assert msgspec.convert(kept, RolloutProgress) == state
    assert is_canary_running(dump(memory)) == (state.stage is RolloutStage.CANARY)


def test_what_was_kept_is_recalled(release):
    for stage in RolloutStage:
        state = RolloutProgress(
            "a", NOW, stage, "b", 1, "c", NOW, NOW, NOW, True, True, "R", "m", "pause"
        )
        for tried in (None, release, release | {"image": "other"}):
            memory = RolloutState(state, release, tried)
            assert load(dump(memory), release) == memory


def test_an_empty_value_that_pods_lack_is_recalled(manifest):
    """API servers do not keep it, so pods have the name alone."""

    def release_with(value):
        engine = {"name": "engine", "env": [{"name": "B", "value": value}]}
        pool = {"podTemplate": {"spec": {"containers": [engine]}}}
        return release_of(parse(manifest(pools={"single": pool})), Settings())

    stable = release_with("")
    edited = release_with("1")
    text = dump(initial(stable, NOW))
    live = {"spec": {"template": {"spec": {"containers": [{"env": [{"name": "B"}]}]}}}}
    assert load(text, edited, [live]).release == stable
    assert load(text, edited) is None, "no pod names it"


@pytest.mark.parametrize("key", ["rope", "env"])
def test_arguments_of_vllm_that_look_like_variables_are_recalled(manifest, key):
    def release_with(**args):
        spec = {"engine": "VLLM", "vllm": {"args": args}}
        return release_of(parse(manifest(**spec)), Settings())

    items = [{"name": "yarn", "value": 2}, {"valueHash": "none"}]
    stable = release_with(hf_overrides={key: items})
    text = dump(initial(stable, NOW))
    edited = release_with()
    assert load(text, edited).release == stable


def test_values_of_variables_are_not_kept(manifest):
    variable = {"name": "TOKEN", "value": "s3cret"}
    template = {"spec": {"containers": [{"name": "engine", "env": [variable]}]}}
    release = release_of(parse(manifest(pools={"single": {"podTemplate": template}})), Settings())
    text = dump(initial(release, NOW))
    assert "s3cret" not in text
    assert "valueHash" in text
    assert load(text, release).release == release


def test_what_was_sealed_outside_of_environments_is_recalled(manifest):
    """Once every map with a name and a value was kept with a hash."""
    options = [{"name": "ndots", "value": "2"}, {"name": "trust-ad"}]
    variable = {"name": "TOKEN", "value": "s3cret"}
    template = {
        "metadata": {"annotations": {"valueHash": "none"}},
        "spec": {
            "dnsConfig": {"options": options},
            "containers": [{"name": "engine", "env": [variable]}],
        },
    }

    def release_with(**spec):
        pools = {"single": {"podTemplate": template}}
        return release_of(parse(manifest(pools=pools, **spec)), Settings())

    stable = release_with()
    edited = release_with(image="two")
    other = revision_of(stable)
    failed = revision_of(edited)
    progress = RolloutProgress(other, NOW, stage=RolloutStage.ROLLED_BACK, failed=failed)
    document = json.loads(dump(RolloutState(progress, stable, edited)))
    for release in (document["release"], document["tried"]):
        [pool] = release["pools"].values()
        spec = pool["podTemplate"]["spec"]
        assert spec["dnsConfig"]["options"] == options
        # As `TOKEN` is kept: by the first half of the hash of name and value.
        digest = hashlib.sha256(b"ndots=2").hexdigest()[:16]
        spec["dnsConfig"]["options"] = [{"name": "ndots", "valueHash": digest}, options[1]]
    recalled = load(json.dumps(document), edited)
    assert recalled.release == stable
    assert recalled.revision(edited) == failed, "what failed is not tried again"


def known_before(release):
    """As an operator that knew fields less kept it, and what it called that."""
    memory = dict(list(release["memory"].items())[1:])
    remote = {"deadline": memory["tiers"]["remote"]["deadline"]}
    older = release | {"memory": memory | {"tiers": memory["tiers"] | {"remote": remote}}}
    return older, revision_of(older)


@pytest.mark.parametrize(
    "more",
    [
        {"stage": RolloutStage.ROLLED_BACK, "failed": "two"},
        {"stage": RolloutStage.CANARY, "canary": "two", "is_held": True, "reason": "Errors"},
        {"stage": RolloutStage.CANARY, "canary": "two", "step": 1},
        {"stage": RolloutStage.STARTING, "canary": "two"},
    ],
    ids=lambda more: " ".join(map(str, more.values())),
)
def test_a_field_that_a_newer_operator_knows_is_no_other_revision(manifest, more):
    service = parse(manifest(image="two", memory={"tiers": {"remote": {}}}))
    wanted = release_of(service, Settings())
    stable, one = known_before(wanted | {"image": "one"})
    tried, two = known_before(wanted)
    assert two != revision_of(wanted)
    named = {name: two if value == "two" else value for name, value in more.items()}
    before = RolloutProgress(one, NOW, **named)
    text = dump(RolloutState(before, stable, tried))
    for _ in range(2):  # by what was kept, and by what is kept of that
        seen = RolloutObservation(
            now=NOW, stateful_sets={"demo-single": SERVING}, stored_state=text
        )
        planned = plan_rollout(service, seen, Settings())
        for name in ("stable", "stage", "canary", "failed", "step", "is_held"):
            assert getattr(planned.progress, name) == getattr(before, name)
        assert planned.stable.spec.image == "one"
        text = dump(planned.state)
    for edit in ({"image": "three"}, {"image": "two", "pools": {"more": {"gpus": 1}}}):
        edited = release_of(parse(manifest(**edit)), Settings())
        assert load(text, edited).revision(edited) == revision_of(edited)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"state": {}}', "null", "3", BROKEN])
def test_what_cannot_be_read_is_not_taken_for_a_decision(release, text):
    assert load(text, release) is None
    assert not is_canary_running(text)
    assert initial(release, NOW).progress.stable == revision_of(release)


def live(**revisions):
    return {
        name: {"metadata": {"annotations": {naming.REVISION: revision} if revision else {}}}
        for name, revision in revisions.items()
    }


@pytest.mark.parametrize(
    ("running", "annotation", "holds"),
    [
        ({}, "", False),  # nothing runs yet
        ({"a": "new"}, "", False),
        ({"a": "new", "b": "new"}, "", False),
        ({"a": ""}, "", False),  # made before there were revisions
        ({"a": "old"}, "", True),
        ({"a": "new", "b": "old"}, "", True),
        ({"a": "old"}, "promote", True),  # by a word that may be as old as what is lost
        ({"a": "old"}, "promote:other", True),
        ({"a": "old"}, "promote:new", False),
        ({"a": "old"}, "abort:new", True),
    ],
)
def test_a_loss_holds_what_runs(running, annotation, holds):
    found = missing("demo", live(**running), "new", annotation, NOW)
    assert (found is not None) == holds
    if found:
        assert (found.stable, found.canary, found.reason) == ("old", "new", "MemoryLost")
        assert found.is_held
        assert "demo-rollout" in found.message
        assert "serving.ullage.dev/rollout=promote:new" in found.message


def test_what_cannot_be_seen_holds_everything():
    found = unreadable("new", NOW)
    assert found.is_held
    assert "ConfigMaps" in found.message
