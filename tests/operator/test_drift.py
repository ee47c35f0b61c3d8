"""Drift: our own fields count, others' do not, and a field that left counts through the hash."""

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_operator.drift import has_drifted, stamped

DESIRED = {
    "metadata": {"name": "x", "labels": {"a": "b"}},
    "spec": {"replicas": 2, "containers": [{"name": "c", "ports": [{"containerPort": 1}]}]},
}
VALUES = st.recursive(
    st.integers() | st.text(max_size=4) | st.booleans(),
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.lists(inner, max_size=3)
    ),
    max_leaves=10,
)


def live():
    made = copy.deepcopy(stamped(DESIRED))
    made["metadata"] |= {"uid": "1", "resourceVersion": "2"}
    made["spec"]["containers"][0]["ports"][0]["protocol"] = "TCP"
    made["status"] = {"replicas": 1}
    return made


def test_defaults_and_status_are_no_drift():
    assert not has_drifted(stamped(DESIRED), live())


def test_a_changed_a_removed_and_an_added_item_are_drift():
    changed, removed, added = live(), live(), live()
    changed["spec"]["replicas"] = 3
    del removed["metadata"]["labels"]["a"]
    added["spec"]["containers"].append({"name": "sidecar"})
    assert all(has_drifted(stamped(DESIRED), each) for each in (changed, removed, added))


def test_a_field_that_is_no_longer_wanted_is_drift():
    fewer = copy.deepcopy(DESIRED)
    del fewer["spec"]["replicas"]
    assert has_drifted(stamped(fewer), live())


@settings(max_examples=60, deadline=None)
@given(spec=st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_what_was_applied_has_not_drifted(spec):
    desired = stamped({"metadata": {"name": "x"}, "spec": spec})
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
    for obj in map(stamped, make_plan().apply):
        seen = copy.deepcopy(obj)
        seen["metadata"] |= {"uid": "1", "resourceVersion": "2", "generation": 1}
        seen["status"] = {}
        if obj["kind"] == "Service" and seen["spec"].get("clusterIP") != "None":
            seen["spec"] |= {"clusterIP": "10.0.0.1", "type": "ClusterIP"}
        assert not has_drifted(obj, seen)
