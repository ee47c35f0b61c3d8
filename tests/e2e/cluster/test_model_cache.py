"""A Job fetches a model into a shared claim before engines start, and the status says how far.

ULLAGE_E2E_RWX names a storage class whose volumes several pods may mount and a user without
privilege may write.
"""

import io
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ullage_cluster.client import Client, pod
from ullage_cluster.kubectl import Kubectl, until
from ullage_cluster.release import Release
from ullage_cluster.service import Service
from ullage_testing import hub
from ullage_testing.small_models import make_llama, smollm2_path

from ullage_engine.tokenizer.tokenizer import load_tokenizer

STORAGE_CLASS = os.environ.get("ULLAGE_E2E_RWX", "")
NAME = "fetched"
HUB = "hub"
PORT = 8080
SECONDS = 40.0
"""How long the hub takes to send the weights."""
VOCABULARY = 49152
UNPACK = (
    "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|').extractall('/tmp/m')"
)

pytestmark = pytest.mark.skipif(
    not STORAGE_CLASS, reason="no storage for several pods: ULLAGE_E2E_RWX is not set"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model that answers chats."""
    _, folder = make_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY)
    tokenizer = load_tokenizer(smollm2_path())
    (folder / "tokenizer.json").write_bytes(tokenizer.json_bytes)
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template)
    return folder


@pytest.fixture
def hub_url(kubectl: Kubectl, release: Release, model: Path) -> Iterator[str]:
    """A hub in a pod, which sends the model's weights slowly."""
    waiting = pod(release.image())
    waiting["metadata"] = {"name": HUB, "labels": {"app": HUB}}
    kubectl.apply(waiting)
    spec = {"selector": {"app": HUB}, "ports": [{"port": PORT}]}
    made = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": HUB}, "spec": spec}
    kubectl.apply(made)
    kubectl("wait", "--for=condition=Ready", f"pod/{HUB}", "--timeout=170s")

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(model, ".")
    unpack = kubectl.command("exec", "--stdin", HUB, "--", "python3", "-c", UNPACK)
    subprocess.run(unpack, input=packed.getvalue(), check=True, timeout=120)

    rate = (model / "model.safetensors").stat().st_size / SECONDS
    script = Path(hub.__file__).read_text()
    serve = ("python3", "-c", script, "/tmp/m", str(PORT), str(rate))
    process = subprocess.Popen(kubectl.command("exec", HUB, "--", *serve))
    yield f"http://{HUB}:{PORT}"
    process.terminate()
    process.wait(30)
    kubectl("delete", f"pod/{HUB}", f"service/{HUB}", "--wait=false")


@pytest.fixture
def claim(kubectl: Kubectl) -> Iterator[str]:
    name = "e2e-models"
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": STORAGE_CLASS,
        "resources": {"requests": {"storage": "256Mi"}},
    }
    made = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": spec}
    kubectl.apply(made | {"metadata": {"name": name}})
    yield name
    kubectl("delete", "pvc", name, "--wait=false")


def pool(claim: str, hub_url: str) -> dict[str, Any]:
    environment = {"HF_ENDPOINT": hub_url, "HF_HUB_DISABLE_XET": "1"}
    variables = [{"name": key, "value": value} for key, value in environment.items()]
    return {
        "replicas": 1,
        "gpus": 1,
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "modelCache": {"claimName": claim, "warm": True},
        "podTemplate": {"spec": {"containers": [{"name": "engine", "env": variables}]}},
    }


def test_engines_wait_for_the_job_and_serve_what_it_fetched(
    kubectl: Kubectl,
    make_service: Callable[..., Service],
    client: Client,
    claim: str,
    hub_url: str,
) -> None:
    model = {"source": "hf://org/name@main", "name": "tiny", "maxModelLen": 512}
    service = make_service(NAME, model=model, pools={"single": pool(claim, hub_url)})

    def cache() -> dict[str, Any]:
        pools = service.status().get("pools", {})
        return dict(pools.get("single", {}).get("modelCache", {}))

    def is_under_way() -> bool:
        now = cache()
        assert now.get("phase") != "Failed", service.status()
        return 0 < now.get("bytes", 0) < now.get("totalBytes", 0)

    until(is_under_way, f"the status says how far the Job is; it has {service.status()}")
    assert service.condition("Progressing")["reason"] == "ModelFetching", service.status()
    assert service.pods() == []

    service.settle()
    assert cache()["phase"] == "Fetched"
    assert service.condition("ModelCacheWarm")["status"] == "True"
    [answer] = client.ask(service, ["Name a colour."], max_tokens=8)
    assert answer.is_whole, answer
