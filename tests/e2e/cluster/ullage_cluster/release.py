"""The chart's release that the tests use, installed with helm."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ullage_cluster.kubectl import Kubectl, Object

ROOT = Path(__file__).parents[4]
CRD = "llmservices.serving.ullage.dev"
BASE_CRD = "llmservicebases.serving.ullage.dev"
NAME = "e2e"
DNS_LAG = "ULLAGE_DNS_LAG"


def helm_binary() -> str | None:
    """ULLAGE_HELM, beside python, or on PATH."""
    beside = Path(sys.prefix, "bin", "helm")
    given = os.environ.get("ULLAGE_HELM")
    return given or (str(beside) if beside.exists() else shutil.which("helm"))


def extra_env(path: str) -> list[dict[str, Any]]:
    return list((yaml.safe_load(Path(path).read_text()) or {}).get("extraEnv", ()))


def is_deployment(manifest: Object | None) -> bool:
    return bool(manifest) and manifest["kind"] == "Deployment"


@dataclass(frozen=True)
class Release:
    """Serves its own namespace only, so that it disturbs nothing else in the cluster."""

    kubectl: Kubectl
    helm: str
    root: Path = ROOT
    """The checkout that chart and values are of."""

    @property
    def chart(self) -> str:
        return str(self.root / "charts" / "ullage")

    @property
    def value_paths(self) -> list[str]:
        given = os.environ.get("ULLAGE_E2E_VALUES")
        own = str(self.root / "tests" / "e2e" / "cluster" / "values.yaml")
        return [path for path in (own, given) if path]

    @property
    def value_files(self) -> list[str]:
        return [part for path in self.value_paths for part in ("--values", path)]

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

    def image(self) -> str:
        """The operator's image, which clients run in, too."""
        text = self.run("template", NAME, self.chart, *self.value_files)
        [deployment] = [each for each in yaml.safe_load_all(text) if is_deployment(each)]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        return str(container["image"])

    def install(self, dns_lag_s: int, *values: str) -> str:
        """Installs or upgrades, and waits until the operator is available.

        Args:
            dns_lag_s: for how long the cluster's DNS answers what it knew; what the values say of
                that stays.
        """
        environment = [each for path in self.value_paths for each in extra_env(path)]
        if DNS_LAG not in (each["name"] for each in environment):
            environment.append({"name": DNS_LAG, "value": str(dns_lag_s)})
        watched = f"watch.namespaces={{{self.kubectl.namespace}}}"
        sets = [part for value in (watched, *values) for part in ("--set", value)]
        sets += ["--set-json", f"extraEnv={json.dumps(environment)}"]
        waiting = ["--wait", "--timeout", "300s"]
        return self.run(
            "upgrade", "--install", NAME, self.chart, *self.value_files, *sets, *waiting
        )

    def has_made(self, obj: Object) -> bool:
        annotations = obj["metadata"].get("annotations", {})
        owner = [annotations.get(f"meta.helm.sh/release-{part}") for part in ("name", "namespace")]
        return owner == [NAME, self.kubectl.namespace]

    def delete_definitions(self) -> None:
        """Delete what `crds.keep` leaves behind, and with it every service."""
        kind = "customresourcedefinition"
        self.kubectl("delete", kind, CRD, BASE_CRD, "--ignore-not-found")

    def uninstall(self) -> None:
        self.run("uninstall", NAME, "--wait", "--ignore-not-found")
