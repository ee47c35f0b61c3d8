"""What helm prints after an installation works: its commands are run as they stand."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from ullage_kubeapi.server import running
from ullage_kubeapi.trial import CRDS, MERGE, read_crd

from ullage_operator.api import naming

REGISTRY = "imageRegistry=registry.example/ullage"
CHART = Path(__file__).parents[2] / "charts" / "ullage"


@pytest.fixture
def notes(helm):
    """notes("key=value", ...): what helm says with these values."""

    def printed(*values):
        sets = [part for value in (REGISTRY, *values) for part in ("--set", value)]
        done = helm("install", "release", str(CHART), "--dry-run=client", *sets)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("NOTES:\n")[1]

    return printed


@pytest.fixture
def cluster(tmp_path):
    """A client of a test API server that knows the definition, and the kubeconfig for it."""

    with running() as api, httpx.Client(base_url=api.url, verify=False, timeout=60) as client:
        assert client.post(CRDS, json=read_crd()).status_code == 201
        yield client, api.kubeconfig(tmp_path)


def run(script, kubeconfig):
    given = os.environ | {"KUBECONFIG": str(kubeconfig)}
    return subprocess.run(
        ["bash", "-ec", script], env=given, capture_output=True, text=True, timeout=60
    )


def set_status(client, path, status):
    answer = client.patch(f"{path}/status", json={"status": status}, headers=MERGE)
    assert answer.status_code == 200, answer.text


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_its_commands_work(notes, cluster, render):
    client, kubeconfig = cluster
    text = notes("crds.enabled=false", "watch.namespaces={default}")
    rollout, *_ = (line for line in text.splitlines() if "rollout status" in line)
    apply = re.search(r"(?ms)^kubectl apply .*?^EOF$", text)[0]
    wait, *_ = (line for line in text.splitlines() if " wait " in line)

    (deployment,) = [obj for obj in render("crds.enabled=false") if obj["kind"] == "Deployment"]
    deployments = "/apis/apps/v1/namespaces/default/deployments"
    deployment["metadata"] = {"name": deployment["metadata"]["name"]}
    made = client.post(deployments, json=deployment).json()["metadata"]
    counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), 1)
    status = {"observedGeneration": made["generation"], **counts}
    set_status(client, f"{deployments}/{made['name']}", status)
    assert "successfully rolled out" in run(rollout, kubeconfig).stdout

    assert "created" in run(apply, kubeconfig).stdout
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"}
    ready |= {"reason": "Serving", "message": ""}
    service = "/apis/serving.ullage.dev/v1alpha1/namespaces/default/llmservices/smollm2"
    set_status(client, service, {"conditions": [ready]})
    assert "condition met" in run(wait, kubeconfig).stdout


def test_it_names_the_routers_service_and_port(notes):
    text = notes()
    forward = re.search(r"port-forward service/(\S+) (\d+):(\d+)", text)
    assert forward.groups() == (naming.router_name("smollm2"), *[str(naming.HTTP_PORT)] * 2)
    assert f"http://127.0.0.1:{forward[2]}/v1/chat/completions" in text
    assert '"model": "smollm2-135m"' in text
    assert "name: smollm2-135m" in text


def test_it_says_where_services_are_served(notes):
    assert "LLMServices in all namespaces" in notes()
    text = notes("watch.namespaces={first,second}", "crds.enabled=false")
    assert "LLMServices in first, second" in text
    assert "namespace: first" in text
    assert "kubectl --namespace first wait" in text
    assert "did not install the LLMService definition" in text
