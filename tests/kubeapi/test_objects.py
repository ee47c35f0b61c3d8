"""Identity, versions, conflicts, subresources, selectors, deletion: the plain promises."""

import httpx
import pytest

CONFIGMAPS = "/api/v1/namespaces/default/configmaps"
MERGE = {"Content-Type": "application/merge-patch+json"}
JSON = {"Content-Type": "application/json-patch+json"}


def config_map(name="c", data=None, **meta):
    return {"metadata": {"name": name, **meta}, "data": data or {"a": "1"}}


def owned_by(owner):
    return [
        {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
    ]


def test_discovery_lists_groups_resources_and_the_version(client):
    assert client.get("/version").json()["major"] == "1"
    assert client.get("/api").json()["versions"] == ["v1"]
    groups = {group["name"] for group in client.get("/apis").json()["groups"]}
    assert {"apps", "policy", "networking.k8s.io", "apiextensions.k8s.io"} <= groups
    apps = client.get("/apis/apps/v1").json()["resources"]
    assert {"deployments", "deployments/status", "deployments/scale"} <= {r["name"] for r in apps}
    assert client.get("/apis/monitoring.coreos.com/v1").status_code == 404


def test_namespaces_are_listed_and_needed(client):
    listed = client.get("/api/v1/namespaces").json()["items"]
    assert [item["metadata"]["name"] for item in listed] == ["default", "kube-system"]
    missing = client.post("/api/v1/namespaces/none/configmaps", json=config_map())
    assert (missing.status_code, missing.json()["kind"]) == (404, "Status")


def test_create_gives_identity_and_refuses_the_name_twice(client):
    response = client.post(CONFIGMAPS, json=config_map())
    assert response.status_code == 201
    meta = response.json()["metadata"]
    assert meta["uid"]
    assert meta["creationTimestamp"]
    assert int(meta["resourceVersion"]) > 0
    again = client.post(CONFIGMAPS, json=config_map())
    assert (again.status_code, again.json()["reason"]) == (409, "AlreadyExists")


def test_resource_versions_grow_and_unchanged_writes_do_not_count(client):
    first = client.post(CONFIGMAPS, json=config_map()).json()
    same = client.put(f"{CONFIGMAPS}/c", json=first).json()
    assert same["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    changed = client.patch(f"{CONFIGMAPS}/c", json={"data": {"a": "2"}}, headers=MERGE).json()
    grown = int(changed["metadata"]["resourceVersion"])
    assert grown > int(first["metadata"]["resourceVersion"])


@pytest.mark.parametrize("method", ["put", "patch"])
def test_a_stale_resource_version_conflicts(client, method):
    first = client.post(CONFIGMAPS, json=config_map()).json()
    client.patch(f"{CONFIGMAPS}/c", json={"data": {"a": "2"}}, headers=MERGE)
    first["data"]["a"] = "3"
    headers = MERGE if method == "patch" else {}
    refused = client.request(method, f"{CONFIGMAPS}/c", json=first, headers=headers)
    assert (refused.status_code, refused.json()["reason"]) == (409, "Conflict")


def test_missing_objects_paths_and_bodies_are_answered_with_status(client):
    assert client.get(f"{CONFIGMAPS}/none").json()["reason"] == "NotFound"
    assert client.get("/api/v1/namespaces/default/nothings").status_code == 404
    assert client.post(CONFIGMAPS, content=b"{").status_code == 400
    wrong = client.post(CONFIGMAPS, json=config_map(name="Bad_Name"))
    assert wrong.status_code == 422
    assert wrong.json()["details"]["causes"][0]["field"] == "metadata.name"


def test_generation_counts_spec_changes_only(client, gadgets, gadget):
    response = client.post(gadgets, json=gadget()).json()
    path = f"{gadgets}/g"
    assert response["metadata"]["generation"] == 1
    labelled = client.patch(path, json={"metadata": {"labels": {"a": "b"}}}, headers=MERGE).json()
    assert labelled["metadata"]["generation"] == 1
    status = client.patch(f"{path}/status", json={"status": {"phase": "x"}}, headers=MERGE).json()
    assert (status["metadata"]["generation"], status["status"]["phase"]) == (1, "x")
    scaled = client.patch(path, json={"spec": {"replicas": 5}}, headers=MERGE).json()
    assert scaled["metadata"]["generation"] == 2


def test_status_and_spec_are_written_apart(client, gadgets, gadget):
    response = client.post(gadgets, json={**gadget(), "status": {"phase": "early"}}).json()
    assert "status" not in response
    response["status"] = {"phase": "late"}
    response["spec"]["replicas"] = 9
    spec_only = client.put(f"{gadgets}/g", json=response).json()
    assert "status" not in spec_only
    assert spec_only["spec"]["replicas"] == 9
    spec_only["status"] = {"phase": "late"}
    spec_only["spec"]["replicas"] = 1
    status_only = client.put(f"{gadgets}/g/status", json=spec_only).json()
    assert (status_only["status"]["phase"], status_only["spec"]["replicas"]) == ("late", 9)


def test_scale_reads_and_writes_replicas(client, gadgets, gadget):
    client.post(gadgets, json=gadget())
    assert client.get(f"{gadgets}/g/scale").json()["spec"]["replicas"] == 2
    body = {"spec": {"replicas": 4}}
    client.patch(f"{gadgets}/g/scale", json=body, headers=MERGE)
    assert client.get(f"{gadgets}/g").json()["spec"]["replicas"] == 4


def test_selectors_limits_and_continuation(client):
    for index in range(5):
        labels = {"parity": "even" if index % 2 == 0 else "odd"}
        client.post(CONFIGMAPS, json=config_map(name=f"c{index}", labels=labels))

    def names(**params):
        items = client.get(CONFIGMAPS, params=params).json()["items"]
        return [item["metadata"]["name"] for item in items]

    assert names(labelSelector="parity=odd") == ["c1", "c3"]
    assert names(labelSelector="parity in (even,none),parity") == ["c0", "c2", "c4"]
    assert names(labelSelector="!parity") == []
    assert names(fieldSelector="metadata.name=c4") == ["c4"]
    page = client.get(CONFIGMAPS, params={"limit": 3}).json()
    assert len(page["items"]) == 3
    assert page["metadata"]["remainingItemCount"] == 2
    rest = {"limit": 3, "continue": page["metadata"]["continue"]}
    assert names(**rest) == ["c3", "c4"]


def test_merge_patch_removes_with_null(client):
    client.post(CONFIGMAPS, json=config_map(data={"a": "1", "b": "2"}))
    body = {"data": {"a": None, "c": "3"}}
    patched = client.patch(f"{CONFIGMAPS}/c", json=body, headers=MERGE).json()
    assert patched["data"] == {"b": "2", "c": "3"}


def test_json_patch_tests_before_it_changes(client):
    response = client.post(CONFIGMAPS, json=config_map()).json()
    version = response["metadata"]["resourceVersion"]
    test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
    add = {"op": "add", "path": "/data/b~1c", "value": "2"}
    done = client.patch(f"{CONFIGMAPS}/c", json=[test, add], headers=JSON)
    assert done.json()["data"] == {"a": "1", "b/c": "2"}
    refused = client.patch(f"{CONFIGMAPS}/c", json=[test, add], headers=JSON)
    assert refused.status_code == 422


def test_finalizers_hold_an_object_until_they_are_taken_off(client):
    client.post(CONFIGMAPS, json=config_map(finalizers=["example.dev/hold"]))
    marked = client.delete(f"{CONFIGMAPS}/c").json()
    assert marked["metadata"]["deletionTimestamp"]
    more = {"metadata": {"finalizers": ["example.dev/hold", "example.dev/more"]}}
    assert client.patch(f"{CONFIGMAPS}/c", json=more, headers=MERGE).status_code == 422
    none = {"metadata": {"finalizers": []}}
    assert client.patch(f"{CONFIGMAPS}/c", json=none, headers=MERGE).status_code == 200
    assert client.get(f"{CONFIGMAPS}/c").status_code == 404


def test_what_an_owner_leaves_is_collected_through_generations(client, until):
    owner = client.post(CONFIGMAPS, json=config_map("owner")).json()
    child = config_map("child", ownerReferences=owned_by(owner | {"kind": "ConfigMap"}))
    child = client.post(CONFIGMAPS, json=child).json()
    client.post(CONFIGMAPS, json=config_map("grandchild", ownerReferences=owned_by(child)))
    client.delete(f"{CONFIGMAPS}/owner")
    until(lambda: client.get(CONFIGMAPS).json()["items"] == [])


def test_orphans_and_foreground_deletion(client, until):
    owner = client.post(CONFIGMAPS, json=config_map("owner")).json()
    client.post(CONFIGMAPS, json=config_map("child", ownerReferences=owned_by(owner)))
    options = {"propagationPolicy": "Orphan"}
    client.request("DELETE", f"{CONFIGMAPS}/owner", json=options)
    until(lambda: client.get(f"{CONFIGMAPS}/owner").status_code == 404)
    assert client.get(f"{CONFIGMAPS}/child").json()["metadata"]["ownerReferences"] == []
    owner = client.post(CONFIGMAPS, json=config_map("owner")).json()
    held = config_map("held", ownerReferences=owned_by(owner), finalizers=["example.dev/hold"])
    client.post(CONFIGMAPS, json=held)
    options = {"propagationPolicy": "Foreground"}
    client.request("DELETE", f"{CONFIGMAPS}/owner", json=options)
    until(lambda: "deletionTimestamp" in client.get(f"{CONFIGMAPS}/held").json()["metadata"])
    assert client.get(f"{CONFIGMAPS}/owner").status_code == 200
    client.patch(f"{CONFIGMAPS}/held", json={"metadata": {"finalizers": []}}, headers=MERGE)
    until(lambda: client.get(f"{CONFIGMAPS}/owner").status_code == 404)


def test_a_deleted_namespace_takes_its_objects_along(client, until):
    client.post("/api/v1/namespaces", json={"metadata": {"name": "n"}})
    client.post("/api/v1/namespaces/n/configmaps", json=config_map())
    client.delete("/api/v1/namespaces/n")
    until(lambda: client.get("/api/v1/namespaces/n").status_code == 404)
    assert client.get("/api/v1/namespaces/n/configmaps/c").status_code == 404


def test_delete_preconditions(client):
    client.post(CONFIGMAPS, json=config_map())
    body = {"preconditions": {"uid": "another"}}
    assert client.request("DELETE", f"{CONFIGMAPS}/c", json=body).status_code == 409


def test_statefulsets_and_deployments_refuse_what_kubernetes_refuses(client):
    template = {
        "metadata": {"labels": {"app": "x"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    spec = {"selector": {"matchLabels": {"app": "x"}}, "serviceName": "s", "template": template}
    body = {"metadata": {"name": "w"}, "spec": spec}
    path = "/apis/apps/v1/namespaces/default"
    response = client.post(f"{path}/statefulsets", json=body).json()
    assert response["spec"]["replicas"] == 1
    change = {"spec": {"serviceName": "other"}}
    assert client.patch(f"{path}/statefulsets/w", json=change, headers=MERGE).status_code == 422
    assert client.post(f"{path}/deployments", json=body).status_code == 201
    change = {"spec": {"selector": {"matchLabels": {"app": "y"}}}}
    assert client.patch(f"{path}/deployments/w", json=change, headers=MERGE).status_code == 422


def test_injected_faults_strike_as_often_as_told(api, client):
    api.inject("GET", "/configmaps", 500, times=1)
    assert client.get(CONFIGMAPS).status_code == 500
    assert client.get(CONFIGMAPS).status_code == 200
    api.inject("GET", "/configmaps", 0, times=1)
    with pytest.raises(httpx.RemoteProtocolError):
        client.get(CONFIGMAPS)
