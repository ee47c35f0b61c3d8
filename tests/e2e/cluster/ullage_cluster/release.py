"""The chart's release that the tests use, installed with helm."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ullage_cluster.kubectl import Kubectl, Object

ROOT = Path(__file__).parents[4]
CHART = ROOT / "charts" / "ullage"
CRD = "llmservices.serving.ullage.dev"
VALUES = Path(__file__).parents[1] / "values.yaml"
NAME = "e2e"


def helm_binary() -> str | None:
    """ULLAGE_HELM, beside python, or on PATH."""
    beside = Path(sys.prefix, "bin", "helm")
    given = os.environ.get("ULLAGE_HELM")
    return given or (str(beside) if beside.exists() else shutil.which("helm"))


@dataclass(frozen=True)
class Release:
    """Serves its own namespace only, so that it disturbs nothing else in the cluster."""

    kubectl: Kubectl
    helm: str

    @property
    def operator(self) -> str:
        """Name of the operator's Deployment and ServiceAccount."""
        return f"{NAME}-ullage"

    @property
    def selector(self) -> str:
        """Label selector of the operator's pods."""
        return f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component=operator"

    def run(self, *arguments: str) -> str:
        command = [self.helm, "--namespace", self.kubectl.namespace, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
        return done.stdout

    def install(self, *values: str) -> str:
        """Installs or upgrades, and waits until the operator is available."""
        given = os.environ.get("ULLAGE_E2E_VALUES")
        files = [part for path in (str(VALUES), given) if path for part in ("--values", path)]
        watched = f"watch.namespaces={{{self.kubectl.namespace}}}"
        sets = [part for value in (watched, *values) for part in ("--set", value)]
        waiting = ["--wait", "--timeout", "300s"]
        return self.run("upgrade", "--install", NAME, str(CHART), *files, *sets, *waiting)

    def has_made(self, obj: Object) -> bool:
        annotations = obj["metadata"].get("annotations", {})
        owner = [annotations.get(f"meta.helm.sh/release-{part}") for part in ("name", "namespace")]
        return owner == [NAME, self.kubectl.namespace]

    def uninstall(self) -> None:
        self.run("uninstall", NAME, "--wait", "--ignore-not-found")
