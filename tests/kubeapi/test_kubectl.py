"""The real kubectl against the test server."""

import json
import shutil
import subprocess

import pytest

KUBECTL = shutil.which("kubectl")
pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: d, labels: {app: x}}
spec:
  replicas: 2
  selector: {matchLabels: {app: x}}
  template:
    metadata: {labels: {app: x}}
    spec: {containers: [{name: c, image: "IMAGE"}]}
"""


@pytest.fixture
def kubectl(api, tmp_path):
    config = api.kubeconfig(tmp_path)

    def run(*args, given=None, fails=False):
        command = [KUBECTL, f"--kubeconfig={config}", f"--cache-dir={tmp_path}/cache", *args]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
        assert (done.returncode != 0) is fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout

    return run


def test_apply_changes_get_and_delete(kubectl):
    assert "created" in kubectl("apply", "-f", "-", given=DEPLOYMENT)
    assert "unchanged" in kubectl("apply", "-f", "-", given=DEPLOYMENT)
    changed = DEPLOYMENT.replace("IMAGE", "other")
    assert "configured" in kubectl("apply", "-f", "-", given=changed)
    seen = json.loads(kubectl("get", "deployment", "d", "-o", "json"))
    assert seen["spec"]["template"]["spec"]["containers"][0]["image"] == "other"
    assert "d" in kubectl("get", "deployments", "-l", "app=x")
    kubectl("scale", "deployment/d", "--replicas=5")
    assert kubectl("get", "deployment/d", "-o", "jsonpath={.spec.replicas}") == "5"
    assert "deleted" in kubectl("delete", "deployment", "d")
    assert "NotFound" in kubectl("get", "deployment", "d", fails=True)


def test_server_side_apply_and_conflicts(kubectl):
    arguments = ("apply", "--server-side", "-f", "-")
    assert "serverside-applied" in kubectl(*arguments, given=DEPLOYMENT)
    assert "serverside-applied" in kubectl(*arguments, given=DEPLOYMENT)
    changed = DEPLOYMENT.replace("IMAGE", "other")
    refused = kubectl(*arguments, "--field-manager=other", given=changed, fails=True)
    assert "conflict" in refused
    assert ".image" in refused
    kubectl(*arguments, "--field-manager=other", "--force-conflicts", given=changed)


def test_custom_resources_have_columns_and_messages(kubectl, gadgets, gadget):
    assert "created" in kubectl("apply", "-f", "-", given=json.dumps(gadget()))
    assert "COLOUR" in kubectl("get", "gd")
    refused = kubectl("apply", "-f", "-", given=json.dumps(gadget("h", low=11)), fails=True)
    assert "low 11 is above high" in refused
    typo = kubectl("apply", "-f", "-", given=json.dumps(gadget("h", replica=1)), fails=True)
    assert 'unknown field "spec.replica"' in typo
