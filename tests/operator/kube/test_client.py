"""The cluster client against the test API server: apply, delete, list, status, errors."""

import asyncio

import pytest
from ullage_kubeapi.server import running

from ullage_operator.api import naming
from ullage_operator.api.errors import (
    ClusterConflict,
    ClusterDenied,
    ClusterPostponed,
    ClusterRefused,
    ClusterUnavailable,
    KindAbsent,
    OperatorError,
)
from ullage_operator.api.naming import OWNED, SERVICE, Kind, kind_of
from ullage_operator.kube.client import Cluster, _Request
from ullage_operator.kube.connection import ApiConnection, load_configuration

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


def test_names_come_in_pages_and_unknown_kinds_are_absent(api):
    async def scenario(cluster):
        await asyncio.gather(*(cluster.apply(config_map(f"c{n}")) for n in range(501)))
        found = await cluster.versions(CONFIG_MAP, "default")
        with pytest.raises(KindAbsent, match="podmonitors"):
            await cluster.versions(kind_of("monitoring.coreos.com/v1", "PodMonitor"), "default")
        return found

    versions, revision = run(scenario)
    assert {name for _, name in versions} == {f"c{n}" for n in range(501)}
    assert max(versions.values()) <= revision
    assert len([r for r in api.requests if "continue=" in r[1]]) == 1


def test_what_keeps_a_kind_from_being_watched_is_told(api):
    async def scenario(cluster):
        await cluster.check(CONFIG_MAP, "default")
        with pytest.raises(KindAbsent):
            await cluster.check(Kind("a.b/v1", "C", "cs"), "default")
        for verb in ("list", "watch"):
            api.deny(verb, "configmaps")
            with pytest.raises(ClusterDenied) as denied:
                await cluster.check(CONFIG_MAP, "default")
            assert denied.value.verb == verb
            api.grant(verb, "configmaps")
        api.inject("GET", "/configmaps", 500)
        with pytest.raises(ClusterUnavailable):
            await cluster.check(CONFIG_MAP, "default")

    run(scenario)


def test_an_object_that_is_missing_when_it_is_written_is_told(api):
    missing = []

    async def scenario():
        cluster = Cluster(on_missing=lambda *where: missing.append(where))
        gone = config_map() | {"apiVersion": naming.API_VERSION, "kind": naming.KIND}
        gone["metadata"]["uid"] = "u"
        try:
            assert await cluster.apply_status(gone, {}) is None
        finally:
            await cluster.close()

    asyncio.run(scenario())
    assert missing == [(SERVICE, "default")]


def test_what_was_created_is_taken_away_by_an_apply_that_leaves_it_out(api):
    async def scenario(cluster):
        made = await cluster.create(config_map(a="1", b="2"))
        claimed = await cluster.claim_fields(made)
        applied = await cluster.apply(config_map(a="1"))
        with pytest.raises(ClusterUnavailable, match="is gone"):
            await cluster.claim_fields(config_map("other"))
        return made, claimed, applied, await cluster.claim_fields(applied)

    made, claimed, applied, again = run(scenario)
    assert [entry["operation"] for entry in made["metadata"]["managedFields"]] == ["Update"]
    assert [entry["operation"] for entry in claimed["metadata"]["managedFields"]] == ["Apply"]
    assert claimed["data"] == made["data"]
    assert applied["data"] == {"a": "1"}
    assert again["metadata"] == applied["metadata"], "claimed once"


def test_two_that_create_or_replace_the_same_conflict(api):
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "l", "namespace": "default"},
        "spec": {"holderIdentity": "a"},
    }

    async def scenario(cluster):
        made = await cluster.create_lease(lease)
        with pytest.raises(ClusterConflict):
            await cluster.create_lease(lease)
        await cluster.replace(made | {"spec": {"holderIdentity": "b"}})
        with pytest.raises(ClusterConflict):
            await cluster.replace(made | {"spec": {"holderIdentity": "c"}})

    run(scenario)


def test_without_the_lead_nothing_is_written(api):
    async def scenario(cluster):
        cluster._may_write_s = lambda: 0.0
        for write in (cluster.create, cluster.apply, cluster.delete):
            with pytest.raises(ClusterUnavailable, match="another operator leads"):
                await write(config_map())

    run(scenario)
    assert api.writes() == []


def test_a_write_that_hangs_concerns_its_object_alone(api):
    """As under an admission webhook that the API server cannot reach."""
    api.inject("POST", "/configmaps", 200, delay_s=2.0)
    api.inject("GET", "/configmaps", 200, delay_s=2.0)

    async def scenario(cluster):
        cluster._may_write_s = lambda: 0.5
        with pytest.raises(ClusterPostponed, match="an admission webhook may hang"):
            await cluster.create(config_map())
        with pytest.raises(ClusterUnavailable) as slow:
            await cluster._read(_Request("get", CONFIG_MAP, "default", "c"), 0.5)
        assert not isinstance(slow.value, ClusterPostponed)

    run(scenario)


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
            await cluster.versions(CONFIG_MAP, "default")
        return busy.value.delay_s

    assert run(scenario) == 7


def test_every_kind_has_a_path_that_the_server_serves(api):
    async def scenario(cluster):
        for kind in OWNED:
            if not kind.optional:
                assert (await cluster.versions(kind, "default"))[0] == {}

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

    async def load():
        read.append(1)
        return await load_configuration()

    async def scenario():
        connection = ApiConnection(load)
        used = (await connection.api()).configuration
        await asyncio.gather(*(connection.renew(used) for _ in range(8)))
        cluster = Cluster(connection=connection)
        try:
            return await cluster.apply(config_map(a="1"))
        finally:
            await cluster.close()

    assert asyncio.run(scenario())["data"] == {"a": "1"}
    assert len(read) == 2  # at the start, and once for all eight


def test_one_refused_token_fails_no_other_request(api):
    async def scenario(cluster):
        await cluster.apply(config_map())
        api.inject("PATCH", "/configmaps/", 401, times=1)
        names = [f"c{number}" for number in range(8)]
        made = await asyncio.gather(*(cluster.apply(config_map(name)) for name in names))
        return [obj["metadata"]["name"] for obj in made] == names

    assert run(scenario)


def test_a_request_under_which_the_credentials_were_renewed_goes_on(api):
    async def scenario(cluster):
        await cluster.apply(config_map())
        client = await cluster._connection.api()
        used = client.configuration
        asked = asyncio.create_task(cluster.get(CONFIG_MAP, "default", "c"))
        await asyncio.sleep(0)  # the request has begun
        await cluster._connection.renew(used)
        found = await asked
        return found, client.configuration is used, await cluster._connection.api() is client

    found, is_old, is_same_session = run(scenario)
    assert (found["metadata"]["name"], is_old, is_same_session) == ("c", False, True)


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
        asyncio.run(load_configuration())


def test_a_kubeconfig_that_cannot_be_read_says_which(monkeypatch, tmp_path):
    path = tmp_path / "kubeconfig.yaml"
    monkeypatch.setenv("KUBECONFIG", str(path))
    for text in ("", "a: b", "contexts: 3", "{"):
        path.write_text(text)
        with pytest.raises(OperatorError, match=r"kubeconfig\.yaml"):
            asyncio.run(load_configuration())
