"""Watches against an API server that fails: the cache follows, and nobody is hammered."""

import asyncio
import contextlib
import os
import signal

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry
from ullage_kubeapi.server import running
from ullage_kubeapi.trial import CRDS, read_crd

from ullage_operator.api.errors import ClusterUnavailable
from ullage_operator.api.naming import SERVICE, kind_of
from ullage_operator.kube.cache import Cache, Scope, ServiceKey
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.connection import ApiConnection
from ullage_operator.kube.informer import Backoff, Informers, WatchMetrics, WatchTimes

CONFIG_MAPS = Scope(kind_of("v1", "ConfigMap"), "default")
SERVICES = Scope(kind_of("v1", "Service"), "default")
LLM_SERVICES = Scope(SERVICE, "default")
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


class SweptCache(Cache):
    """A cache that records the revision of each sweep."""

    revisions: list[int]

    def swept(self, scope, versions, revision):
        is_restored = super().swept(scope, versions, revision)
        self.revisions.append(revision)
        return is_restored


class Watching:
    """A cache that is being kept."""

    def __init__(self, scopes, times):
        self.woken = []
        connection = ApiConnection()
        self.stop = asyncio.Event()
        self.cluster = Cluster(connection=connection)
        self.cache = SweptCache(scopes, self.woken.append)
        self.cache.revisions = []
        self.registry = CollectorRegistry()
        metrics = WatchMetrics(self.registry)
        self.informers = Informers(
            connection, self.cluster, scopes, self.cache, metrics, self.stop, times
        )

    def names(self):
        return {obj["metadata"]["name"] for obj in self.cache.owned(KEY)}

    def restarts(self, reason, kind="ConfigMap"):
        labels = {"kind": kind, "reason": reason}
        name = "ullage_operator_watch_restarts_total"
        return self.registry.get_sample_value(name, labels) or 0

    async def until(self, ask):
        async with asyncio.timeout(PATIENCE_S):
            while not ask():  # noqa: ASYNC110 - what is waited for has no event of its own
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watching(*scopes, **times):
    watching = Watching(scopes or (CONFIG_MAPS,), WatchTimes(recheck_s=0.2, **times))
    watching.informers.start()
    try:
        yield watching
    finally:
        await watching.informers.close()
        await watching.cluster.close()


def run(scenario):
    asyncio.run(scenario())


def test_what_is_there_and_what_happens_is_told(api):
    async def scenario():
        async with watching() as seen:
            await seen.until(lambda: seen.cache.complete)
            await seen.cluster.apply(config_map("a"))
            await seen.until(lambda: seen.names() == {"a"})
            await seen.cluster.apply(config_map("b"))
            await seen.until(lambda: seen.names() == {"a", "b"})
            await seen.cluster.delete(config_map("a"))
            await seen.until(lambda: seen.names() == {"b"})
            assert set(seen.woken) == {KEY}

    run(scenario)


@pytest.fixture
def replace_authority(tmp_path, monkeypatch, make_authority):
    """Run an API server over TLS, and return a function that replaces its authority."""
    tls = make_authority().issue(tmp_path / "tls", "127.0.0.1")
    renewed = make_authority().issue(tmp_path / "renewed", "127.0.0.1")
    with running(bookmark_interval=0.2, tls=tls) as api:
        path = api.kubeconfig(tmp_path)
        document = yaml.safe_load(path.read_text())
        document["clusters"][0]["cluster"]["certificate-authority"] = str(tls / "ca.crt")
        path.write_text(yaml.safe_dump(document))
        monkeypatch.setenv("KUBECONFIG", str(path))

        def replace():
            (tls / "ca.crt").write_bytes((renewed / "ca.crt").read_bytes())
            api.replace_certificate(renewed)

        yield replace


async def apply_until_seen(seen, name):
    """Apply a config map again while the API server is unavailable.

    Any other exception of a request ends the test.
    """
    while name not in seen.names():
        with contextlib.suppress(ClusterUnavailable):
            await seen.cluster.apply(config_map(name))
        await asyncio.sleep(0.001)


def test_watches_go_on_after_the_servers_authority_is_replaced(replace_authority):
    async def scenario():
        async with watching() as seen:
            await seen.cluster.apply(config_map("a"))
            await seen.until(lambda: seen.names() == {"a"})
            replace_authority()
            async with asyncio.timeout(PATIENCE_S):
                await apply_until_seen(seen, "b")
            assert seen.names() == {"a", "b"}

    run(scenario)


def test_requests_that_meet_a_renewal_of_the_authority_are_sent_again(replace_authority):
    names = {f"a{number}" for number in range(40)}

    async def scenario():
        async with watching() as seen:
            await seen.cluster.apply(config_map("first"))
            await seen.until(lambda: seen.names() == {"first"})
            replace_authority()
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(apply_until_seen(seen, name))
                    await asyncio.sleep(0.001)
            assert seen.names() == {"first", *names}

    run(scenario)


def test_edits_after_a_restore_of_etcd_are_seen(api):
    async def scenario():
        async with watching() as seen:
            await seen.until(lambda: seen.cache.complete)
            before = api.objects.revision
            for number in range(20):
                await seen.cluster.apply(config_map("a", number=str(number)))
                await seen.cluster.apply(config_map("lost", number=str(number)))
            await seen.until(lambda: seen.names() == {"a", "lost"})
            seen.informers.sweep(*CONFIG_MAPS)
            await seen.until(lambda: seen.cache.revisions[-1] > before)

            await seen.cluster.delete(config_map("lost"))
            api.restore(before)
            await seen.until(lambda: api.objects.revision == before)
            await seen.cluster.apply(config_map("a", number="after"))
            await seen.until(
                lambda: [obj["data"] for obj in seen.cache.owned(KEY)] == [{"number": "after"}]
            )

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
            await seen.until(lambda: seen.cache.complete)
            assert seen.restarts("unavailable") == 2

    run(scenario)


def test_a_server_that_fails_for_long_is_asked_ever_less(api):
    async def scenario():
        api.inject("GET", "/configmaps", 500, times=10**6)
        async with watching() as seen:
            await seen.until(lambda: seen.restarts("unavailable") >= 4)
            assert not seen.cache.sees(*CONFIG_MAPS)
            [reason] = seen.cache.unlisted("default")
            assert reason.startswith("configmaps: GET ")
            assert "500" in reason

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
            await seen.until(lambda: seen.cache.complete)
            assert not seen.cache.serves(MONITORS.kind, "default")
            assert [str(each) for each in seen.cache.missing("default")] == [
                "list configmaps in namespace default"
            ]
            api.grant("list", "configmaps")
            await seen.until(lambda: seen.cache.sees(*CONFIG_MAPS))
            api.deny("watch", "configmaps")
            await seen.until(lambda: api.drop_watches() or seen.cache.missing("default"))
            assert seen.restarts("absent", "PodMonitor") >= 1

    run(scenario)


def test_bookmarks_carry_the_version_on_though_nothing_happens(api):
    async def scenario():
        async with watching() as seen:
            await seen.until(lambda: seen.cache.complete)
            unwatched = config_map("x")
            unwatched["metadata"]["labels"] = {}
            await seen.cluster.apply(unwatched)
            for _ in range(10):  # several bookmarks
                await asyncio.sleep(0.1)
            api.compact()
            await seen.until(lambda: api.drop_watches() or seen.restarts("ended"))
            await seen.cluster.apply(config_map("a"))
            await seen.until(lambda: seen.names() == {"a"})
            assert seen.restarts("forgotten") == 0

    run(scenario)


def test_a_kind_that_cannot_be_listed_keeps_nobody_waiting_until_it_can(api):
    async def scenario():
        failing = api.inject("GET", "/services", 500, times=10**6)
        async with watching(CONFIG_MAPS, SERVICES) as seen:
            await seen.cluster.apply(config_map("a"))
            await seen.until(lambda: seen.cache.complete)
            assert seen.cache.sees(*CONFIG_MAPS)
            assert not seen.cache.sees(*SERVICES)
            assert seen.cache.missing("default") == []
            assert seen.names() == {"a"}
            failing.times = 0
            await seen.until(lambda: seen.cache.sees(*SERVICES))
            assert seen.cache.unlisted("default") == []

    run(scenario)


def test_without_services_nothing_is_complete(api):
    async def scenario():
        api.inject("GET", "/llmservices", 500, times=10**6)
        definition = read_crd()
        async with httpx.AsyncClient(base_url=api.url, verify=False) as client:
            assert (await client.post(CRDS, json=definition)).status_code == 201
        async with watching(LLM_SERVICES) as seen:
            await seen.until(lambda: seen.restarts("unavailable", "LLMService") >= 4)
            assert seen.cache.unlisted("default")
            assert not seen.cache.complete

    run(scenario)


def test_a_watch_that_dies_without_a_word_is_begun_again(api):
    """kopf's task is cancelled and nothing ends, as with a timeout at the wrong moment."""

    async def scenario():
        async with watching(stale_s=3.0) as seen:
            await seen.until(lambda: seen.cache.complete)
            [watcher] = [t for t in asyncio.all_tasks() if t.get_name().startswith("watcher for")]
            watcher.cancel()
            await seen.until(watcher.done)
            await seen.cluster.apply(config_map("a"))
            assert seen.informers.silent_s < 3.0
            await seen.until(lambda: seen.names() == {"a"})
            assert seen.restarts("unavailable") == 1

    run(scenario)


def test_a_watch_that_no_longer_tells_what_exists_is_begun_again(api, monkeypatch):
    async def scenario():
        async with watching(behind_s=3.0) as seen:
            await seen.until(lambda: seen.cache.complete)
            with monkeypatch.context() as deaf:
                deaf.setattr(Cache, "changed", lambda *_: None)
                await seen.cluster.apply(config_map("a"))
                seen.informers.sweep(*CONFIG_MAPS)
                await seen.until(lambda: seen.cache.is_behind(CONFIG_MAPS))
            await seen.until(lambda: seen.names() == {"a"})
            assert seen.restarts("unavailable") == 1

    run(scenario)


def test_what_is_missing_when_it_is_written_is_forgotten_at_once(api):
    async def scenario():
        async with watching() as seen:
            await seen.cluster.apply(config_map("a"))
            await seen.until(lambda: seen.names() == {"a"} and seen.cache.complete)
            ghost = config_map("ghost")
            ghost["metadata"]["resourceVersion"] = "1"
            seen.cache._set(CONFIG_MAPS, ghost)
            seen.informers.sweep(*CONFIG_MAPS)
            await seen.until(lambda: seen.names() == {"a"})

    run(scenario)


def test_signals_end_the_operator_and_no_watch(api):
    async def scenario():
        async with watching(CONFIG_MAPS, SERVICES) as seen:
            await seen.until(lambda: seen.cache.complete)
            os.kill(os.getpid(), signal.SIGTERM)
            await seen.until(seen.stop.is_set)
            await seen.cluster.apply(config_map("a"))
            await seen.until(lambda: seen.names() == {"a"})

    run(scenario)


def test_several_namespaces_are_watched_one_by_one(api):
    async def scenario():
        other = Scope(CONFIG_MAPS.kind, "kube-system")
        async with watching(CONFIG_MAPS, other) as seen:
            await seen.until(lambda: seen.cache.complete)
            await seen.cluster.apply(config_map("a"))
            elsewhere = config_map("b")
            elsewhere["metadata"]["namespace"] = "kube-system"
            await seen.cluster.apply(elsewhere)
            await seen.until(lambda: len(set(seen.woken)) == 2)
            assert seen.names() == {"a"}

    run(scenario)
    asked = {path.split("?")[0] for _, path, _ in api.requests if "limit=" in path}
    assert asked == {f"/api/v1/namespaces/{n}/configmaps" for n in ("default", "kube-system")}
