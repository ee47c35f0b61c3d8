"""The store: what watches tell, in any order, is what reconciliations read."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.kinds import OWNED, POD, SERVICE, kind_of
from ullage_operator.store import Denied, Scope, ServiceKey, Store, slim

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
    """A store with all scopes of all namespaces, and whom it woke."""

    def __init__(self, *, listed: bool = True) -> None:
        self.woken: list[ServiceKey] = []
        self.scopes = {kind: Scope(kind, "") for kind in (SERVICE, POD, CONFIG_MAP, MONITOR)}
        self.store = Store(self.scopes.values(), self.woken.append)
        if listed:
            for scope in self.scopes.values():
                self.store.listed(scope, [], "1")

    def names(self) -> set[str]:
        return {obj["metadata"]["name"] for obj in self.store.owned(KEY)}


def test_nothing_is_woken_before_all_has_been_listed():
    watched = Watched(listed=False)
    store, scopes = watched.store, watched.scopes
    store.listed(scopes[SERVICE], [made(SERVICE, "s")], "5")
    store.listed(scopes[POD], [], "5")
    store.denied(scopes[CONFIG_MAP], "list")
    assert (watched.woken, store.complete) == ([], False)
    store.absent(scopes[MONITOR])
    assert (set(watched.woken), store.complete) == ({KEY}, True)


def test_events_are_kept_by_service():
    watched = Watched()
    store, scopes = watched.store, watched.scopes
    store.changed(scopes[SERVICE], made(SERVICE, "s", 2))
    store.changed(scopes[CONFIG_MAP], made(name="a", version=3))
    store.changed(scopes[CONFIG_MAP], made(name="b", version=4, instance="t"))
    store.changed(scopes[POD], made(POD, "p", 5, spec={"nodeName": "x", "volumes": [1]}))
    assert store.service(KEY) is not None and store.services() == [KEY]
    assert watched.names() == {"a"}
    assert [pod["spec"] for pod in store.pods(KEY)] == [{"nodeName": "x", "containers": []}]
    assert watched.woken == [KEY, KEY, ServiceKey("n", "t"), KEY]
    store.deleted(scopes[CONFIG_MAP], made(name="a", version=6))
    assert watched.names() == set() and watched.woken[-1] == KEY


def test_an_object_that_changes_its_service_wakes_both():
    watched = Watched()
    watched.store.changed(watched.scopes[CONFIG_MAP], made(version=2))
    watched.store.changed(watched.scopes[CONFIG_MAP], made(version=3, instance="t"))
    assert watched.names() == set()
    assert watched.woken == [KEY, KEY, ServiceKey("n", "t")]


def test_a_list_tells_what_was_deleted_in_a_gap():
    watched = Watched()
    scope = watched.scopes[CONFIG_MAP]
    for name in "abc":
        watched.store.changed(scope, made(name=name, version=2))
    watched.woken.clear()
    watched.store.listed(scope, [made(name="a", version=2), made(name="b", version=9)], "10")
    assert watched.names() == {"a", "b"}
    assert watched.woken == [KEY, KEY]  # for b and c; a is as it was


def test_an_own_write_is_seen_at_once_and_its_event_wakes_nobody():
    watched = Watched()
    watched.store.written(made(version=7))
    assert watched.names() == {"c"} and watched.woken == []
    watched.store.changed(watched.scopes[CONFIG_MAP], made(version=7))
    assert watched.woken == []
    watched.store.changed(watched.scopes[CONFIG_MAP], made(version=8))
    assert watched.woken == [KEY]


def test_an_answer_that_the_watch_has_overtaken_does_not_raise_the_dead():
    watched = Watched()
    scope = watched.scopes[CONFIG_MAP]
    watched.store.changed(scope, made(version=7))
    watched.store.deleted(scope, made(version=8))
    watched.store.written(made(version=7))
    assert watched.names() == set()


def test_a_late_deletion_leaves_the_object_that_was_made_since():
    watched = Watched()
    watched.store.written(made(version=20))
    watched.store.deleted(watched.scopes[CONFIG_MAP], made(version=15))
    assert watched.names() == {"c"}


def test_what_is_denied_or_absent_is_told_until_it_is_listed():
    watched = Watched()
    store, scopes = watched.store, watched.scopes
    store.changed(scopes[SERVICE], made(SERVICE, "s", 2))
    watched.woken.clear()
    assert store.denied(scopes[CONFIG_MAP], "watch") and not store.denied(
        scopes[CONFIG_MAP], "watch"
    )
    assert store.absent(scopes[MONITOR])
    assert watched.woken == [KEY, KEY]
    assert store.missing("n") == [Denied("watch", "configmaps", "")]
    assert str(store.missing("n")[0]) == "watch configmaps in all namespaces"
    assert not store.sees(CONFIG_MAP, "n") and store.serves(CONFIG_MAP, "n")
    assert not store.serves(MONITOR, "n")
    store.listed(scopes[CONFIG_MAP], [], "30")
    assert store.missing("n") == [] and store.sees(CONFIG_MAP, "n")
    assert watched.woken == [KEY, KEY, KEY]


def test_field_managers_and_last_applied_are_not_kept():
    noted = made()
    noted["metadata"] |= {
        "managedFields": [{"manager": "x"}],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "mine": "y"},
    }
    kept = slim(CONFIG_MAP, noted)["metadata"]
    assert "managedFields" not in kept and kept["annotations"] == {"mine": "y"}


@pytest.mark.parametrize("kind", OWNED, ids=lambda kind: kind.plural)
def test_paths_are_those_of_the_api(kind):
    path = kind.path("n", "x")
    assert path.startswith("/apis/" if "/" in kind.api_version else "/api/v1/")
    assert path.endswith(f"/namespaces/n/{kind.plural}/x")
    assert kind.path("") == path.replace("/namespaces/n", "").removesuffix("/x")


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "delete", "write", "relist", "lag"]), st.sampled_from("abc")),
    max_size=60,
)


@given(STEPS)
def test_however_events_lists_and_writes_meet_the_store_ends_as_the_server_is(steps):
    """A server with one history; the watch lags behind it, own writes do not."""
    watched = Watched()
    scope = watched.scopes[CONFIG_MAP]
    server: dict[str, dict[str, Any]] = {}
    history: list[tuple[str, dict[str, Any]]] = []
    revision = 1
    for step, name in steps:
        if step in ("put", "write"):
            revision += 1
            server[name] = made(name=name, version=revision)
            history.append(("changed", server[name]))
            if step == "write":
                watched.store.written(server[name])
        elif step == "delete" and name in server:
            revision += 1
            history.append(("deleted", made(name=server.pop(name)["metadata"]["name"],
                                            version=revision)))  # fmt: skip
        elif step == "relist":
            watched.store.listed(scope, list(server.values()), str(revision))
            history.clear()
        elif step == "lag" and history:
            what, obj = history.pop(0)
            getattr(watched.store, what)(scope, obj)
    for what, obj in history:
        getattr(watched.store, what)(scope, obj)
    held = {obj["metadata"]["name"]: obj["metadata"] for obj in watched.store.owned(KEY)}
    assert held == {name: obj["metadata"] for name, obj in server.items()}
    assert watched.store.revision(scope) == revision or not steps
