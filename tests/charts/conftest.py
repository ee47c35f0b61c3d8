"""Fixtures: helm, and what it renders."""

import functools
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

with warnings.catch_warnings():
    # The library still reads its schemas through pkg_resources-like means that warn on import.
    warnings.simplefilter("ignore")
    import kubernetes_validate

CHART = Path(__file__).parents[2] / "charts" / "ullage"
REGISTRY = "imageRegistry=registry.example/ullage"
"""A chart without a registry renders nothing."""


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess]:
    """Runs helm; found through ULLAGE_HELM, beside python, or on PATH."""
    beside = Path(sys.prefix, "bin", "helm")
    binary = os.environ.get("ULLAGE_HELM") or (str(beside) if beside.exists() else None)
    binary = binary or shutil.which("helm")
    if binary is None:
        pytest.skip("no helm: run tests/charts/get_helm.py, or set ULLAGE_HELM")
    home = tmp_path_factory.mktemp("helm")
    places = {f"HELM_{name}_HOME": str(home) for name in ("CACHE", "CONFIG", "DATA")}

    def run(*args: str) -> subprocess.CompletedProcess:
        command = [binary, *args]
        environment = os.environ | places
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture(scope="session")
def render(helm: Callable[..., subprocess.CompletedProcess]) -> Callable[..., list[dict[str, Any]]]:
    """render("key=value", ...): the chart's objects with these values set."""

    def objects(*values: str) -> list[dict[str, Any]]:
        return [obj for obj in yaml.load_all(text(*values), yaml.CSafeLoader) if obj]

    @functools.cache
    def text(*values: str) -> str:
        sets = [part for value in (REGISTRY, *values) for part in ("--set", value)]
        done = helm("template", "release", str(CHART), "--namespace", "ullage-system", *sets)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return objects


@pytest.fixture(scope="session")
def render_values(
    helm: Callable[..., subprocess.CompletedProcess], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """render_values({...}): the chart's objects with these values; without the CRD, for speed."""

    folder = tmp_path_factory.mktemp("values")

    def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
        return rendered(
            yaml.safe_dump({"crds": {"enabled": False}, "imageRegistry": "r.example"} | values)
        )

    @functools.cache
    def rendered(values: str) -> list[dict[str, Any]]:
        given = folder / "values.yaml"
        given.write_text(values)
        done = helm("template", "release", str(CHART), "--namespace", "system", "-f", str(given))
        assert done.returncode == 0, done.stderr
        return [obj for obj in yaml.load_all(done.stdout, yaml.CSafeLoader) if obj]

    return objects


@pytest.fixture(scope="session")
def validate() -> Callable[[dict[str, Any]], None]:
    """Raises where an object is not what Kubernetes 1.35 takes; knows nothing of other APIs."""

    def check(obj: dict[str, Any]) -> None:
        if not obj["apiVersion"].startswith("monitoring.coreos.com"):
            validated(json.dumps(obj))

    @functools.cache  # most values change one object and leave the others as they are
    def validated(obj: str) -> None:
        kubernetes_validate.validate(json.loads(obj), "1.35", strict=True)

    return check
