"""What waits for a model that a Job fetches into a shared claim, and what is said of the Job."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.conditions.pod_problem import ObjectWarning
from ullage_operator.planning.model_caches import FetchObservation, parse_progress
from ullage_operator.planning.observed import ObjectKey, Observed, key_of
from ullage_operator.planning.plan import ServicePlan, plan
from ullage_operator.planning.status import warned_objects

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SEEN = Observed(now=NOW, fetches=FetchObservation(sees_jobs=True))
CACHE = {"claimName": "weights", "warm": True}


def service(source: str = "hf://org/m", **cache: Any) -> Service:
    return parse(
        {
            "apiVersion": "serving.ullage.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": {"name": "s", "namespace": "n", "uid": "u", "generation": 1},
            "spec": {
                "model": {"source": source, "name": "m"},
                "pools": {"single": {"modelCache": CACHE | cache}},
            },
        }
    )


def planned(observed: Observed, of: Service | None = None) -> ServicePlan:
    return plan(of or service(), observed, Settings())


def kinds(made: ServicePlan) -> set[str]:
    return {item["kind"] for item in made.apply}


def condition(made: ServicePlan, kind: str = "ModelCacheWarm") -> dict[str, Any]:
    found = (each for each in made.status["conditions"] if each["type"] == kind)
    return next(found, {})


def cache(made: ServicePlan) -> dict[str, Any]:
    return dict(made.status["pools"]["single"].get("modelCache", {}))


def after(observed: Observed, made: ServicePlan, **changes: Any) -> Observed:
    """Return what is seen once a plan is carried out: its objects, made by the API server."""
    objects = dict(observed.objects)
    for item in made.apply:
        key = key_of(item)
        meta = item["metadata"] | {"uid": f"uid-of-{key.name}"}
        objects[key] = objects.get(key, {}) | item | {"metadata": meta}
    for item in made.delete:
        objects.pop(key_of(item), None)
    return replace(observed, objects=objects, status=made.status, **changes)


def with_job(observed: Observed, outcome: str, **fields: str) -> Observed:
    """Return what is seen once the Job has a condition."""
    objects = dict(observed.objects)
    [key] = [key for key in objects if key.kind == "Job"]
    ended = {"type": outcome, "status": "True", **fields}
    objects[key] = objects[key] | {"status": {"conditions": [ended]}}
    return replace(observed, objects=objects)


def pod(observed: Observed, phase: str, **status: Any) -> dict[str, Any]:
    [key] = [key for key in observed.objects if key.kind == "Job"]
    owner = {"kind": "Job", "name": key.name, "uid": f"uid-of-{key.name}", "controller": True}
    labels = {"app.kubernetes.io/component": "fetcher", "serving.ullage.dev/pool": "single"}
    meta = {"name": f"{key.name}-x", "ownerReferences": [owner], "labels": labels}
    return {"metadata": meta, "status": {"phase": phase, **status}}


def with_pod(observed: Observed, item: dict[str, Any], **progress: Any) -> Observed:
    [key] = [key for key in observed.objects if key.kind == "Job"]
    told = {key.name: progress} if progress else {}
    return replace(observed, fetches=FetchObservation(sees_jobs=True, pods=[item], progress=told))


def test_new_engines_wait_until_the_model_is_there() -> None:
    first = planned(SEEN)
    assert "Job" in kinds(first)
    assert "StatefulSet" not in kinds(first)
    assert condition(first, "Progressing")["reason"] == "ModelFetching"
    assert cache(first)["phase"] == "Pending"

    seen = after(SEEN, first)
    running = with_pod(seen, pod(seen, "Running"), bytes=3 << 30, total_bytes=4 << 30)
    second = planned(running)
    assert "StatefulSet" not in kinds(second)
    expected = {"phase": "Fetching", "bytes": 3 << 30, "totalBytes": 4 << 30}
    assert cache(second).items() >= expected.items()
    assert "3.0 of 4.0 GiB" in condition(second)["message"]
    assert second.recheck_s is not None
    assert second.recheck_s <= 10
    small = with_pod(seen, pod(seen, "Running"), bytes=3 << 20, total_bytes=20 << 20)
    assert "3.0 of 20.0 MiB" in condition(planned(small))["message"]

    third = planned(with_job(after(running, second), "Complete"))
    assert "StatefulSet" in kinds(third)
    assert "Job" not in kinds(third)
    assert condition(third)["status"] == "True"
    assert [item["kind"] for item in third.delete] == []


def of_bucket(env: Sequence[dict[str, Any]] = (), **s3: str) -> Service:
    container = {"name": "engine", "env": list(env)}
    return parse(
        {
            "apiVersion": "serving.ullage.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": {"name": "s", "namespace": "n", "uid": "u", "generation": 1},
            "spec": {
                "model": {"source": "s3://models/m", "name": "m"},
                "s3": {"secretName": "keys", **s3},
                "pools": {
                    "single": {
                        "modelCache": CACHE,
                        "podTemplate": {"spec": {"containers": [container]}},
                    }
                },
            },
        }
    )


def from_secret(key: str) -> dict[str, Any]:
    reference = {"secretKeyRef": {"name": "store", "key": key}}
    return {"name": "AWS_ENDPOINT_URL", "valueFrom": reference}


@pytest.mark.parametrize(
    ("before", "later"),
    [
        (of_bucket(endpoint="http://a:9000"), of_bucket(endpoint="http://b:9000")),
        (of_bucket(), of_bucket(endpoint="http://b:9000")),
        (of_bucket(endpoint="http://a:9000"), of_bucket()),
        (of_bucket(region="eu-west-1"), of_bucket(region="eu-north-1")),
        (of_bucket([from_secret("a")]), of_bucket([from_secret("b")])),
        (
            of_bucket(endpoint="http://a:9000"),
            of_bucket(
                [{"name": "AWS_ENDPOINT_URL_S3", "value": "http://b:9000"}],
                endpoint="http://a:9000",
            ),
        ),
    ],
)
def test_a_cache_is_not_warm_for_another_store(before: Service, later: Service) -> None:
    filled = with_job(after(SEEN, planned(SEEN, before)), "Complete")
    warm = planned(filled, before)
    assert condition(warm)["status"] == "True"

    for seen in (filled, after(filled, warm)):
        moved = planned(seen, later)
        assert condition(moved)["status"] == "False"
        [job] = [item for item in moved.apply if item["kind"] == "Job"]
        assert job["metadata"]["name"] not in {key.name for key in filled.objects}


@pytest.mark.parametrize(
    "later",
    [
        of_bucket(endpoint="http://a:9000/", region="eu-west-1"),
        of_bucket(
            [{"name": "AWS_ENDPOINT_URL", "value": "http://b:9000"}], endpoint="http://a:9000"
        ),
    ],
)
def test_a_cache_stays_warm_for_the_same_store(later: Service) -> None:
    before = of_bucket(endpoint="http://a:9000")
    filled = with_job(after(SEEN, planned(SEEN, before)), "Complete")
    warm = after(filled, planned(filled, before))
    assert condition(planned(warm, later))["status"] == "True"


def test_a_job_reads_a_bucket_as_the_engines_do() -> None:
    manifest = {
        "apiVersion": "serving.ullage.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "s", "namespace": "n", "uid": "u", "generation": 1},
        "spec": {
            "model": {"source": "s3://models/m", "name": "m"},
            "s3": {"endpoint": "http://minio:9000", "secretName": "keys"},
            "pools": {"single": {"modelCache": CACHE}},
        },
    }
    first = planned(SEEN, parse(manifest))
    [job] = [item for item in first.apply if item["kind"] == "Job"]
    engines = planned(with_job(after(SEEN, first), "Complete"), parse(manifest))
    [workload] = [item for item in engines.apply if item["kind"] == "StatefulSet"]

    def env(item: dict[str, Any]) -> list[dict[str, Any]]:
        listed = item["spec"]["template"]["spec"]["containers"][0]["env"]
        return [each for each in listed if "AWS" in each["name"] or "S3" in each["name"]]

    assert [each["name"] for each in env(job)] == [
        "ULLAGE_S3_CACHE",
        "AWS_ENDPOINT_URL_S3",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
    ]
    assert env(job) == env(workload)
    assert cache(engines)["source"] == "s3://models/m"


def test_what_was_fetched_is_remembered_when_its_job_is_gone() -> None:
    seen = after(SEEN, planned(SEEN))
    fetched = planned(with_job(seen, "Complete"))
    gone = after(seen, fetched)
    gone = replace(gone, objects={k: v for k, v in gone.objects.items() if k.kind != "Job"})
    again = planned(gone)
    assert "Job" not in kinds(again)
    assert cache(again)["phase"] == "Fetched"

    other = planned(gone, service("hf://org/other"))
    assert "Job" in kinds(other)
    assert cache(other)["phase"] == "Pending"


def test_where_the_job_fails_engines_start_as_ever_and_the_cause_is_said() -> None:
    seen = after(SEEN, planned(SEEN))
    ended = {"terminated": {"exitCode": 2, "message": '{"error": "no such model; check it"}'}}
    failed = pod(seen, "Failed", containerStatuses=[{"name": "engine", "state": ended}])
    made = planned(with_job(with_pod(seen, failed), "Failed", reason="PodFailurePolicy"))
    assert "StatefulSet" in kinds(made)
    told = condition(made)
    assert (told["status"], told["reason"]) == ("False", "FetchFailed")
    assert "no such model; check it" in told["message"]
    assert "delete Job s-fetch-" in told["message"]
    assert cache(made)["phase"] == "Failed"


def test_a_job_that_ran_out_of_time_says_so() -> None:
    seen = after(SEEN, planned(SEEN))
    late = with_job(seen, "Failed", reason="DeadlineExceeded", message="longer than its deadline")
    assert "DeadlineExceeded: longer than its deadline" in condition(planned(late))["message"]


def test_a_pod_that_does_not_start_says_why() -> None:
    seen = after(SEEN, planned(SEEN))
    unplaced = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": 'persistentvolumeclaim "weights" not found',
    }
    stuck = pod(seen, "Pending", conditions=[unplaced])
    told = condition(planned(with_pod(seen, stuck)))
    assert 'persistentvolumeclaim "weights" not found' in told["message"]
    assert told["reason"] == "Pending"


def test_a_job_whose_pods_are_refused_says_why() -> None:
    first = planned(SEEN)
    seen = after(SEEN, first)
    [key] = [key for key in seen.objects if key.kind == "Job"]
    job = seen.objects[key]
    made_at = {"creationTimestamp": (NOW - timedelta(seconds=60)).isoformat()}
    seen.objects[key] = job | {"metadata": job["metadata"] | made_at}

    assert f"uid-of-{key.name}" in warned_objects(service(), seen)
    told = condition(planned(seen))["message"]
    assert told.endswith(f"may refuse them; kubectl describe job {key.name}")

    quota = 'pods "s-fetch-x" is forbidden: exceeded quota: few'
    events = {f"uid-of-{key.name}": ObjectWarning("FailedCreate", quota)}
    second = planned(replace(seen, warnings=events))
    assert condition(second)["message"].endswith(f"Job {key.name} has no pods: {quota}")
    assert quota in condition(second, "Progressing")["message"]

    begun = with_pod(replace(seen, warnings=events), pod(seen, "Running"))
    assert "quota" not in condition(planned(begun))["message"]
    assert warned_objects(service(), begun) == []


def test_nothing_waits_for_a_job_that_cannot_be_made() -> None:
    first = planned(SEEN)
    denied = replace(SEEN, status=first.status)  # as where the API server refuses the Job
    assert "StatefulSet" in kinds(planned(denied))
    assert "its Job does not exist" in condition(planned(denied))["message"]


def test_nothing_waits_where_jobs_cannot_be_seen() -> None:
    assert "StatefulSet" in kinds(planned(Observed(now=NOW)))


def served() -> Observed:
    """Return a service whose engines serve with a cache that nobody warms."""
    cold = service("hf://org/old", warm=False)
    seen = after(SEEN, planned(SEEN, cold))
    key = ObjectKey("StatefulSet", "s-single")
    objects = dict(seen.objects)
    ready = {"replicas": 1, "readyReplicas": 1, "updatedReplicas": 1}
    objects[key] = objects[key] | {"status": ready}
    return replace(seen, objects=objects)


def test_engines_that_serve_are_not_touched_when_warming_is_asked_for() -> None:
    seen = served()
    made = planned(seen, service("hf://org/old"))
    assert "Job" in kinds(made)
    before = seen.objects[ObjectKey("StatefulSet", "s-single")]["spec"]
    [stateful_set] = [item for item in made.apply if item["kind"] == "StatefulSet"]
    assert stateful_set["spec"] == before
    assert made.rollout.progress.stage == "Stable"


def test_a_canary_of_another_model_begins_once_that_is_there() -> None:
    target = service("hf://org/new")
    first = planned(served(), target)
    names = {key_of(item).name for item in first.apply}
    assert "s-single-next" not in names
    told = condition(first, "Progressing")
    assert told["reason"] == "ModelFetching"
    assert "hf://org/new" in told["message"]

    seen = after(served(), first)
    second = planned(with_job(seen, "Complete"), target)
    assert "s-single-next" in {key_of(item).name for item in second.apply}


@pytest.mark.parametrize("text", ["", "[1]", "5", "null", "no json", b"\xff"])
def test_what_is_no_report_says_nothing(text: str | bytes) -> None:
    assert parse_progress(text) == {}


@given(
    st.dictionaries(
        st.sampled_from(["bytes", "total_bytes", "error"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none()),
    )
)
def test_whatever_a_pod_answers_the_status_has_numbers_of_bytes(answer: dict[str, Any]) -> None:
    seen = after(SEEN, planned(SEEN))
    told = cache(planned(with_pod(seen, pod(seen, "Running"), **answer)))
    for name in ("bytes", "totalBytes"):
        assert type(told[name]) is int
        assert told[name] >= 0
