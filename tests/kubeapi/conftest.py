"""Fixtures: a running test API server, a client of it, a small custom resource."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from ullage_kubeapi.server import ApiServer, running

GADGETS = "/apis/example.dev/v1/namespaces/default/gadgets"


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with running(bookmark_interval=0.2) as server:
        yield server


@pytest.fixture
def client(api: ApiServer) -> Iterator[httpx.Client]:
    headers = {"User-Agent": "tester/1.0"}
    with httpx.Client(base_url=api.url, verify=False, headers=headers, timeout=60) as opened:
        yield opened


@pytest.fixture
def apply(client: httpx.Client) -> Callable[..., httpx.Response]:
    """Server-side apply: apply(path, body, manager="a", force=False)."""

    def send(
        path: str, body: dict[str, Any], manager: str = "a", force: bool = False
    ) -> httpx.Response:
        return client.patch(
            path,
            params={"fieldManager": manager, "force": str(force).lower()},
            json=body,
            headers={"Content-Type": "application/apply-patch+yaml"},
        )

    return send


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Any]:
    """Waits until the call answers something true, and returns it."""

    def wait(ask: Callable[[], Any], seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while not (answer := ask()):
            assert time.monotonic() < end, "the condition did not come true in time"
            time.sleep(0.01)
        return answer

    return wait


@pytest.fixture
def gadgets(client: httpx.Client) -> str:
    """The path of a custom resource with defaults, rules, status and scale."""
    schema = {
        "type": "object",
        "required": ["spec"],
        "x-kubernetes-validations": [
            {"rule": "self.metadata.name.size() < 20", "message": "a short name, please"}
        ],
        "properties": {
            "spec": {
                "type": "object",
                "required": ["colour"],
                "x-kubernetes-validations": [
                    {
                        "rule": "self.colour == oldSelf.colour",
                        "message": "colour cannot change",
                        "fieldPath": ".colour",
                    },
                    {
                        "rule": "!has(self.low) || self.low <= self.high",
                        "messageExpression": "'low ' + string(self.low) + ' is above high'",
                    },
                ],
                "properties": {
                    "colour": {"type": "string", "enum": ["red", "blue"]},
                    "replicas": {"type": "integer", "default": 2, "minimum": 0},
                    "low": {"type": "integer"},
                    "high": {"type": "integer", "default": 10},
                    "size": {"type": "string", "pattern": "^[0-9]+Mi$"},
                    "parts": {
                        "type": "array",
                        "x-kubernetes-list-type": "map",
                        "x-kubernetes-list-map-keys": ["name"],
                        "items": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {
                                "name": {"type": "string"},
                                "weight": {"type": "integer", "default": 1},
                            },
                        },
                    },
                    "tags": {"type": "object", "additionalProperties": {"type": "string"}},
                    "plain": {"type": "array", "items": {"type": "integer"}},
                },
            },
            "status": {
                "type": "object",
                "properties": {
                    "replicas": {"type": "integer"},
                    "phase": {"type": "string"},
                },
            },
        },
    }
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "gadgets.example.dev"},
        "spec": {
            "group": "example.dev",
            "scope": "Namespaced",
            "names": {
                "plural": "gadgets",
                "singular": "gadget",
                "kind": "Gadget",
                "shortNames": ["gd"],
            },
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                        },
                    },
                    "additionalPrinterColumns": [
                        {"name": "Colour", "type": "string", "jsonPath": ".spec.colour"}
                    ],
                }
            ],
        },
    }
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    assert client.post(path, json=crd).status_code == 201
    return GADGETS


@pytest.fixture
def gadget() -> Callable[..., dict[str, Any]]:
    """Builds a Gadget: gadget("name", colour="red", ...)."""

    def build(name: str = "g", **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "example.dev/v1",
            "kind": "Gadget",
            "metadata": {"name": name},
            "spec": {"colour": "red", **spec},
        }

    return build
