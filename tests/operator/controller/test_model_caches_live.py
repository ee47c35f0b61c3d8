"""A Job warms a shared claim, with the real operator; tests play the controller of Jobs."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from ullage_kubeapi.trial import until

MODEL = {"source": "hf://org/m", "name": "m"}
POOLS = {"single": {"modelCache": {"claimName": "weights", "warm": True}}}
PROGRESS = b'{"state": "fetching", "bytes": 7, "total_bytes": 9, "revision": "", "error": ""}'


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/progress" else 404)
        self.send_header("Content-Length", str(len(PROGRESS)))
        self.end_headers()
        self.wfile.write(PROGRESS)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a pod that fetches a model."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def jobs(world):
    return world.get(world.path("jobs", "batch")).get("items", [])


def engines(world):
    return world.get(f"{world.path('statefulsets')}/s-single")


def cache(world):
    pools = world.service().get("status", {}).get("pools", {})
    return pools.get("single", {}).get("modelCache", {})


def run_pod(world, job, port):
    """Make the pod that the Job's controller would make, which runs and answers at a port."""
    meta = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    container = {"name": "engine", "image": "x", "ports": [{"name": "probe"}]}
    container["ports"][0]["containerPort"] = port
    labels = job["spec"]["template"]["metadata"]["labels"]
    pods = world.path("pods", "")
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{meta['name']}-x",
            "labels": labels,
            "ownerReferences": [owner | {"controller": True}],
        },
        "spec": {"containers": [container]},
    }
    made = world.client.post(pods, json=body)
    assert made.status_code == 201, made.text
    status = {"phase": "Running", "podIP": "127.0.0.1"}
    told = world.patch(f"{pods}/{meta['name']}-x/status", {"status": status})
    assert told.status_code == 200, told.text


def end(world, job, condition, **fields):
    ended = {"type": condition, "status": "True", **fields}
    path = f"{world.path('jobs', 'batch')}/{job['metadata']['name']}/status"
    done = world.patch(path, {"status": {"conditions": [ended]}})
    assert done.status_code == 200, done.text


def test_engines_begin_when_the_job_has_filled_the_claim(world, played, operator, port):
    assert world.create(model=MODEL, pools=POOLS).status_code == 201
    [job] = until(lambda: jobs(world), "the Job is made")
    until(lambda: world.condition("ModelCacheWarm").get("reason") == "Pending", "it is said")
    assert not engines(world)

    run_pod(world, job, port)
    until(lambda: cache(world).get("totalBytes") == 9, "the status says how far it is")
    assert (cache(world)["phase"], cache(world)["bytes"]) == ("Fetching", 7)
    assert not engines(world)

    end(world, job, "Complete")
    until(lambda: engines(world), "engines are made")
    until(lambda: cache(world).get("phase") == "Fetched", "the status remembers it")
    assert world.condition("ModelCacheWarm")["status"] == "True"

    path = f"{world.path('jobs', 'batch')}/{job['metadata']['name']}"
    assert world.client.delete(path).status_code == 200  # as its time to live does
    before = operator.reconciled()
    until(lambda: operator.reconciled() > before + 2, "the operator has looked again")
    assert jobs(world) == []


def test_a_job_that_fails_holds_no_engine_and_goes_with_the_field(world, played, operator):
    assert world.create(model=MODEL, pools=POOLS).status_code == 201
    [job] = until(lambda: jobs(world), "the Job is made")
    end(world, job, "Failed", reason="BackoffLimitExceeded", message="it failed four times")
    until(lambda: engines(world), "engines are made")
    until(lambda: world.condition("ModelCacheWarm").get("reason") == "FetchFailed", "it is said")
    assert "it failed four times" in world.condition("ModelCacheWarm")["message"]

    off = {"spec": {"pools": {"single": {"modelCache": {"warm": False}}}}}
    assert world.patch(f"{world.services}/s", off).status_code == 200
    until(lambda: not jobs(world), "the Job goes with the field")
    until(lambda: not world.condition("ModelCacheWarm"), "and so does the condition")


def test_what_cannot_be_warmed_is_refused_by_name(world):
    refused = world.create(model=MODEL, pools={"single": {"modelCache": {"warm": True}}})
    assert refused.status_code == 422
    assert "name it as claimName" in refused.text
    refused = world.create(pools=POOLS)
    assert refused.status_code == 422
    assert "modelCache.warm fetches only models of hf:// and s3://" in refused.text
