"""Manifests, and an API server with the real operator, shared by the operator's tests.

With KUBECONFIG set it is that API server, in a namespace of its own.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from ullage_kubeapi.server import ApiServer, running
from ullage_kubeapi.trial import CRDS, Operator, World, login, read_crd, until
from ullage_testing.manifests import minimal_manifest, stored_manifest

from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import ServicePlan, plan

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def manifest() -> Callable[..., dict[str, Any]]:
    """A minimal manifest; keywords add fields to its spec, and pools to the pool single. Pools have
    the roles that they are named after."""
    return minimal_manifest


@pytest.fixture
def stored() -> Callable[..., dict[str, Any]]:
    """The same, with its defaults, as an API server stores it."""
    return stored_manifest


@pytest.fixture
def make_plan(manifest: Callable[..., dict[str, Any]]) -> Callable[..., ServicePlan]:
    """The plan of a minimal manifest; keywords add fields to its spec."""

    def make(observed: Observed | None = None, **spec: Any) -> ServicePlan:
        return plan(parse(manifest(**spec)), observed or Observed(now=NOW), Settings())

    return make


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        given = os.environ.get("KUBECONFIG")
        api = None
        if not given:
            api = stack.enter_context(running(bookmark_interval=1.0))
            stack.enter_context(pytest.MonkeyPatch.context()).setenv(
                "KUBECONFIG", str(api.kubeconfig(tmp_path))
            )
        client = stack.enter_context(httpx.Client(**login(), timeout=60))
        client.headers["User-Agent"] = "tester/1.0"
        namespace = f"ullage-test-{os.getpid()}-{time.monotonic_ns() % 10**6}"
        client.post("/api/v1/namespaces", json={"metadata": {"name": namespace}})
        stack.callback(client.delete, f"/api/v1/namespaces/{namespace}")
        response = client.post(CRDS, json=read_crd())
        assert response.status_code in (201, 409), response.text
        seen = World(client, namespace, Path(os.environ["KUBECONFIG"]), api)
        until(lambda: client.get(seen.services).status_code == 200, "the definition is served")
        yield seen


@pytest.fixture
def played(world: World) -> ApiServer:
    """The test server, for tests that make it fail or play its controllers."""
    if world.api is None:
        pytest.skip("plays controllers or faults: needs the test server")
    return world.api


@pytest.fixture
def start(world: World, tmp_path: Path) -> Iterator[Callable[..., Operator]]:
    """Starts an operator; all are stopped at the end."""
    running_ones: list[Operator] = []

    def begin(*flags: str, everywhere: bool = False) -> Operator:
        log = tmp_path / f"operator-{len(running_ones)}.log"
        running_ones.append(Operator(world, log, everywhere, *flags))
        return running_ones[-1]

    yield begin
    for operator in running_ones:
        operator.stop()


@pytest.fixture
def operator(start: Callable[..., Operator]) -> Operator:
    return start()
