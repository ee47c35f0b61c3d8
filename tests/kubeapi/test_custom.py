"""Custom resources: defaults, pruning, validation with paths, CEL rules."""

import pytest

MERGE = {"Content-Type": "application/merge-patch+json"}
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def causes(response):
    assert response.status_code == 422, response.text
    return {(c["field"], c["message"]) for c in response.json()["details"]["causes"]}


def test_a_crd_is_established_and_discovered(client, gadgets):
    crd = client.get(f"{CRDS}/gadgets.example.dev").json()
    states = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert states == {"NamesAccepted": "True", "Established": "True"}
    listed = client.get("/apis/example.dev/v1").json()["resources"]
    assert {"gadgets", "gadgets/status", "gadgets/scale"} == {r["name"] for r in listed}


def test_deleting_a_crd_deletes_its_objects(client, gadgets, gadget):
    client.post(gadgets, json=gadget())
    client.delete(f"{CRDS}/gadgets.example.dev")
    assert client.get(gadgets).status_code == 404


def test_defaults_are_filled_in(client, gadgets, gadget):
    spec = client.post(gadgets, json=gadget(parts=[{"name": "p"}])).json()["spec"]
    assert (spec["replicas"], spec["high"], spec["parts"]) == (2, 10, [{"name": "p", "weight": 1}])


def test_unknown_fields_are_pruned_with_a_warning_or_refused(client, gadgets, gadget):
    response = client.post(gadgets, json=gadget(nonsense=1))
    assert "nonsense" not in response.json()["spec"]
    assert "spec.nonsense" in response.headers["Warning"]
    strict = client.post(
        gadgets, json=gadget("h", nonsense=1), params={"fieldValidation": "Strict"}
    )
    assert strict.status_code == 400
    assert 'unknown field "spec.nonsense"' in strict.json()["message"]


@pytest.mark.parametrize(
    ("spec", "field", "text"),
    [
        ({"colour": "green"}, "spec.colour", 'supported values: "red", "blue"'),
        ({"replicas": -1}, "spec.replicas", "greater than or equal to 0"),
        ({"replicas": "three"}, "spec.replicas", "must be of type integer"),
        ({"size": "3G"}, "spec.size", "should match"),
        ({"parts": [{"weight": 1}]}, "spec.parts[0].name", "Required value"),
        ({"parts": [{"name": "a"}, {"name": "a"}]}, "spec.parts[1]", "Duplicate"),
        ({"tags": {"a": 1}}, "spec.tags.a", "must be of type string"),
        ({"colour": None}, "spec.colour", "Required value"),
    ],
)
def test_violations_name_their_field(client, gadgets, gadget, spec, field, text):
    problems = causes(client.post(gadgets, json=gadget(**spec)))
    assert any(at == field and text in message for at, message in problems), problems


def test_rules_answer_with_their_messages(client, gadgets, gadget):
    problems = causes(client.post(gadgets, json=gadget(low=11)))
    assert problems == {("spec", 'Invalid value: "object": low 11 is above high')}
    ((at, message),) = causes(client.post(gadgets, json=gadget("a-name-much-too-long-for-it")))
    assert (at, message.endswith("a short name, please")) == ("", True)


def test_transition_rules_bind_updates_only(client, gadgets, gadget):
    assert client.post(gadgets, json=gadget()).status_code == 201
    refused = client.patch(f"{gadgets}/g", json={"spec": {"colour": "blue"}}, headers=MERGE)
    ((at, message),) = causes(refused)
    assert at == "spec.colour" and message.endswith("colour cannot change")


def test_a_crd_with_a_broken_rule_is_refused(client, gadgets):
    crd = client.get(f"{CRDS}/gadgets.example.dev").json()
    version = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    version["x-kubernetes-validations"] = [{"rule": "self.metadata ==", "message": "m"}]
    assert client.put(f"{CRDS}/gadgets.example.dev", json=crd).status_code == 422
