"""The cluster that KUBECONFIG names, with the chart installed in a namespace of its own.

All tests of a run share one service; each leaves it settled, or the next one waits until it is.
"""

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from ullage_cluster.client import Client, dns_lag_s, start_client
from ullage_cluster.kubectl import Kubectl
from ullage_cluster.release import CRD, Release, helm_binary
from ullage_cluster.service import KIND, Service, manifest

TIMEOUT_S = 1500
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
SHARED = os.environ.get("ULLAGE_E2E_SERVICE", "smollm2")
IS_KEPT = bool(os.environ.get("ULLAGE_E2E_KEEP"))
IS_INSTALLED = bool(os.environ.get("ULLAGE_E2E_INSTALLED"))


def why_not() -> str:
    """What is missing; nothing if the tests can run."""
    if not os.environ.get("KUBECONFIG"):
        return "no cluster: KUBECONFIG is not set (docs/guide/e2e.md)"
    if not shutil.which("kubectl"):
        return "no kubectl on PATH"
    if not helm_binary():
        return "no helm: run tests/charts/get_helm.py, or set ULLAGE_HELM"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def kubectl() -> Iterator[Kubectl]:
    """kubectl in a namespace in which only pods without any privilege may run."""
    namespace = os.environ.get("ULLAGE_E2E_NAMESPACE") or f"ullage-e2e-{int(time.time())}"
    made = Kubectl(namespace)
    if not made.get("namespace", namespace):  # one that was kept is used again
        made("create", "namespace", namespace)
    made("label", "namespace", namespace, RESTRICTED, "--overwrite")
    yield made
    if not IS_KEPT:
        made("delete", "namespace", namespace, timeout=600)


@pytest.fixture(scope="session")
def release(kubectl: Kubectl) -> Iterator[Release]:
    """The operator, installed and available."""
    helm = helm_binary()
    assert helm
    made = Release(kubectl, helm)
    definition = kubectl.get("customresourcedefinition", CRD)
    is_ours = not definition or made.has_made(definition)
    if not IS_INSTALLED:
        start_client(kubectl, made.image())
        made.install(dns_lag_s(kubectl), f"crds.enabled={str(is_ours).lower()}")
    yield made
    if IS_KEPT:
        return
    kubectl("delete", KIND, "--all", timeout=600)
    made.uninstall()
    if is_ours:
        made.delete_definitions()


@pytest.fixture(scope="session")
def client(kubectl: Kubectl, release: Release) -> Client:
    return Client(kubectl)


@pytest.fixture(scope="session")
def shared(kubectl: Kubectl, release: Release) -> Service:
    kubectl.apply(manifest(SHARED))
    return Service(kubectl, SHARED)


@pytest.fixture
def service(shared: Service) -> Service:
    """Two engines of one pool and a router, settled."""
    shared.settle()
    return shared


@pytest.fixture
def make_service(kubectl: Kubectl, release: Release) -> Iterator[Callable[..., Service]]:
    """Applies the profile under another name; deleted at the end."""
    made: list[str] = []

    def make(name: str, **spec: object) -> Service:
        made.append(name)
        kubectl.apply(manifest(name, **spec))
        return Service(kubectl, name)

    yield make
    for name in made:
        kubectl("delete", KIND, name, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def hold_nodes(kubectl: Kubectl) -> Callable[[int], AbstractContextManager[None]]:
    """Whoever cordons a node holds LOCK_EX; who needs a place for pods at once, LOCK_SH."""
    path = Path(tempfile.gettempdir(), f"{kubectl.namespace}.nodes")

    @contextmanager
    def held(mode: int) -> Iterator[None]:
        with path.open("w") as file:
            fcntl.flock(file, mode)
            yield

    return held


@pytest.fixture
def open_nodes(hold_nodes: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """No test that runs beside this one cordons a node."""
    with hold_nodes(fcntl.LOCK_SH):
        yield


@pytest.fixture(autouse=True)
def told(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shows on a failure what is in the namespace."""
    before = request.session.testsfailed
    yield
    if request.session.testsfailed > before and "kubectl" in request.fixturenames:
        kubectl: Kubectl = request.getfixturevalue("kubectl")
        shown = kubectl.run("get", "all,llmservices,events", "--output", "wide").stdout
        logs = kubectl.run("logs", "deployment/e2e-ullage", "--tail", "40").stdout
        print(shown, logs, sep="\n", file=sys.stderr)
