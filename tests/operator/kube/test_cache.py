"""The cache: what watches tell, in any order, is what reconciliations read."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ullage_kubeapi.trial import relist

from ullage_operator.api.naming import OWNED, POD, SERVICE, kind_of
from ullage_operator.api.renames import dropped_fields
from ullage_operator.kube.cache import Cache, Denied, Scope, ServiceKey, slim, version_of

CONFIG_MAP = kind_of("v1", "ConfigMap")
MONITOR = kind_of("monitoring.coreos.com/v1", "PodMonitor")
KEY = ServiceKey("n", "s")


def made(kind=CONFIG_MAP, name="c", version=1, instance="s", **more: Any) -> dict[str, Any]:
    meta = {
        "name": name,
        "namespace": "n",
        "resourceVersion": str(version),
        "labels": {"app.kubernetes.io/instance": instance},
    }
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": meta, **more}


class Watched:
    """A cache with all scopes of all namespaces, and whom it woke."""

    def __init__(self, *, listed: bool = True) -> None:
        self.woken: list[ServiceKey] = []
        self.scopes = {kind: Scope(kind, "") for kind in (SERVICE, POD, CONFIG_MAP, MONITOR)}
        self.cache = Cache(self.scopes.values(), self.woken.append)
        if listed:
            for scope in self.scopes.values():
                self.cache.swept(scope, {}, 1)

    def names(self) -> set[str]:
        return {obj["metadata"]["name"] for obj in self.cache.owned(KEY)}


def test_nothing_is_woken_before_all_has_been_listed():
    watched = Watched(listed=False)
    cache = watched.cache
    scopes = watched.scopes
    relist(cache, scopes[SERVICE], [made(SERVICE, "s")], 5)
    relist(cache, scopes[POD], [], 5)
    cache.denied(scopes[CONFIG_MAP], "list")
    assert (watched.woken, cache.complete) == ([], False)
    cache.absent(scopes[MONITOR])
    assert (set(watched.woken), cache.complete) == ({KEY}, True)


def test_events_are_kept_by_service():
    watched = Watched()
    cache = watched.cache
    scopes = watched.scopes
    cache.changed(scopes[SERVICE], made(SERVICE, "s", 2))
    cache.changed(scopes[CONFIG_MAP], made(name="a", version=3))
    cache.changed(scopes[CONFIG_MAP], made(name="b", version=4, instance="t"))
    cache.changed(scopes[POD], made(POD, "p", 5, spec={"nodeName": "x", "volumes": [1]}))
    assert cache.service(KEY) is not None
    assert cache.services() == [KEY]
    assert watched.names() == {"a"}
    assert [pod["spec"] for pod in cache.pods(KEY)] == [{"nodeName": "x", "containers": []}]
    assert watched.woken == [KEY, KEY, ServiceKey("n", "t"), KEY]
    cache.deleted(scopes[CONFIG_MAP], made(name="a", version=6))
    assert watched.names() == set()
    assert watched.woken[-1] == KEY


@pytest.mark.parametrize("revision", [15, 40], ids=["lower", "caught up"])
def test_versions_that_have_gone_back_make_all_events_newer(revision):
    """etcd was restored from a backup: `a` and `b` are as they were, and `c` never existed."""
    watched = Watched()
    cache = watched.cache
    scope = watched.scopes[CONFIG_MAP]
    for name, version in (("a", 10), ("b", 20), ("c", 21)):
        cache.changed(scope, made(name=name, version=version, data={"v": str(version)}))
    assert not cache.swept(scope, {("n", "a"): 10, ("n", "b"): 20, ("n", "c"): 21}, 30)
    watched.woken.clear()

    listed = {("n", "a"): 10, ("n", "b"): 12}
    assert cache.swept(scope, listed, revision)
    assert watched.names() == {"a", "b"}
    assert cache.is_behind(scope)

    cache.changed(scope, made(name="a", version=10, data={"v": "10"}))
    cache.changed(scope, made(name="b", version=12, data={"v": "12"}))
    assert not cache.is_behind(scope)
    assert {obj["data"]["v"] for obj in cache.owned(KEY)} == {"10", "12"}
    assert watched.woken == [KEY, KEY]  # `c` is gone, and `b` is another

    cache.changed(scope, made(name="b", version=11, data={"v": "11"}))
    assert {obj["data"]["v"] for obj in cache.owned(KEY)} == {"10", "12"}
    assert not cache.swept(scope, listed, revision + 1)


def test_an_object_that_changes_its_service_wakes_both():
    watched = Watched()
    watched.cache.changed(watched.scopes[CONFIG_MAP], made(version=2))
    watched.cache.changed(watched.scopes[CONFIG_MAP], made(version=3, instance="t"))
    assert watched.names() == set()
    assert watched.woken == [KEY, KEY, ServiceKey("n", "t")]


def test_a_list_tells_what_was_deleted_in_a_gap():
    watched = Watched()
    scope = watched.scopes[CONFIG_MAP]
    for name in "abc":
        watched.cache.changed(scope, made(name=name, version=2))
    watched.woken.clear()
    edited = made(name="b", version=9, data={"k": "v"})
    relist(watched.cache, scope, [made(name="a", version=2), edited], 10)
    assert watched.names() == {"a", "b"}
    assert watched.woken == [KEY, KEY]  # for b and c; a is as it was


def test_an_own_write_is_seen_at_once_and_its_event_wakes_nobody():
    watched = Watched()
    watched.cache.written(made(version=7))
    assert watched.names() == {"c"}
    assert watched.woken == []
    watched.cache.changed(watched.scopes[CONFIG_MAP], made(version=7))
    assert watched.woken == []
    watched.cache.changed(watched.scopes[CONFIG_MAP], made(version=8, data={"k": "v"}))
    assert watched.woken == [KEY]


def test_a_status_on_which_nothing_depends_is_not_kept_and_wakes_nobody():
    watched = Watched()
    budget = kind_of("policy/v1", "PodDisruptionBudget")
    workload = kind_of("apps/v1", "StatefulSet")
    for kind in (CONFIG_MAP, budget, workload):
        kept = slim(kind, made(kind, status={"observedGeneration": 1}))
        assert ("status" in kept) == (kind == workload)
    for version in (2, 3):  # as by a controller that writes the status
        watched.cache.changed(watched.scopes[CONFIG_MAP], made(version=version, status={"a": 1}))
    assert watched.woken == [KEY]
    watched.cache.changed(watched.scopes[CONFIG_MAP], made(version=4, instance="t"))
    assert watched.woken == [KEY, KEY, ServiceKey("n", "t")]


def test_an_answer_that_the_watch_has_overtaken_does_not_raise_the_dead():
    watched = Watched()
    scope = watched.scopes[CONFIG_MAP]
    watched.cache.changed(scope, made(version=7))
    watched.cache.deleted(scope, made(version=8))
    watched.cache.written(made(version=7))
    assert watched.names() == set()


def test_a_late_deletion_leaves_the_object_that_was_made_since():
    watched = Watched()
    watched.cache.written(made(version=20))
    watched.cache.deleted(watched.scopes[CONFIG_MAP], made(version=15))
    assert watched.names() == {"c"}


def test_what_is_denied_or_absent_is_told_until_it_is_listed():
    watched = Watched()
    cache = watched.cache
    scopes = watched.scopes
    cache.changed(scopes[SERVICE], made(SERVICE, "s", 2))
    watched.woken.clear()
    assert cache.denied(scopes[CONFIG_MAP], "watch")
    assert not cache.denied(scopes[CONFIG_MAP], "watch")
    assert cache.absent(scopes[MONITOR])
    assert watched.woken == [KEY, KEY]
    assert cache.missing("n") == [Denied("watch", "configmaps", "")]
    assert str(cache.missing("n")[0]) == "watch configmaps in all namespaces"
    assert not cache.sees(CONFIG_MAP, "n")
    assert cache.serves(CONFIG_MAP, "n")
    assert not cache.serves(MONITOR, "n")
    relist(cache, scopes[CONFIG_MAP], [], 30)
    assert cache.missing("n") == []
    assert cache.sees(CONFIG_MAP, "n")
    assert watched.woken == [KEY, KEY, KEY]


def test_field_managers_and_last_applied_are_not_kept():
    noted = made()
    noted["metadata"] |= {
        "managedFields": [{"manager": "x"}],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "mine": "y"},
    }
    kept = slim(CONFIG_MAP, noted)["metadata"]
    assert "managedFields" not in kept
    assert kept["annotations"] == {"mine": "y"}
    own = {"manager": "ullage-operator", "operation": "Update", "fieldsV1": {"f:data": {}}}
    for entry, is_kept in (
        (own, True),
        (own | {"operation": "Apply"}, False),
        (own | {"subresource": "status"}, False),
    ):
        noted["metadata"]["managedFields"] = [entry]
        kept = slim(CONFIG_MAP, noted)["metadata"]
        assert ("managedFields" in kept) == is_kept
        assert "fieldsV1" not in str(kept)


@pytest.mark.parametrize(("field", "is_kept"), [("errorRate", True), ("errorPercent", False)])
def test_what_a_service_declared_is_kept_where_the_api_server_dropped_it(field, is_kept):
    name = "kubectl.kubernetes.io/last-applied-configuration"
    noted = made(SERVICE, spec={"slo": {"errorPercent": 1}})
    noted["metadata"]["annotations"] = {name: json.dumps({"spec": {"slo": {field: 1}}})}
    assert (name in slim(SERVICE, noted)["metadata"]["annotations"]) == is_kept
    if is_kept:
        assert dropped_fields(slim(SERVICE, noted)) == {"spec.slo.errorRate": 1}


@pytest.mark.parametrize("kind", OWNED, ids=lambda kind: kind.plural)
def test_paths_are_those_of_the_api(kind):
    path = kind.path("n", "x")
    assert path.startswith("/apis/" if "/" in kind.api_version else "/api/v1/")
    assert path.endswith(f"/namespaces/n/{kind.plural}/x")
    assert kind.path("") == path.replace("/namespaces/n", "").removesuffix("/x")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "write", "answer", "relist", "sweep", "event"]),
        st.sampled_from("abc"),
    ),
    max_size=60,
)


@given(STEPS)
def test_however_events_sweeps_and_writes_meet_the_cache_ends_as_the_server_is(steps):
    """A server whose events come late and, of different objects, in any order; so do answers."""
    watched = Watched()
    scope = watched.scopes[CONFIG_MAP]
    cache = watched.cache
    server: dict[str, dict[str, Any]] = {}
    events: dict[str, list[tuple[Any, dict[str, Any]]]] = {name: [] for name in "abc"}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in "abc"}
    revision = 1

    def sweep() -> None:
        cache.swept(scope, {("n", name): version_of(obj) for name, obj in server.items()}, revision)

    for step, name in steps:
        revision += 1
        if step in ("put", "write"):
            server[name] = made(name=name, version=revision)
            events[name].append((cache.changed, server[name]))
            answers[name] += [server[name]] if step == "write" else []
        elif step == "answer" and answers[name]:
            cache.written(answers[name].pop(0))
        elif step == "delete" and name in server:
            del server[name]
            events[name].append((cache.deleted, made(name=name, version=revision)))
        elif step == "relist":  # after a gap in the history: deletions are not told
            for pending in events.values():
                pending.clear()
            for each, obj in server.items():
                events[each].append((cache.changed, obj))
            sweep()
        elif step == "sweep":
            sweep()
        elif step == "event" and events[name]:
            tell, obj = events[name].pop(0)
            tell(scope, obj)
    for tell, obj in [event for pending in events.values() for event in pending]:
        tell(scope, obj)
    for obj in [obj for pending in answers.values() for obj in pending]:
        cache.written(obj)
    held = {obj["metadata"]["name"]: obj["metadata"] for obj in cache.owned(KEY)}
    assert held == {name: obj["metadata"] for name, obj in server.items()}
    assert not cache.is_behind(scope)


def test_nothing_is_seen_before_events_have_brought_what_a_sweep_names():
    watched = Watched(listed=False)
    scope = watched.scopes[CONFIG_MAP]
    cache = watched.cache
    cache.changed(scope, made(name="a", version=3))
    cache.swept(scope, {("n", "a"): 3, ("n", "b"): 4, ("n", "c"): 5}, 6)
    assert not cache.sees(CONFIG_MAP, "n")
    assert cache.is_behind(scope)
    cache.deleted(scope, made(name="b", version=7))
    cache.changed(scope, made(name="c", version=5))
    assert cache.sees(CONFIG_MAP, "n")
    assert watched.names() == {"a", "c"}


def test_what_cannot_be_listed_is_told_but_what_was_seen_stays():
    watched = Watched()
    cache = watched.cache
    scopes = watched.scopes
    assert not cache.failing(scopes[CONFIG_MAP], "500")
    assert cache.sees(CONFIG_MAP, "n")
    cache.absent(scopes[MONITOR])
    assert cache.failing(scopes[MONITOR], "500")
    assert not cache.sees(MONITOR, "n")
    assert cache.unlisted("n") == ["podmonitors.monitoring.coreos.com: 500"]
    assert cache.serves(MONITOR, "n")
