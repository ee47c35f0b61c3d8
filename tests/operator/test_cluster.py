"""The cluster client against the test API server: apply, delete, list, status, errors."""

import asyncio

import pytest
from ullage_kubeapi.server import running

import ullage_operator.naming as naming
from ullage_operator.cluster import Cluster
from ullage_operator.errors import (
    ClusterConflict,
    ClusterDenied,
    ClusterForgets,
    ClusterRefused,
    ClusterUnavailable,
    KindAbsent,
    OperatorError,
)
from ullage_operator.kinds import OWNED, Kind, kind_of
from ullage_operator.transport import Transport, connection

CONFIG_MAP = kind_of("v1", "ConfigMap")._replace(selector="app=x")


@pytest.fixture
def api(tmp_path, monkeypatch):
    with running() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        yield server


def config_map(name="c", **data):
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": "x"}},
        "data": data,
    }


def run(scenario):
    async def whole():
        cluster = Cluster()
        try:
            return await scenario(cluster)
        finally:
            await cluster.close()

    return asyncio.run(whole())


def test_apply_creates_changes_and_leaves_alone(api):
    async def scenario(cluster):
        made = await cluster.apply(config_map(a="1"))
        same = await cluster.apply(config_map(a="1"))
        changed = await cluster.apply(config_map(b="2"))
        return made, same, changed

    made, same, changed = run(scenario)
    assert made["metadata"] == same["metadata"]
    assert changed["data"] == {"b": "2"}
    assert changed["metadata"]["managedFields"][0]["manager"] == naming.FIELD_MANAGER


async def listed(cluster, kind, namespace="default"):
    return [obj async for page, _ in cluster.pages(kind, namespace) for obj in page]


def test_lists_come_in_pages_and_unknown_kinds_are_told(api):
    async def scenario(cluster):
        await asyncio.gather(*(cluster.apply(config_map(f"c{n}")) for n in range(501)))
        found = await listed(cluster, CONFIG_MAP)
        with pytest.raises(KindAbsent, match="podmonitors"):
            await listed(cluster, kind_of("monitoring.coreos.com/v1", "PodMonitor"))
        return found

    assert len({obj["metadata"]["name"] for obj in run(scenario)}) == 501
    assert len([r for r in api.requests if "continue=" in r[1]]) == 1


def test_a_watch_tells_what_came_after_a_version_and_what_is_forgotten(api):
    async def scenario(cluster):
        first = await cluster.apply(config_map("a"))
        since = first["metadata"]["resourceVersion"]
        await cluster.apply(config_map("b"))
        seen = []
        async for event in cluster.watch(CONFIG_MAP, "default", since):
            seen.append((event.type, event.object["metadata"]["name"]))
            if event.type == "ADDED":
                break
        api.compact()
        with pytest.raises(ClusterForgets):
            async for _ in cluster.watch(CONFIG_MAP, "default", since):
                pass
        return seen

    assert run(scenario) == [("ADDED", "b")]


def test_an_event_longer_than_a_read_buffer_arrives_whole(api):
    async def scenario(cluster):
        first = await cluster.apply(config_map("a"))
        await cluster.apply(config_map("b", big="x" * 700_000))
        events = cluster.watch(CONFIG_MAP, "default", first["metadata"]["resourceVersion"])
        return (await anext(events)).object["data"]["big"]

    assert len(run(scenario)) == 700_000


def test_watching_an_unknown_kind_says_so(api):
    async def scenario(cluster):
        with pytest.raises(KindAbsent):
            async for _ in cluster.watch(Kind("a.b/v1", "C", "cs"), "default", "1"):
                pass

    run(scenario)


def test_two_that_create_or_replace_the_same_conflict(api):
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "l", "namespace": "default"},
        "spec": {"holderIdentity": "a"},
    }

    async def scenario(cluster):
        made = await cluster.create(lease)
        with pytest.raises(ClusterConflict):
            await cluster.create(lease)
        await cluster.replace(made | {"spec": {"holderIdentity": "b"}})
        with pytest.raises(ClusterConflict):
            await cluster.replace(made | {"spec": {"holderIdentity": "c"}})

    run(scenario)


def test_without_the_lead_nothing_is_written(api):
    async def scenario(cluster):
        cluster._may_write_s = lambda: 0.0
        for write in (cluster.apply, cluster.delete):
            with pytest.raises(ClusterUnavailable, match="another operator leads"):
                await write(config_map())

    run(scenario)
    assert api.writes() == []


def test_a_missing_right_names_the_verb_and_other_refusals_do_not(api):
    async def scenario(cluster):
        api.deny("patch", "configmaps")
        with pytest.raises(ClusterDenied) as denied:
            await cluster.apply(config_map())
        api.inject("DELETE", "/configmaps", 403)
        with pytest.raises(ClusterUnavailable) as other:
            await cluster.delete(config_map())
        return denied.value.verb, isinstance(other.value, ClusterDenied)

    assert run(scenario) == ("patch", False)


def test_the_server_says_when_to_come_back(api):
    async def scenario(cluster):
        api.inject("GET", "/configmaps", 429, retry_after=7)
        with pytest.raises(ClusterUnavailable) as busy:
            await listed(cluster, CONFIG_MAP)
        return busy.value.delay_s

    assert run(scenario) == 7


def test_every_kind_has_a_path_that_the_server_serves(api):
    async def scenario(cluster):
        for kind in OWNED:
            if not kind.optional:
                assert await listed(cluster, kind) == []

    run(scenario)


def test_delete_is_of_this_object_and_may_come_twice(api):
    async def scenario(cluster):
        first = await cluster.apply(config_map())
        await cluster.delete(first)
        await cluster.delete(first)
        second = await cluster.apply(config_map())
        with pytest.raises(ClusterUnavailable):
            await cluster.delete(first)
        return second, await cluster.get(CONFIG_MAP, "default", "c")

    second, found = run(scenario)
    assert found["metadata"]["uid"] == second["metadata"]["uid"]


def test_refusals_are_permanent_and_name_the_field(api):
    async def scenario(cluster):
        with pytest.raises(ClusterRefused, match=r"metadata\.name"):
            await cluster.apply(config_map("Not_A_Name"))

    run(scenario)


@pytest.mark.parametrize("status", [0, 403, 409, 429, 500, 503])
def test_what_another_try_may_mend_is_temporary(api, status):
    async def scenario(cluster):
        await cluster.apply(config_map())
        api.inject("PATCH", "/configmaps/c", status)
        with pytest.raises(ClusterUnavailable) as caught:
            await cluster.apply(config_map())
        await cluster.apply(config_map())
        return caught.value

    assert run(scenario).delay_s > 0


def test_a_refused_token_is_read_anew(api):
    async def scenario(cluster):
        api.inject("PATCH", "/configmaps/c", 401, times=1)
        return await cluster.apply(config_map(a="1"))

    assert run(scenario)["data"] == {"a": "1"}


def test_many_refused_together_read_the_token_once(api):
    read = []

    async def scenario():
        transport = Transport(lambda: read.append(1) or connection())
        used = transport._session
        await asyncio.gather(*(transport._renew(used) for _ in range(8)))
        cluster = Cluster(transport=transport)
        try:
            return await cluster.apply(config_map(a="1"))
        finally:
            await cluster.close()

    assert asyncio.run(scenario())["data"] == {"a": "1"}
    assert len(read) == 2  # at the start, and once for all eight


def test_a_watch_on_which_nothing_happens_has_not_failed(api):
    async def scenario():
        cluster = Cluster(transport=Transport(silent_s=0.2))
        try:
            made = await cluster.apply(config_map())
            since = made["metadata"]["resourceVersion"]
            return [event async for event in cluster.watch(CONFIG_MAP, "default", since)]
        finally:
            await cluster.close()

    assert asyncio.run(scenario()) == []


def test_one_refused_token_fails_no_other_request(api):
    async def scenario(cluster):
        await cluster.apply(config_map())
        api.inject("PATCH", "/configmaps/", 401, times=1)
        names = [f"c{number}" for number in range(8)]
        made = await asyncio.gather(*(cluster.apply(config_map(name)) for name in names))
        return [obj["metadata"]["name"] for obj in made] == names

    assert run(scenario)


def test_a_request_under_which_the_session_was_renewed_is_sent_again(api):
    async def scenario(cluster):
        await cluster.apply(config_map())
        transport = cluster._transport
        used = transport._session
        asked = asyncio.create_task(cluster.get(CONFIG_MAP, "default", "c"))
        await asyncio.sleep(0)  # the request has begun
        await transport._renew(used)
        await transport._renew(used)
        return await asked, used.closed, transport._session.closed

    found, old, new = run(scenario)
    assert (found["metadata"]["name"], old, new) == ("c", True, False)


def test_after_close_it_is_unavailable(api):
    async def scenario(cluster):
        await cluster.close()
        with pytest.raises(ClusterUnavailable, match="closed"):
            await cluster.get(CONFIG_MAP, "default", "c")

    run(scenario)


def test_a_server_that_is_not_there_is_temporary(tmp_path, monkeypatch):
    with running() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))

    async def scenario(cluster):
        with pytest.raises(ClusterUnavailable):
            await cluster.get(CONFIG_MAP, "default", "c")

    run(scenario)


def test_without_any_configuration_it_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(OperatorError, match="KUBECONFIG"):
        Cluster()
