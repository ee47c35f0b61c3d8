"""TLS between routers and engines is turned on, and off again, under load."""

import json
from collections.abc import Callable
from pathlib import Path

from ullage_cluster.client import Client
from ullage_cluster.kubectl import Kubectl, names, until
from ullage_cluster.service import Service
from ullage_testing.certificates import Authority

NAME = "sealed"
SECRET = "sealed-engines"
PROMPTS = tuple(f"Say something about {thing}." for thing in ("tea", "jazz"))
LONGEST_S = 1200


def make_secret(kubectl: Kubectl, folder: Path) -> None:
    """Make the Secret of the engines' certificate, with the keys that cert-manager writes."""
    Authority().issue(folder, f"{NAME}-engine.{kubectl.namespace}.svc")
    files = [f"--from-file={file}" for file in sorted(folder.iterdir())]
    kubectl("create", "secret", "generic", SECRET, *files)


def engines(service: Service) -> set[str]:
    return {pod["metadata"]["uid"] for pod in service.pods()}


def test_tls_of_engines_is_turned_on_and_off_without_a_lost_request(
    kubectl: Kubectl, make_service: Callable[..., Service], client: Client, tmp_path: Path
) -> None:
    make_secret(kubectl, tmp_path / "certificate")
    service = make_service(NAME, rollout={"strategy": "Rolling"})
    service.settle()

    with client.streams(service, PROMPTS, max_tokens=16, seconds=LONGEST_S, stop=True) as streams:
        streams.started(len(PROMPTS))

        plain = engines(service)
        service.edit(tls={"engines": {"secretName": SECRET}})
        until(lambda: service.is_settled() and not plain & engines(service), "engines have TLS")
        assert all(SECRET in json.dumps(pod["spec"]["volumes"]) for pod in service.pods())

        sealed = engines(service)
        service.edit(tls=None)
        until(lambda: service.is_settled() and not sealed & engines(service), "they have none")

        answers = streams.stop()

    assert [answer for answer in answers if not answer.is_whole] == []
    asked = {answer.engine for answer in answers}
    assert asked <= set(names(service.pods())), asked
