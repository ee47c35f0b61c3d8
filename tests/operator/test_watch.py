"""Watches against an API server that fails: the store follows, and nobody is hammered."""

import asyncio
import contextlib

import pytest
from prometheus_client import CollectorRegistry
from ullage_kubeapi.server import running

from ullage_operator.cluster import Cluster
from ullage_operator.kinds import kind_of
from ullage_operator.metrics import WatchMetrics
from ullage_operator.store import Scope, ServiceKey, Store
from ullage_operator.watch import Backoff, Watches

CONFIG_MAPS = Scope(kind_of("v1", "ConfigMap"), "default")
MONITORS = Scope(kind_of("monitoring.coreos.com/v1", "PodMonitor"), "default")
KEY = ServiceKey("default", "s")
PATIENCE_S = 30


@pytest.fixture
def api(tmp_path, monkeypatch):
    with running(bookmark_interval=0.2) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        yield server


def config_map(name, **data):
    labels = {
        "app.kubernetes.io/instance": "s",
        "app.kubernetes.io/managed-by": "ullage-operator",
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "data": data,
    }


class Watching:
    """A store that is being kept."""

    def __init__(self, scopes):
        self.woken = []
        self.cluster = Cluster()
        self.store = Store(scopes, self.woken.append)
        self.registry = CollectorRegistry()
        metrics = WatchMetrics(self.registry)
        self.watches = Watches(self.cluster, scopes, self.store, metrics, recheck_s=0.2)

    def names(self):
        return {obj["metadata"]["name"] for obj in self.store.owned(KEY)}

    def restarts(self, reason, kind="ConfigMap"):
        labels = {"kind": kind, "reason": reason}
        name = "ullage_operator_watch_restarts_total"
        return self.registry.get_sample_value(name, labels) or 0

    async def until(self, ask):
        async with asyncio.timeout(PATIENCE_S):
            while not ask():  # noqa: ASYNC110 - what is waited for has no event of its own
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watching(*scopes):
    made = Watching(scopes or (CONFIG_MAPS,))
    made.watches.start()
    try:
        yield made
    finally:
        await made.watches.close()
        await made.cluster.close()


def run(scenario):
    asyncio.run(scenario())


def test_what_is_there_and_what_happens_is_told(api):
    async def scenario():
        async with watching() as seen:
            await seen.until(lambda: seen.store.complete)
            await seen.cluster.apply(config_map("a"))
            await seen.until(lambda: seen.names() == {"a"})
            await seen.cluster.apply(config_map("b"))
            await seen.until(lambda: seen.names() == {"a", "b"})
            await seen.cluster.delete(config_map("a"))
            await seen.until(lambda: seen.names() == {"b"})
            assert set(seen.woken) == {KEY}

    run(scenario)


def test_objects_of_others_are_not(api):
    async def scenario():
        async with watching() as seen:
            foreign = config_map("a")
            foreign["metadata"]["labels"].pop("app.kubernetes.io/managed-by")
            await seen.cluster.apply(foreign)
            await seen.cluster.apply(config_map("b"))
            await seen.until(lambda: seen.names() == {"b"})

    run(scenario)


@pytest.mark.parametrize("status", [0, 410, 429, 500])
def test_what_was_deleted_while_no_watch_was_open_is_gone(api, status):
    async def scenario():
        async with watching() as seen:
            for name in "ab":
                await seen.cluster.apply(config_map(name))
            await seen.until(lambda: seen.names() == {"a", "b"})
            api.inject("GET", "watch=", status, times=2)
            api.drop_watches()
            await seen.cluster.delete(config_map("a"))
            api.compact()
            await seen.until(lambda: seen.names() == {"b"})

    run(scenario)


def test_an_error_in_the_stream_is_survived(api):
    async def scenario():
        async with watching() as seen:
            await seen.cluster.apply(config_map("a"))
            await seen.until(lambda: seen.names() == {"a"})
            await seen.until(lambda: api.fail_watches(500) or seen.restarts("unavailable"))
            await seen.cluster.apply(config_map("b"))
            await seen.until(lambda: seen.names() == {"a", "b"})

    run(scenario)


def test_a_list_that_is_refused_is_tried_again(api):
    async def scenario():
        api.inject("GET", r"/configmaps\?(?!.*watch=)", 500, times=2)
        async with watching() as seen:
            await seen.until(lambda: seen.store.complete)
            assert seen.restarts("unavailable") == 2

    run(scenario)


def test_a_server_that_fails_for_long_is_asked_ever_less(api):
    async def scenario():
        api.inject("GET", "/configmaps", 500, times=10**6)
        async with watching() as seen:
            await seen.until(lambda: seen.restarts("unavailable") >= 4)
            assert not seen.store.complete

    run(scenario)
    delays = []
    backoff = Backoff()
    for _ in range(12):
        delays.append(backoff.next_s())
    assert all(0.1 <= delay <= 30 for delay in delays)
    assert all(delay >= 15 for delay in delays[9:])
    assert len(set(delays)) == len(delays)  # jitter
    assert backoff.next_s(at_least_s=70) == 70
    backoff.reset()
    assert backoff.next_s() <= 0.2


def test_a_kind_without_definition_and_one_without_right_are_looked_for_again(api):
    async def scenario():
        api.deny("list", "configmaps")
        async with watching(CONFIG_MAPS, MONITORS) as seen:
            await seen.until(lambda: seen.store.complete)
            assert not seen.store.serves(MONITORS.kind, "default")
            assert [str(each) for each in seen.store.missing("default")] == [
                "list configmaps in namespace default"
            ]
            api.grant("list", "configmaps")
            await seen.until(lambda: seen.store.sees(*CONFIG_MAPS))
            api.deny("watch", "configmaps")
            await seen.until(lambda: api.drop_watches() or seen.store.missing("default"))
            assert seen.restarts("absent", "PodMonitor") >= 1

    run(scenario)


def test_bookmarks_carry_the_version_on_though_nothing_happens(api):
    async def scenario():
        async with watching() as seen:
            await seen.until(lambda: seen.store.complete)
            before = seen.store.revision(CONFIG_MAPS)
            unwatched = config_map("x")
            unwatched["metadata"]["labels"] = {}
            await seen.cluster.apply(unwatched)
            await seen.until(lambda: seen.store.revision(CONFIG_MAPS) > before)
            api.compact()
            await seen.until(lambda: api.drop_watches() or seen.restarts("ended"))
            await seen.cluster.apply(config_map("a"))
            await seen.until(lambda: seen.names() == {"a"})
            assert seen.restarts("forgotten") == 0

    run(scenario)


def test_several_namespaces_are_watched_one_by_one(api):
    async def scenario():
        other = Scope(CONFIG_MAPS.kind, "kube-system")
        async with watching(CONFIG_MAPS, other) as seen:
            await seen.until(lambda: seen.store.complete)
            await seen.cluster.apply(config_map("a"))
            elsewhere = config_map("b")
            elsewhere["metadata"]["namespace"] = "kube-system"
            await seen.cluster.apply(elsewhere)
            await seen.until(lambda: len(set(seen.woken)) == 2)
            assert seen.names() == {"a"}

    run(scenario)
    asked = {path.split("?")[0] for _, path, _ in api.requests if "limit=" in path}
    assert asked == {f"/api/v1/namespaces/{n}/configmaps" for n in ("default", "kube-system")}
