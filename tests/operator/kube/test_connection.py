"""How the operator logs in: service accounts whose tokens rotate, exec plugins, refusals."""

import asyncio
import contextlib
import datetime
import json
import sys
from types import SimpleNamespace

import aiohttp
import pytest
import yaml
from kubernetes.aio.config import incluster_config
from ullage_kubeapi.server import running

from ullage_operator.api.errors import ClusterUnavailable
from ullage_operator.api.naming import CONFIG_MAP
from ullage_operator.kube import connection as connection_module
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.connection import ApiConnection

PATH = CONFIG_MAP.path("default")


@contextlib.asynccontextmanager
async def clients():
    """The client, and the session with which kopf sends its requests."""
    connection = ApiConnection()
    cluster = Cluster(connection=connection)
    kopf = await connection.kopf_session()
    try:
        yield cluster, kopf
    finally:
        await kopf.aiohttp_session.close()
        await cluster.close()


async def ask_both(cluster, kopf):
    await cluster.get(CONFIG_MAP, "default", "c")
    async with kopf.aiohttp_session.get(kopf.server + PATH) as response:
        assert response.status == 200


@pytest.fixture
def service_account(tmp_path, monkeypatch, make_authority):
    """A server and the token file of a pod; `expire` lets a minute go by."""
    authority = make_authority()
    folder = authority.issue(tmp_path / "tls", "127.0.0.1")
    with running(tls=folder) as api:
        host, port = api.url.removeprefix("https://").split(":")
        token = tmp_path / "token"
        token.write_text("first")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(folder / "ca.crt"))
        yield api, token


def let_pass(monkeypatch, seconds):
    """Let the Kubernetes library see a clock that is some seconds ahead."""

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(seconds=seconds)

    shifted = SimpleNamespace(datetime=Later, timedelta=datetime.timedelta)
    monkeypatch.setattr(incluster_config, "datetime", shifted)


def test_every_request_logs_in(service_account):
    api, _ = service_account

    async def scenario():
        async with clients() as (cluster, kopf):
            await ask_both(cluster, kopf)

    asyncio.run(scenario())
    assert [header.lower() for header in api.authorizations] == ["bearer first"] * 2


def test_a_token_that_rotates_is_used_before_the_old_one_is_refused(service_account, monkeypatch):
    api, token = service_account

    async def scenario():
        async with clients() as (cluster, kopf):
            await ask_both(cluster, kopf)
            token.write_text("second")
            let_pass(monkeypatch, 61)
            api.tokens = {"second"}
            await ask_both(cluster, kopf)

    asyncio.run(scenario())
    assert [header.split()[1] for header in api.authorizations] == ["first"] * 2 + ["second"] * 2
    assert 401 not in [status for _, _, status in api.requests]


def test_a_token_that_is_refused_is_read_anew_and_the_request_sent_again(service_account):
    api, token = service_account

    async def scenario():
        async with clients() as (cluster, kopf):
            await ask_both(cluster, kopf)
            for revoked in ("second", "third"):
                token.write_text(revoked)
                api.tokens = {revoked}
                if revoked == "second":
                    await cluster.get(CONFIG_MAP, "default", "c")
                else:
                    async with kopf.aiohttp_session.get(kopf.server + PATH) as response:
                        assert response.status == 200

    asyncio.run(scenario())
    assert [status for _, _, status in api.requests].count(401) == 2


def test_a_new_authority_of_the_server_is_trusted_once_its_file_is_replaced(
    tmp_path, service_account, make_authority
):
    api, _ = service_account
    renewed = make_authority().issue(tmp_path / "renewed", "127.0.0.1")

    async def scenario():
        async with clients() as (cluster, kopf):
            await ask_both(cluster, kopf)
            api.replace_certificate(renewed)
            with pytest.raises(ClusterUnavailable, match="certificate"):
                while True:
                    await cluster.get(CONFIG_MAP, "default", "c")

            (tmp_path / "tls" / "ca.crt").write_bytes((renewed / "ca.crt").read_bytes())
            await cluster.get(CONFIG_MAP, "default", "c")
            async with clients() as (_, session):
                await ask_both(cluster, session)

    asyncio.run(scenario())


PLUGIN = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text() or 0) + 1
count.write_text(str(number))
status = {"token": f"exec-{number}"}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
                  "status": status}))
"""


def test_an_exec_plugin_gives_the_token(tmp_path, monkeypatch):
    plugin = tmp_path / "plugin.py"
    count = tmp_path / "count"
    plugin.write_text(PLUGIN)
    count.write_text("")
    with running() as api:
        path = api.kubeconfig(tmp_path)
        document = yaml.safe_load(path.read_text())
        command = {"command": sys.executable, "args": [str(plugin), str(count)]}
        version = {"apiVersion": "client.authentication.k8s.io/v1"}
        document["users"][0]["user"] = {"exec": version | command}
        path.write_text(json.dumps(document))
        monkeypatch.setenv("KUBECONFIG", str(path))

        async def scenario():
            async with clients() as (cluster, kopf):
                await ask_both(cluster, kopf)
                api.tokens = {"exec-2"}
                await ask_both(cluster, kopf)

        asyncio.run(scenario())
    asked = [header for header in api.authorizations if header]
    assert asked == ["Bearer exec-1"] * 3 + ["Bearer exec-2"] * 2


def test_the_name_in_the_certificate_may_be_another_than_the_address(
    tmp_path, monkeypatch, make_authority
):
    folder = make_authority().issue(tmp_path / "tls", "api.example")
    with running(tls=folder) as api:
        path = api.kubeconfig(tmp_path)
        document = yaml.safe_load(path.read_text())
        cluster = document["clusters"][0]["cluster"]
        cluster |= {
            "certificate-authority": str(folder / "ca.crt"),
            "server": api.url.replace("127.0.0.1", "localhost"),
        }
        path.write_text(json.dumps(document))
        monkeypatch.setenv("KUBECONFIG", str(path))

        async def scenario():
            async with clients() as (client, kopf):
                await ask_both(client, kopf)

        with pytest.raises(ClusterUnavailable, match="certificate"):
            asyncio.run(scenario())
        cluster |= {"tls-server-name": "api.example"}
        path.write_text(json.dumps(document))
        asyncio.run(scenario())
    assert [status for _, _, status in api.requests] == [404, 200]


def test_what_is_refused_again_is_answered_so_and_not_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "_REFUSED_S", 0.5)
    with running() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
        api.tokens = {"another"}

        async def scenario():
            connection = ApiConnection()
            kopf = await connection.kopf_session()
            async with kopf.aiohttp_session as session:
                assert isinstance(session, aiohttp.ClientSession)
                begun_s = asyncio.get_running_loop().time()
                async with session.get(kopf.server + PATH) as response:
                    status = response.status
                took_s = asyncio.get_running_loop().time() - begun_s
            await connection.close()
            return status, took_s

        status, took_s = asyncio.run(scenario())
        assert status == 401
        assert took_s >= 0.5
