"""A Gateway's route comes, says how it fares and goes, with the real operator."""

from ullage_kubeapi.trial import CRDS, converged, until

GROUP = "gateway.networking.k8s.io"
GATEWAY = {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]}


def route_definition():
    """Return the definition of HTTPRoute as far as an API server needs it to serve the kind."""
    names = {"kind": "HTTPRoute", "listKind": "HTTPRouteList"}
    names |= {"plural": "httproutes", "singular": "httproute"}
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}}
    sections = {"spec": anything, "status": anything}
    version["schema"] = {"openAPIV3Schema": {"type": "object", "properties": sections}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"httproutes.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def test_a_route_comes_is_judged_and_goes(world, played, start):
    path = f"{world.path('httproutes', GROUP)}/s-router"
    assert world.client.post(CRDS, json=route_definition()).status_code == 201
    until(lambda: world.client.get(path.rpartition("/")[0]).status_code == 200, "it is served")
    start()
    assert world.create(router={"gateway": GATEWAY}).status_code == 201
    until(lambda: world.get(path), "the route is made")
    until(lambda: world.condition("RouteAccepted").get("reason") == "Pending", "it waits")

    accepted = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": ""}
    answer = {"parentRef": {"name": "public"}, "conditions": [accepted]}
    judged = world.patch(f"{path}/status", {"status": {"parents": [answer]}})
    assert judged.status_code == 200, judged.text
    until(lambda: world.condition("RouteAccepted").get("status") == "True", "it is accepted")

    gone = {"spec": {"router": {"gateway": None}}}
    assert world.patch(f"{world.services}/s", gone).status_code == 200
    until(lambda: not world.get(path), "the route goes with the field")
    until(lambda: not world.condition("RouteAccepted"), "and so does the condition")


def test_without_the_kind_a_service_is_served_and_says_what_is_missing(world, operator, played):
    world.create(router={"gateway": GATEWAY, "service": {"type": "NodePort"}})
    owned = converged(world)
    assert world.condition("RouteAccepted")["reason"] == "KindsAbsent"
    assert owned["services", "s-router"]["spec"]["type"] == "NodePort"

    change = {"spec": {"router": {"service": {"type": "ClusterIP"}}}}
    world.patch(f"{world.services}/s", change)
    service = f"{world.path('services', '')}/s-router"
    until(lambda: world.get(service)["spec"]["type"] == "ClusterIP", "the type goes back")
