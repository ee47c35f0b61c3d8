"""Server-side apply: ownership, conflicts, removal, lists that merge by key."""

import pytest

CONFIGMAPS = "/api/v1/namespaces/default/configmaps"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
MERGE = {"Content-Type": "application/merge-patch+json"}
STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}


def config_map(**data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": data}


def deployment(*containers, replicas=None):
    spec = {
        "selector": {"matchLabels": {"app": "x"}},
        "template": {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": containers}},
    }
    if replicas is not None:
        spec["replicas"] = replicas
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": spec,
    }


def managers(obj):
    return {
        (entry["manager"], entry["operation"]): entry["fieldsV1"]
        for entry in obj["metadata"]["managedFields"]
    }


def test_apply_creates_and_applying_again_changes_nothing(apply):
    response = apply(f"{CONFIGMAPS}/c", config_map(a="1"))
    assert response.status_code == 201
    assert managers(response.json()) == {("a", "Apply"): {"f:data": {"f:a": {}}}}
    again = apply(f"{CONFIGMAPS}/c", config_map(a="1"))
    assert again.status_code == 200
    assert again.json()["metadata"] == response.json()["metadata"]


def test_apply_needs_a_field_manager(client):
    headers = {"Content-Type": "application/apply-patch+yaml"}
    assert client.patch(f"{CONFIGMAPS}/c", json=config_map(), headers=headers).status_code == 400


def test_conflicts_are_named_and_can_be_forced(apply):
    apply(f"{CONFIGMAPS}/c", config_map(a="1", b="1"), "first")
    refused = apply(f"{CONFIGMAPS}/c", config_map(a="2"), "second")
    assert refused.status_code == 409
    (cause,) = refused.json()["details"]["causes"]
    assert (cause["field"], cause["message"]) == (".data.a", 'conflict with "first"')
    forced = apply(f"{CONFIGMAPS}/c", config_map(a="2"), "second", force=True).json()
    assert forced["data"] == {"a": "2", "b": "1"}
    assert managers(forced)["first", "Apply"] == {"f:data": {"f:b": {}}}


def test_equal_values_are_shared_and_stay_until_the_last_owner_lets_go(apply):
    apply(f"{CONFIGMAPS}/c", config_map(a="1"), "first")
    assert apply(f"{CONFIGMAPS}/c", config_map(a="1", b="2"), "second").status_code == 200
    kept = apply(f"{CONFIGMAPS}/c", config_map(b="2"), "second").json()
    assert kept["data"] == {"a": "1", "b": "2"}
    gone = apply(f"{CONFIGMAPS}/c", {**config_map(), "data": {}}, "first").json()
    assert gone["data"] == {"b": "2"}


def test_fields_no_longer_applied_are_removed_and_others_kept(apply, client):
    apply(f"{CONFIGMAPS}/c", config_map(a="1", b="1"))
    client.patch(f"{CONFIGMAPS}/c", json={"data": {"mine": "x"}}, headers=MERGE)
    after = apply(f"{CONFIGMAPS}/c", config_map(a="1")).json()
    assert after["data"] == {"a": "1", "mine": "x"}
    assert managers(after)["tester", "Update"] == {"f:data": {"f:mine": {}}}


def test_a_plain_write_takes_ownership_and_apply_takes_it_back(apply, client):
    apply(f"{CONFIGMAPS}/c", config_map(a="1"))
    client.patch(f"{CONFIGMAPS}/c", json={"data": {"a": "drift"}}, headers=MERGE)
    assert apply(f"{CONFIGMAPS}/c", config_map(a="1")).status_code == 409
    repaired = apply(f"{CONFIGMAPS}/c", config_map(a="1"), force=True).json()
    assert repaired["data"] == {"a": "1"}


def test_containers_ports_and_env_merge_by_key(apply):
    one = {
        "name": "one",
        "image": "i",
        "env": [{"name": "A", "value": "1"}],
        "ports": [{"containerPort": 80}],
    }
    response = apply(f"{DEPLOYMENTS}/d", deployment(one), "first")
    assert response.status_code == 201, response.text
    partial = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {
            "template": {
                "spec": {"containers": [{"name": "one", "env": [{"name": "B", "value": "2"}]}]}
            }
        },
    }
    merged = apply(f"{DEPLOYMENTS}/d", partial, "second").json()
    (container,) = merged["spec"]["template"]["spec"]["containers"]
    assert [item["name"] for item in container["env"]] == ["A", "B"]
    assert container["image"] == "i"
    assert container["ports"][0]["protocol"] == "TCP"
    two = {"name": "two", "image": "i"}
    refused = apply(f"{DEPLOYMENTS}/d", deployment(two), "first")
    # The second manager still holds a part of container "one", which now lacks its image.
    assert "containers[0].image" in refused.json()["message"]


def test_a_removed_container_goes_and_replicas_fall_back_to_the_default(apply):
    one = {"name": "one", "image": "i"}
    two = {"name": "two", "image": "i"}
    apply(f"{DEPLOYMENTS}/d", deployment(one, two, replicas=3))
    after = apply(f"{DEPLOYMENTS}/d", deployment(two)).json()
    assert [c["name"] for c in after["spec"]["template"]["spec"]["containers"]] == ["two"]
    assert after["spec"]["replicas"] == 1
    again = apply(f"{DEPLOYMENTS}/d", deployment(two)).json()
    assert again["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]


def test_status_has_owners_of_its_own(apply, gadgets, gadget):
    apply(f"{gadgets}/g", gadget())
    status = {
        "apiVersion": "example.dev/v1",
        "kind": "Gadget",
        "metadata": {"name": "g"},
        "status": {"phase": "Up"},
    }
    done = apply(f"{gadgets}/g/status", status)
    assert done.status_code == 200, done.text
    entries = {
        entry.get("subresource", ""): entry["fieldsV1"]
        for entry in done.json()["metadata"]["managedFields"]
    }
    assert entries["status"] == {"f:status": {"f:phase": {}}}
    assert apply(f"{gadgets}/g", gadget()).json()["status"] == {"phase": "Up"}


def test_custom_lists_merge_as_their_schema_says(apply, gadgets, gadget):
    apply(f"{gadgets}/g", gadget(parts=[{"name": "x"}], plain=[1, 2]), "first")
    other = gadget(parts=[{"name": "y", "weight": 3}])
    merged = apply(f"{gadgets}/g", other, "second").json()
    assert merged["spec"]["parts"] == [{"name": "x", "weight": 1}, {"name": "y", "weight": 3}]
    assert apply(f"{gadgets}/g", gadget(plain=[2]), "second").status_code == 409


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ([{"name": "two", "image": "j"}], ["one", "two"]),
        ([{"name": "one", "$patch": "delete"}, {"name": "two", "image": "j"}], ["two"]),
    ],
)
def test_strategic_merge_knows_containers(apply, client, change, names):
    apply(f"{DEPLOYMENTS}/d", deployment({"name": "one", "image": "i"}))
    body = {"spec": {"template": {"spec": {"containers": change}}}}
    patched = client.patch(f"{DEPLOYMENTS}/d", json=body, headers=STRATEGIC).json()
    containers = patched["spec"]["template"]["spec"]["containers"]
    assert [container["name"] for container in containers] == names
