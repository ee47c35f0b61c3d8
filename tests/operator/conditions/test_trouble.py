"""What is said of pods that do not serve: the reason, what Kubernetes said, and the remedy."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ullage_operator.conditions.conditions import degraded_condition, render
from ullage_operator.conditions.diagnosis import (
    diagnose,
    diagnose_pod,
    stable_in_s,
    unmounted_recheck_s,
)
from ullage_operator.conditions.events import clipped, transitions
from ullage_operator.conditions.pod_problem import ObjectWarning, PodProblem
from ullage_operator.conditions.pods import restart_count

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(name: str = "demo-large-0", **parts: Any) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": "4", "memory": "64Gi"}
    return {
        "metadata": {
            "name": name,
            "labels": {"serving.ullage.dev/pool": "large"},
            "creationTimestamp": ago(parts.pop("age", 3600)),
        },
        "spec": {
            "nodeName": "node-a",
            "volumes": [
                {"name": "cache", "persistentVolumeClaim": {"claimName": "cache-e-0"}},
                {"name": "tmp", "emptyDir": {}},
            ],
            "containers": [{"name": "engine", "resources": {"limits": limits}}],
        },
        "status": parts,
    }


def unplaced(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return pod(conditions=[condition | {"message": message}])


def container(**parts: Any) -> dict[str, Any]:
    return pod(containerStatuses=[{"name": "engine", "image": "example.org/engine:1", **parts}])


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return container(state={"waiting": {"reason": reason, "message": message}})


def crashed(restart_count: int, ready_for: float | None = None, **ended: Any) -> dict[str, Any]:
    last = {"terminated": {"exitCode": 1, **ended}}
    made = container(restartCount=restart_count, state={"running": {}}, lastState=last)
    if ready_for is not None:
        made["status"]["conditions"] = [
            {"type": "Ready", "status": "True", "lastTransitionTime": ago(ready_for)}
        ]
    return made


def found(given: dict[str, Any]) -> PodProblem:
    trouble = diagnose_pod(given, NOW)
    assert trouble is not None
    return trouble


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("0/3 nodes: 3 Insufficient nvidia.com/gpu.", "or lower spec.pools.large.gpus"),
        ("0/3 nodes: 3 Insufficient cpu.", "lower spec.pools.large.resources"),
        ("0/3 nodes: 3 Insufficient memory.", "set spec.pools.large.resources.requests.memory"),
        (
            "node(s) had untolerated taint {gpu: yes}",
            "spec.pools.large.podTemplate.spec.tolerations",
        ),
        (
            "didn't match Pod's node affinity/selector",
            "spec.pools.large.podTemplate.spec.nodeSelector",
        ),
        ('persistentvolumeclaim "models" not found', "create the claim"),
        ("pod has unbound immediate PersistentVolumeClaims", "kubectl describe pvc cache-e-0 says"),
        ("something new", "spec.pools.large's placement"),
    ],
)
def test_a_pod_that_fits_no_node_tells_its_gpus_the_scheduler_and_the_remedy(
    said: str, remedy: str
) -> None:
    trouble = found(unplaced(said))
    assert trouble.reason == "Unschedulable"
    assert trouble.message.startswith(f"asks for 4 nvidia.com/gpu and fits no node: {said}; ")
    assert remedy in trouble.message
    assert not trouble.blocks


def test_a_claim_that_gets_no_disk_in_time_is_named_and_other_errors_pass() -> None:
    error = 'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded'
    given = unplaced(error)
    [condition] = given["status"]["conditions"]
    condition["reason"] = "SchedulerError"
    assert found(given).message.startswith(f"{error}; kubectl describe pvc cache-e-0 says why")
    condition["message"] = "binding rejected: the object has been modified"
    assert diagnose_pod(given, NOW) is None


def test_a_pod_without_a_node_for_its_memory_tells_that_the_request_may_be_an_estimate() -> None:
    given = unplaced("0/3 nodes: 3 Insufficient memory.")
    given["spec"]["containers"][0]["resources"]["requests"] = {"memory": "143Gi"}
    assert "request 143Gi memory, which is an estimate if spec.pools" in found(given).message


def test_a_slice_of_a_gpu_is_named_as_the_pod_asks_for_it() -> None:
    given = unplaced("0/1 nodes: 1 Insufficient nvidia.com/mig-3g.40gb.")
    limits = given["spec"]["containers"][0]["resources"]["limits"]
    limits.pop("nvidia.com/gpu")
    limits["nvidia.com/mig-3g.40gb"] = "1"
    assert "asks for 1 nvidia.com/mig-3g.40gb" in found(given).message
    assert "many free nvidia.com/mig-3g.40gb" in found(given).message


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"])
def test_an_image_that_cannot_be_pulled_is_named(reason: str) -> None:
    trouble = found(waiting(reason, "not found"))
    assert trouble.reason == reason
    assert trouble.message.startswith("image example.org/engine:1 cannot be pulled: not found; ")
    assert "spec.imagePullSecrets" in trouble.message


def test_other_reasons_of_the_kubelet_come_with_a_remedy() -> None:
    assert "correct spec.image" in found(waiting("InvalidImageName")).message
    missing = found(waiting("CreateContainerConfigError", 'secret "keys" not found'))
    assert missing.message.startswith('secret "keys" not found; create the Secret')
    slow = found(waiting("CreateContainerError", "context deadline exceeded"))
    assert slow.message.startswith("context deadline exceeded; the node is overloaded")


def test_a_crash_loop_tells_how_often_the_exit_code_and_the_last_words() -> None:
    last = {"terminated": {"exitCode": 1, "message": "error: workers kept dying\n"}}
    given = container(
        restartCount=7, state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=last
    )
    trouble = found(given)
    assert trouble.blocks
    assert trouble.message == (
        "engine has been restarted 7 times, last after it ended with exit code 1: "
        "error: workers kept dying"
    )


def test_a_start_that_fails_its_proof_again_and_again_is_told_by_condition_and_event() -> None:
    """Healing leaves a pod alone that still starts, so its engine ends with the reason."""
    reason = (
        "3 starts in a row failed their proof, the last one: this start computes otherwise than "
        "the verified start of /cache/1f.proof: cos has other bits in memory; if every start ends "
        "like this, look for faulty memory or a faulty processor, or delete the file where the "
        "first start may have been the wrong one"
    )
    log = f'{{"level": "error", "message": "a worker failed"}}\nerror: {reason}\n'
    last = {"terminated": {"exitCode": 1, "message": log, "finishedAt": ago(3)}}
    paused = {"waiting": {"reason": "CrashLoopBackOff"}}
    before = render([degraded_condition([])], [], 1, NOW)

    for times, state in ((1, paused), (2, {"running": {}}), (3, paused)):
        loops = container(restartCount=times, state=state, lastState=last)
        condition = degraded_condition(diagnose([loops], NOW))
        assert (condition.holds, condition.reason) == (True, "CrashLoopBackOff")
        assert condition.message.endswith(f"with exit code 1: error: {reason}")

        [event] = transitions(before, render([condition], before, 1, NOW))
        assert (event.reason, event.warning) == ("CrashLoopBackOff", True)
        assert clipped(event.message).endswith(reason)


LOG = '{"level": "info"}\nerror: /m/model.gguf: a Git LFS pointer; run git lfs pull\n'


@pytest.mark.parametrize("state", ["terminated", "running", "waiting"])
def test_an_engine_that_no_start_can_help_says_so_after_its_first(state: str) -> None:
    ended = {"terminated": {"exitCode": 2, "message": LOG, "finishedAt": ago(3)}}
    states = {
        "terminated": ended,
        "running": {"running": {}},
        "waiting": {"waiting": {"reason": "CrashLoopBackOff"}},
    }
    given = container(restartCount=0, lastState=ended, state=states[state])
    trouble = found(given)
    assert (trouble.reason, trouble.blocks) == ("CannotStart", True)
    assert trouble.message == (
        "engine cannot start: error: /m/model.gguf: a Git LFS pointer; run git lfs pull"
    )
    given["status"]["containerStatuses"][0]["state"] = {"running": {}}
    given["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    assert diagnose_pod(given, NOW) is None


def test_other_containers_and_other_ends_may_be_helped_by_a_start() -> None:
    assert diagnose_pod(crashed(1), NOW) is None
    assert found(crashed(1, exitCode=2)).message.startswith("engine cannot start: see kubectl logs")
    assert diagnose_pod(crashed(1, exitCode=2, finishedAt=ago(600)), NOW) is None
    beside = crashed(1, exitCode=2)
    beside["status"]["containerStatuses"][0]["name"] = "sidecar"
    assert diagnose_pod(beside, NOW) is None


def test_a_crash_without_words_points_to_the_log() -> None:
    assert found(crashed(3)).message.endswith("see kubectl logs --previous demo-large-0")


def test_a_container_that_the_kernel_killed_for_memory_says_which_limit_to_raise() -> None:
    trouble = found(crashed(3, reason="OOMKilled", exitCode=137))
    assert "spec.pools.large.resources.limits.memory" in trouble.message


@pytest.mark.parametrize(
    ("given", "loops"),
    [
        (crashed(2), True),
        (crashed(2, ready_for=5), True),
        (crashed(2, ready_for=61), False),
        (crashed(1, ready_for=5), False),
        (crashed(4, exitCode=0), False),
        (crashed(2, finishedAt=ago(599)), True),
        (crashed(9, finishedAt=ago(600)), False),
    ],
    ids=["now", "ready for a moment", "stable", "one crash", "clean ends", "lately", "long ago"],
)
def test_a_loop_is_one_until_the_pod_has_been_ready_for_a_minute(
    given: dict[str, Any], loops: bool
) -> None:
    assert (diagnose_pod(given, NOW) is not None) is loops


def test_when_to_look_again_at_a_pod_that_recovers() -> None:
    assert stable_in_s(crashed(2, ready_for=5), NOW) == 55.0
    assert stable_in_s(crashed(2), NOW) is None
    assert stable_in_s(crashed(2, ready_for=100), NOW) is None


def test_an_evicted_pod_and_one_that_cannot_be_made() -> None:
    evicted = found(pod(phase="Failed", reason="Evicted", message="low on memory"))
    assert (evicted.reason, evicted.message) == ("Evicted", "low on memory; it is being replaced")
    creating = waiting("ContainerCreating")
    assert "a volume cannot be mounted" in found(creating).message
    creating["metadata"]["creationTimestamp"] = ago(60)
    assert diagnose_pod(creating, NOW) is None


def unmounted(age: float, **conditions: str) -> dict[str, Any]:
    made = waiting("ContainerCreating")
    made["metadata"] |= {"creationTimestamp": ago(age), "uid": "uid-7"}
    given = {"PodReadyToStartContainers": "False"} | conditions
    made["status"]["conditions"] = [{"type": t, "status": s} for t, s in given.items()]
    made["spec"]["volumes"] = [{"name": "keys", "secret": {"secretName": "team-keys"}}]
    return made


def test_a_missing_secret_is_named_before_a_minute_is_over() -> None:
    note = 'MountVolume.SetUp failed for volume "keys" : secret "team-keys" not found'
    warnings = {"uid-7": ObjectWarning("FailedMount", note)}
    [trouble] = diagnose([unmounted(20)], NOW, warnings=warnings)
    assert trouble.reason == "FailedMount"
    assert trouble.message.startswith(f"{note}; create the missing object")
    [unread] = diagnose([unmounted(20)], NOW)
    assert "it mounts Secret team-keys" in unread.message


def test_a_pod_that_pulls_its_image_or_was_just_made_is_in_no_trouble() -> None:
    assert diagnose([unmounted(19)], NOW) == []
    assert unmounted_recheck_s(unmounted(19), NOW) == 1.0
    assert unmounted_recheck_s(unmounted(50), NOW) == 30.0
    pulling = unmounted(300, PodReadyToStartContainers="True")
    assert diagnose([pulling], NOW) == []
    assert unmounted_recheck_s(pulling, NOW) is None


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_router_that_ended_for_good_is_no_trouble_for_its_replicaset_keeps_it(phase: str) -> None:
    gone = crashed(2)
    gone["metadata"]["labels"] = {"app.kubernetes.io/component": "router"}
    lost = frozenset({"node-a"})
    assert [each.reason for each in diagnose([gone], NOW)] == ["CrashLoopBackOff"]
    gone["status"] |= {"phase": phase, "reason": "Evicted", "message": "low on memory"}
    assert diagnose([gone], NOW) == diagnose([gone], NOW, lost) == []
    gone["metadata"]["labels"]["app.kubernetes.io/component"] = "engine"
    assert len(diagnose([gone], NOW)) == 1


def test_a_pod_on_a_lost_node_says_so_even_while_it_ends() -> None:
    ending = pod()
    ending["metadata"]["deletionTimestamp"] = ago(10)
    assert diagnose([ending], NOW) == []
    [trouble] = diagnose([ending], NOW, frozenset({"node-a"}))
    assert trouble.reason == "NodeLost"
    assert "node node-a does not answer" in trouble.message


def test_a_pod_that_serves_starts_or_ends_is_in_no_trouble() -> None:
    running = container(restartCount=0, state={"running": {}}, started=True)
    assert diagnose_pod(running, NOW) is None
    assert diagnose_pod(pod(), NOW) is None
    ending = waiting("CrashLoopBackOff")
    ending["metadata"]["deletionTimestamp"] = ago(1)
    assert diagnose_pod(ending, NOW) is None


def test_what_blocks_comes_first_then_names() -> None:
    given = [unplaced("x") | {"metadata": {"name": "a"}}, crashed(3), waiting("ErrImagePull")]
    assert [trouble.reason for trouble in diagnose(given, NOW)] == [
        "CrashLoopBackOff",
        "Unschedulable",
        "ErrImagePull",
    ]


def test_restarts_of_all_containers_are_summed_up() -> None:
    both = pod(
        containerStatuses=[{"restartCount": 2}, {"restartCount": 3}],
        initContainerStatuses=[{"restartCount": 1}],
    )
    assert restart_count(both) == 6
