"""The operator's health and readiness, as kubelets ask for them."""

import asyncio
import gc

import httpx
import pytest
from prometheus_client import CollectorRegistry
from ullage_kubeapi.server import running
from ullage_testing.ports import free_port

from ullage_common.process.addresses import listen
from ullage_common.process.metrics_endpoint import serve_metrics
from ullage_operator.api.naming import SERVICE
from ullage_operator.kube.cache import Cache, Scope
from ullage_operator.kube.operator import Operator, PortTaken


class Watching:
    """What runs, with a watch that may be silent."""

    def __init__(self):
        self.scope = Scope(SERVICE, "")
        self.cache = Cache([self.scope], lambda _: None)
        self.leads = False
        self.silent_s = 0.0

    def start(self):
        pass

    async def close(self):
        self.scope = None


@pytest.fixture
def api(tmp_path, monkeypatch):
    with running() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        yield server


@pytest.mark.parametrize(
    ("host", "asked"), [(None, "127.0.0.1"), (None, "[::1]"), ("::1", "[::1]")]
)
def test_health_fails_once_a_watch_has_died_and_readiness_waits_for_the_cache(api, host, asked):
    watching = Watching()
    probes = free_port()
    metrics = free_port()

    async def status(client, port, path):
        for _ in range(200):
            try:
                return (await client.get(f"http://{asked}:{port}{path}")).status_code
            except httpx.TransportError:
                await asyncio.sleep(0.1)
        return None

    async def scenario():
        operator = Operator(lambda *_: watching)
        stop = serve_metrics(CollectorRegistry(), metrics, host, lambda: operator.is_ready)
        running_operator = asyncio.create_task(operator.run(host, probes))
        try:
            async with httpx.AsyncClient(timeout=30) as client:
                assert await status(client, metrics, "/readyz") == 503
                assert await status(client, metrics, "/metrics") == 200
                watching.silent_s = 1000.0
                assert await status(client, probes, "/healthz") == 500
                watching.silent_s = 1.0
                assert await status(client, probes, "/healthz") == 200
                watching.cache.swept(watching.scope, {}, 1)
                assert await status(client, metrics, "/readyz") == 200
        finally:
            operator._stop.set()
            await running_operator
            stop()

    asyncio.run(scenario())
    assert watching.scope is None  # closed


def test_an_operator_that_is_stopped_while_it_starts_ends_without_an_error(api):
    watching = Watching()

    def stopped_at_once(connection, stop):
        stop.set()
        return watching

    for _ in range(3):
        asyncio.run(Operator(stopped_at_once).run(None, free_port()))
        assert watching.scope is None  # closed
    gc.collect()  # kopf leaves failed tasks of its scan, which asyncio reports once they are freed


def test_a_port_of_probes_that_is_taken_is_an_error(api):
    with listen(None, 0) as taken, pytest.raises(PortTaken, match="in use"):
        asyncio.run(Operator(lambda *_: Watching()).run(None, taken.getsockname()[1]))
