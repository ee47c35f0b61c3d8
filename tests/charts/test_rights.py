"""The chart's roles against what the operator really asks: every request of a whole life.

`test_chart.py` compares the roles with the tables in the code; this one with the API server's log.
"""

import re
from collections import Counter
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from ullage_kubeapi.server import running
from ullage_kubeapi.trial import CRDS, Operator, World, quiet, read_crd, until

POOL = {"gpus": 1, "parallelism": {"tensor": 1, "pipeline": 1}}


EVERYBODYS = ("selfsubjectaccessreviews",)
"""By the cluster role system:basic-user."""


def right(method, path_and_query):
    """(group, resource, verb) that a request needs; None for what everybody may ask."""
    path = urlsplit(path_and_query).path
    query = parse_qs(urlsplit(path_and_query).query)
    found = re.match(r"/(?:api|apis/([^/]+))/v[^/]*/(?:namespaces/[^/]+/)?(.+)$", path)
    if found is None or found[2] in EVERYBODYS:
        return None
    resource, _, rest = found[2].partition("/")
    name, _, subresource = rest.partition("/")
    read = "get" if name else "watch" if "watch" in query else "list"
    collection = {"DELETE": "deletecollection"}.get(method)
    verbs = {"GET": read, "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    verb = verbs[method] if name or not collection else collection
    return found[1] or "", f"{resource}/{subresource}" if subresource else resource, verb


def asked(api, own):
    """Rights that everybody but the test itself made use of."""
    others = Counter((method, path) for method, path, _ in list(api.requests)) - own
    return {needed for method, path in others if (needed := right(method, path))}


def granted(objects):
    roles = [
        obj
        for obj in objects
        if obj["kind"] in ("Role", "ClusterRole") and "aggregate-to" not in str(obj["metadata"])
    ]
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def live_and_let_die(world, client, everywhere, tmp_path):
    """A service is made, changed, drifts, loses a pool and goes, all under one operator."""
    operator = Operator(world, tmp_path / "operator.log", everywhere)
    try:
        assert world.create(pools={"large": POOL}).status_code == 201
        until(lambda: world.condition("Ready"), "the service has a status", 60)
        until(lambda: world.get(f"{world.path('statefulsets')}/s-large"), "a pool is made", 60)
        router = f"{world.path('deployments')}/s-router"
        assert world.patch(router, {"spec": {"replicas": 7}}).status_code == 200
        until(lambda: world.get(router)["spec"]["replicas"] != 7, "drift is repaired", 60)
        assert world.patch(f"{world.services}/s", {"spec": {"pools": {"large": None}}})
        gone = f"{world.path('statefulsets')}/s-large"
        until(lambda: not world.get(gone), "the pool is deleted", 60)
        assert client.delete(f"{world.services}/s").status_code == 200
        until(lambda: not world.owned(), "what it owned is collected", 60)
        until(lambda: quiet(world.api), "nothing is written any more", 60)
        world.api.drop_watches()  # so that they are in the log
    finally:
        assert operator.stop() == 0


@pytest.mark.parametrize(
    ("everywhere", "values"), [(True, ()), (False, ("watch.namespaces={default}",))]
)
def test_the_operator_asks_nothing_that_the_chart_does_not_grant(
    render, tmp_path, everywhere, values
):
    own = Counter()

    def note(request):
        own[request.method, request.url.raw_path.decode()] += 1

    hooks = {"request": [note]}
    with (
        running(bookmark_interval=1.0) as api,
        httpx.Client(base_url=api.url, verify=False, timeout=60, event_hooks=hooks) as client,
    ):
        assert client.post(CRDS, json=read_crd()).status_code == 201
        world = World(client, "default", api.kubeconfig(tmp_path), api)
        until(lambda: client.get(world.services).status_code == 200, "the definition is served")
        live_and_let_die(world, client, everywhere, tmp_path)
        used = asked(api, own)
    allowed = granted(render(*values))
    assert used <= allowed, f"not granted: {sorted(used - allowed)}"
    needed = {
        ("serving.ullage.dev", "llmservices/status", "patch"),
        ("serving.ullage.dev", "llmservices", "watch"),
        ("apps", "statefulsets", "delete"),
        ("apps", "deployments", "patch"),
    }
    assert needed <= used, f"the log lacks {sorted(needed - used)}"
