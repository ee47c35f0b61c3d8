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
    assert at == "spec.colour"
    assert message.endswith("colour cannot change")


TYPED = {"type": "object", "additionalProperties": {"type": "string"}}
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
ITEMS = {"type": "object", "x-kubernetes-preserve-unknown-fields": True,
         "properties": {"name": {"type": "string"}}}  # fmt: skip
LATER_RULED = {
    "typed": (TYPED, {"a": "b"}, True),
    "closed": ({"type": "object", "properties": {"in": TYPED}}, {"in": {"a": "b"}}, True),
    "atomic": ({"type": "array", "items": OPEN}, [{"a": "b"}], True),
    "empty": (OPEN, {}, True),
    "open": (OPEN, {"a": "b"}, False),
    "around": ({"type": "object", "properties": {"in": OPEN}}, {"in": {"a": "b"}}, False),
    "named": (
        {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
         "items": ITEMS}, [{"name": "a", "b": "c"}], False,
    ),
}  # fmt: skip
"""Schemas that get a rule that refuses everything, each with a stored value that it has, and
whether updates may leave that value as it is."""


def test_an_update_may_leave_what_a_newer_rule_refuses_unless_its_schema_is_open(
    client, gadgets, gadget
):
    crd = client.get(f"{CRDS}/gadgets.example.dev").json()
    served = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    served["properties"] |= {name: field for name, (field, _, _) in LATER_RULED.items()}
    crd = client.put(f"{CRDS}/gadgets.example.dev", json=crd).json()
    spec = {name: value for name, (_, value, _) in LATER_RULED.items()}
    assert client.post(gadgets, json=gadget(**spec)).status_code == 201
    served = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for name in LATER_RULED:
        served["properties"][name]["x-kubernetes-validations"] = [
            {"rule": "false", "message": "no longer"}
        ]
    assert client.put(f"{CRDS}/gadgets.example.dev", json=crd).status_code == 200
    note = {"metadata": {"annotations": {"note": "a"}}}
    refused = causes(client.patch(f"{gadgets}/g", json=note, headers=MERGE))
    assert {at for at, _ in refused} == {
        f"spec.{name}" for name, (_, _, may_stay) in LATER_RULED.items() if not may_stay
    }
    edit = {"spec": {"typed": {"a": "c"}, "open": None, "around": None, "named": None}}
    refused = causes(client.patch(f"{gadgets}/g", json=edit, headers=MERGE))
    assert {at for at, _ in refused} == {"spec.typed"}
    left = {"spec": {"open": None, "around": None, "named": None}}
    assert client.patch(f"{gadgets}/g", json=left, headers=MERGE).status_code == 200


def test_a_crd_with_a_broken_rule_is_refused(client, gadgets):
    crd = client.get(f"{CRDS}/gadgets.example.dev").json()
    version = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    version["x-kubernetes-validations"] = [{"rule": "self.metadata ==", "message": "m"}]
    assert client.put(f"{CRDS}/gadgets.example.dev", json=crd).status_code == 422
