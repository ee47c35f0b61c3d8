"""The real operator follows the bases of services, and lets nothing fall where one is missing."""

import pytest
import yaml
from ullage_kubeapi.trial import CRDS, ROOT, converged, until

BASES = "/apis/serving.ullage.dev/v1alpha1/namespaces/{}/llmservicebases"
DEFINITION = ROOT / "crds" / "llmservicebases.serving.ullage.dev.yaml"


@pytest.fixture
def bases(world):
    """The path of bases, of which the API server knows the definition."""
    made = world.client.post(CRDS, json=yaml.safe_load(DEFINITION.read_text(encoding="utf-8")))
    assert made.status_code in (201, 409), made.text
    path = BASES.format(world.namespace)
    until(lambda: world.client.get(path).status_code == 200, "bases are served")
    return path


def base(name="shared", **spec):
    meta = {"name": name}
    version = "serving.ullage.dev/v1alpha1"
    return {"apiVersion": version, "kind": "LLMServiceBase", "metadata": meta, "spec": spec}


def routers(world):
    deployment = world.get(f"{world.path('deployments')}/s-router")
    return deployment.get("spec", {}).get("replicas")


def degraded(world):
    return world.condition("Degraded")


def test_an_edit_of_a_base_is_an_edit_of_its_services(world, bases, start):
    assert world.client.post(bases, json=base(router={"replicas": 3})).status_code == 201
    start()
    assert world.create(baseRefs=[{"name": "shared"}]).status_code == 201
    converged(world)
    until(lambda: routers(world) == 3, "the base says how many")

    assert world.patch(f"{bases}/shared", {"spec": {"router": {"replicas": 5}}}).status_code == 200
    until(lambda: routers(world) == 5, "its edit is followed")

    own = {"spec": {"router": {"replicas": 1}}}
    assert world.patch(f"{world.services}/s", own).status_code == 200
    until(lambda: routers(world) == 1, "what the service says itself wins")


def test_what_serves_goes_on_where_its_base_is_gone_or_wrong(world, bases, start):
    world.client.post(bases, json=base(router={"replicas": 3}))
    start()
    world.create(baseRefs=[{"name": "shared"}])
    before = converged(world)
    until(lambda: routers(world) == 3, "the base says how many")

    assert world.client.delete(f"{bases}/shared").status_code == 200
    until(lambda: degraded(world).get("reason") == "InvalidSpec", "the base is missed")
    assert "spec.baseRefs[0].name: there is no LLMServiceBase shared" in degraded(world)["message"]
    assert routers(world) == 3
    assert world.owned().keys() == before.keys()

    # No API server compares two fields of a base, but the operator does of what comes of it.
    pool = {"single": {"gpus": 3}}
    wrong = world.client.post(bases, json=base(router={"replicas": 4}, pools=pool))
    assert wrong.status_code == 201, wrong.text
    until(lambda: "gpus must equal" in degraded(world)["message"], "the field is named")
    assert "LLMServiceBase shared" in degraded(world)["message"]
    assert routers(world) == 3

    right = {"spec": {"pools": {"single": {"gpus": 1}}}}
    assert world.patch(f"{bases}/shared", right).status_code == 200
    until(lambda: degraded(world).get("status") == "False", "it is right again")
    until(lambda: routers(world) == 4, "and is followed")


def test_without_the_definition_the_status_says_what_to_apply(world, played, operator):
    world.create(baseRefs=[{"name": "shared"}])
    until(lambda: degraded(world).get("reason") == "InvalidSpec", "the base is missed")
    assert "apply the crds/" in degraded(world)["message"]
