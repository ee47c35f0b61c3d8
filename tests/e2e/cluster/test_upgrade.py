"""An upgrade from an older version, and the way back, while clients ask: no request is lost.

ULLAGE_E2E_OLD names a checkout of that version, whose images the nodes have. Chart, definition,
stored objects and images are its own, and so are those after the way back. The suite's own release
must not be there, for a cluster has one definition.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ullage_cluster.client import Client, dns_lag_s, start_client
from ullage_cluster.kubectl import Kubectl, names, until
from ullage_cluster.release import CRD, ROOT, Release, helm_binary
from ullage_cluster.service import Service, manifest

OLD = Path(os.environ.get("ULLAGE_E2E_OLD") or "/nonexistent")
NAME = "upgraded"
PROMPTS = tuple(f"Say something about {thing}." for thing in ("tea", "jazz"))
LONGEST_S = 1800

pytestmark = [
    pytest.mark.timeout(2 * LONGEST_S),
    pytest.mark.skipif(not OLD.is_dir(), reason="no older version: ULLAGE_E2E_OLD is not set"),
]


@pytest.fixture(scope="module")
def newer(kubectl: Kubectl) -> Release:
    helm = helm_binary()
    assert helm
    return Release(kubectl, helm)


@pytest.fixture(scope="module")
def lag_s(kubectl: Kubectl, newer: Release) -> int:
    start_client(kubectl, newer.image())
    return dns_lag_s(kubectl)


@pytest.fixture(scope="module")
def older(kubectl: Kubectl, newer: Release, lag_s: int) -> Iterator[Release]:
    """The older version's definition and operator."""
    assert not kubectl.get("customresourcedefinition", CRD), "another release has the definition"
    made = Release(kubectl, newer.helm, OLD)
    made.install(lag_s)
    yield made
    kubectl("delete", "llmservices", "--all", timeout=600)
    made.uninstall()
    made.delete_definitions()


def images(service: Service) -> set[str]:
    """Images of the service's containers."""
    pods = [*service.pods(), *service.pods("router")]
    return {container["image"] for pod in pods for container in pod["spec"]["containers"]}


def rolling(root: Path) -> dict[str, str]:
    """A rollout without a canary, as a version spells it."""
    definition = (root / "crds" / f"{CRD}.yaml").read_text(encoding="utf-8")
    return {"strategy": "Rolling" if "Rolling" in definition else "rolling"}


def test_an_upgrade_and_the_way_back_lose_no_request(
    kubectl: Kubectl, older: Release, newer: Release, lag_s: int
) -> None:
    old_manifest = manifest(NAME, OLD, rollout=rolling(OLD))
    old_manifest["spec"]["memory"]["threshold"] = 0.84
    kubectl.apply(old_manifest)
    service = Service(kubectl, NAME)
    service.settle()
    old_images = images(service)
    old_pods = {kubectl.uid("pod", name) for name in names(service.pods())}

    client = Client(kubectl)
    with client.streams(service, PROMPTS, max_tokens=16, seconds=LONGEST_S, stop=True) as streams:
        streams.started(len(PROMPTS))

        # The stored object has an older field: what serves goes on, and the status says why.
        newer.install(lag_s)
        until(
            lambda: "thresholdPercent" in service.condition("Degraded").get("message", ""),
            f"the newer operator names the field; it has {service.status()}",
        )
        assert service.condition("Ready")["status"] == "True", service.status()
        assert {kubectl.uid("pod", name) for name in names(service.pods())} == old_pods

        kubectl.apply(manifest(NAME, rollout=rolling(ROOT)))
        until(service.is_settled, "the newer version serves", LONGEST_S / 2)
        assert not images(service) & old_images

        older.install(lag_s)
        kubectl.apply(old_manifest)
        until(service.is_settled, "the older version serves again", LONGEST_S / 2)
        assert images(service) == old_images

        answers = streams.stop()
    assert answers
    assert [answer for answer in answers if not answer.is_whole] == []
