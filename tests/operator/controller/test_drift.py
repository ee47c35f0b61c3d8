"""Drift: our own fields count, others' do not, and a field that left counts through the hash."""

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_operator.controller.apply import AppliedChanges
from ullage_operator.controller.drift import has_drifted, with_applied_hash

DESIRED = {
    "metadata": {"name": "x", "labels": {"a": "b"}},
    "spec": {
        "replicas": 2,
        "containers": [{"name": "c", "args": ["a"], "ports": [{"containerPort": 1}]}],
    },
}
VALUES = st.recursive(
    st.integers() | st.text(max_size=4) | st.booleans(),
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.lists(inner, max_size=3)
    ),
    max_leaves=10,
)


def live():
    made = copy.deepcopy(with_applied_hash(DESIRED))
    made["metadata"] |= {"uid": "1", "resourceVersion": "2"}
    made["spec"]["containers"][0]["ports"][0]["protocol"] = "TCP"
    made["status"] = {"replicas": 1}
    return made


def test_defaults_and_status_are_no_drift():
    assert not has_drifted(with_applied_hash(DESIRED), live())


def test_a_changed_and_a_removed_field_and_an_added_argument_are_drift():
    changed = live()
    removed = live()
    added = live()
    changed["spec"]["replicas"] = 3
    del removed["metadata"]["labels"]["a"]
    added["spec"]["containers"][0]["args"].append("--more")
    assert all(has_drifted(with_applied_hash(DESIRED), each) for each in (changed, removed, added))


def test_what_others_add_to_a_list_of_named_items_is_theirs():
    injected = live()
    containers = injected["spec"]["containers"]
    containers.insert(0, {"name": "sidecar", "image": "proxy"})
    containers[1]["ports"].insert(0, {"containerPort": 9})
    mount = {"name": "v", "mountPath": "/v"}
    desired = copy.deepcopy(DESIRED)
    desired["spec"]["containers"][0]["volumeMounts"] = [mount, mount | {"mountPath": "/w"}]
    containers[1]["volumeMounts"] = [
        {"name": "token", "mountPath": "/token"},
        mount | {"mountPath": "/w", "readOnly": False},
        mount,
    ]
    injected["metadata"]["annotations"] = with_applied_hash(desired)["metadata"]["annotations"]
    assert not has_drifted(with_applied_hash(desired), injected)
    containers[1]["ports"][1]["containerPort"] = 2
    assert has_drifted(with_applied_hash(desired), injected)
    emptied = live()
    emptied["spec"]["containers"] = []
    assert has_drifted(with_applied_hash(DESIRED), emptied)


def test_an_empty_value_that_is_not_kept_is_no_drift():
    """API servers drop empty strings and lists, and flags that are false unless said."""
    desired = copy.deepcopy(DESIRED)
    container = desired["spec"]["containers"][0]
    container |= {"env": [{"name": "B", "value": ""}], "command": [], "tty": False}
    container["volumeMounts"] = [{"name": "v", "mountPath": "/v", "readOnly": False}]
    desired = with_applied_hash(desired)
    seen = copy.deepcopy(desired)
    kept = seen["spec"]["containers"][0]
    del kept["env"][0]["value"], kept["command"], kept["tty"], kept["volumeMounts"][0]["readOnly"]
    assert not has_drifted(desired, seen)
    kept["env"][0]["value"] = "1"
    assert has_drifted(desired, seen)


def test_a_flag_that_defaults_to_true_is_drift_where_it_is_gone():
    desired = copy.deepcopy(DESIRED)
    desired["spec"]["automountServiceAccountToken"] = False
    desired = with_applied_hash(desired)
    seen = copy.deepcopy(desired)
    del seen["spec"]["automountServiceAccountToken"]
    assert has_drifted(desired, seen)


def test_a_field_that_is_no_longer_wanted_is_drift():
    fewer = copy.deepcopy(DESIRED)
    del fewer["spec"]["replicas"]
    assert has_drifted(with_applied_hash(fewer), live())


@settings(max_examples=60, deadline=None)
@given(spec=st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_what_was_applied_has_not_drifted(spec):
    desired = with_applied_hash({"metadata": {"name": "x"}, "spec": spec})
    assert not has_drifted(desired, copy.deepcopy(desired))


def test_quantities_that_the_server_rewrites_are_no_reason_to_write_for_ever(make_plan):
    """Amounts are planned as the API server stores them."""
    stored = {"cpu": "1500m", "memory": "2Gi"}
    for written in ({"cpu": "1.5", "memory": "2048Mi"}, {"cpu": "1500m", "memory": "2Gi"}):
        pools = {"single": {"resources": {"requests": written}}}
        (made,) = [o for o in make_plan(pools=pools).apply if o["kind"] == "StatefulSet"]
        (container,) = made["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == stored


def test_a_plan_that_was_applied_is_applied_no_more(make_plan):
    """Of every kind of object, as the API server completes it."""
    for obj in map(with_applied_hash, make_plan().apply):
        seen = copy.deepcopy(obj)
        seen["metadata"] |= {"uid": "1", "resourceVersion": "2", "generation": 1}
        seen["status"] = {}
        if obj["kind"] == "Service" and seen["spec"].get("clusterIP") != "None":
            seen["spec"] |= {"clusterIP": "10.0.0.1", "type": "ClusterIP"}
        assert not has_drifted(obj, seen)


def test_changes_tell_drift_from_an_update_and_nothing_of_what_stayed() -> None:
    def live(version: int, replicas: int) -> dict[str, Any]:
        meta = {"name": "s", "resourceVersion": str(version)}
        return with_applied_hash(
            {"kind": "StatefulSet", "metadata": meta, "spec": {"replicas": replicas}}
        )

    changes = AppliedChanges()
    changes.on_applied(live(1, 1), None, live(1, 1))
    changes.on_applied(live(2, 2), live(1, 1), live(2, 2))
    edited = live(2, 2)
    edited["metadata"]["resourceVersion"] = "3"
    changes.on_applied(live(2, 2), edited, live(4, 2))
    changes.on_applied(live(2, 2), live(5, 2), live(5, 2))
    changes.deleted.append("Service x")
    assert [(note.reason, note.message) for note in changes.notes(is_new=False)] == [
        ("Created", "StatefulSet s"),
        ("Updated", "StatefulSet s"),
        ("DriftRepaired", "StatefulSet s"),
        ("Deleted", "Service x"),
    ]
    assert "Created" not in {note.reason for note in changes.notes(is_new=True)}
