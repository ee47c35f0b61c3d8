"""The cluster client against the test API server: apply, delete, list, status, errors."""

import asyncio

import pytest
from ullage_kubeapi.server import running

import ullage_operator.cluster as cluster_module
import ullage_operator.naming as naming
from ullage_operator.cluster import Cluster, connection
from ullage_operator.errors import ClusterRefused, ClusterUnavailable, OperatorError


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


def test_listed_objects_carry_their_kind_and_unknown_kinds_are_none(api):
    async def scenario(cluster):
        await cluster.apply(config_map())
        found = await cluster.listed("v1", "ConfigMap", "default", "app=x")
        none = await cluster.listed("monitoring.coreos.com/v1", "PodMonitor", "default", "app=x")
        return found, none, await cluster.serves("monitoring.coreos.com/v1", "PodMonitor")

    found, none, serves = run(scenario)
    assert [(o["kind"], o["metadata"]["name"]) for o in found] == [("ConfigMap", "c")]
    assert none == [] and serves is False


def test_delete_is_of_this_object_and_may_come_twice(api):
    async def scenario(cluster):
        first = await cluster.apply(config_map())
        await cluster.delete(first)
        await cluster.delete(first)
        second = await cluster.apply(config_map())
        with pytest.raises(ClusterUnavailable):
            await cluster.delete(first)
        return second, await cluster.get("v1", "ConfigMap", "default", "c")

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


def test_many_refused_together_read_the_token_once(api, monkeypatch):
    read = []

    async def scenario(cluster):
        monkeypatch.setattr(cluster_module, "connection", lambda: read.append(1) or connection())
        used = cluster._session
        await asyncio.gather(*(cluster._renew(used) for _ in range(8)))
        return await cluster.apply(config_map(a="1"))

    assert run(scenario)["data"] == {"a": "1"}
    assert len(read) == 1


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
        used = cluster._session
        asked = asyncio.create_task(cluster.get("v1", "ConfigMap", "default", "c"))
        await asyncio.sleep(0)  # the request has begun
        await cluster._renew(used)
        await cluster._renew(used)
        return await asked, used.closed, cluster._session.closed

    found, old, new = run(scenario)
    assert (found["metadata"]["name"], old, new) == ("c", True, False)


def test_after_close_it_is_unavailable(api):
    async def scenario(cluster):
        await cluster.close()
        with pytest.raises(ClusterUnavailable, match="closed"):
            await cluster.get("v1", "ConfigMap", "default", "c")

    run(scenario)


def test_a_server_that_is_not_there_is_temporary(tmp_path, monkeypatch):
    with running() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))

    async def scenario(cluster):
        with pytest.raises(ClusterUnavailable):
            await cluster.get("v1", "ConfigMap", "default", "c")

    run(scenario)


def test_without_any_configuration_it_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(OperatorError, match="KUBECONFIG"):
        Cluster()
