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
