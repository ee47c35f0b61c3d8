"""spec.memory.tiers: what engines read of it, the volumes and memory it takes, and who may reach
whom."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import msgspec
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.config.engine import (
    EngineConfig,
    FileTierSection,
    HostTierSection,
    MemoryLimits,
    RemoteTierSection,
    TiersSection,
    default_host_tier,
)
from ullage_common.wire.channels import open_channel
from ullage_common.wire.servers import Health, bind, new_server
from ullage_common.wire.tls import Certificates
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.overlay import lies_in
from ullage_operator.api.parsing import parse_stored
from ullage_operator.api.quantities import parse_bytes
from ullage_operator.api.schema import complete, load_schema
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.resources import tiers_line
from ullage_operator.planning.plan import ServicePlan

if TYPE_CHECKING:
    Authority = Any

MakePlan = Callable[..., ServicePlan]
ALL = {"host": {"size": "1Gi"}, "remote": {"deadline": "500ms"}, "file": {"size": "4Gi"}}


def find(plan: ServicePlan, kind: str, name: str) -> dict[str, Any]:
    [found] = [o for o in plan.apply if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def engine(plan: ServicePlan, pool: str = "single") -> EngineConfig:
    text = find(plan, "ConfigMap", f"demo-{pool}")["data"]["engine.yaml"]
    return msgspec.convert(yaml.safe_load(text), EngineConfig)


def pod(plan: ServicePlan, name: str = "demo-single") -> dict[str, Any]:
    spec: dict[str, Any] = find(plan, "StatefulSet", name)["spec"]["template"]["spec"]
    return spec


def kv_volume(plan: ServicePlan, name: str = "demo-single") -> tuple[str, dict[str, Any]] | None:
    """Where the volume of the file tier is mounted, and its source; None where there is none."""
    spec = pod(plan, name)
    volumes = {each.pop("name"): each for each in spec["volumes"]}
    mounts = {each["name"]: each for each in spec["containers"][0]["volumeMounts"]}
    assert ("kv" in volumes) == ("kv" in mounts)
    if "kv" not in volumes:
        return None
    assert "readOnly" not in mounts["kv"]
    return mounts["kv"]["mountPath"], volumes["kv"]


def requested_bytes(plan: ServicePlan) -> int:
    resources = pod(plan)["containers"][0]["resources"]
    return parse_bytes(resources["requests"]["memory"])


def with_mount(mount: dict[str, Any]) -> dict[str, Any]:
    template = {
        "volumes": [{"name": "disk", "persistentVolumeClaim": {"claimName": "disk"}}],
        "containers": [{"name": "engine", "volumeMounts": [{"name": "disk"} | mount]}],
    }
    return {"podTemplate": {"spec": template}}


def test_a_host_tier_is_there_by_default_and_nothing_below(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert engine(plan).memory.tiers == TiersSection(host=HostTierSection(size=None))
    assert kv_volume(plan) is None
    off = engine(make_plan(memory={"tiers": {"host": {"size": 0}}}))
    assert off.memory.tiers.host.size == 0


def test_engines_read_their_tiers(make_plan: MakePlan) -> None:
    plan = make_plan(memory={"tiers": ALL, "maxKV": "2Gi"}, pools={"large": {}})
    for item in plan.apply:
        kubernetes_validate.validate(item, "1.35", strict=True)
    for pool in ("single", "large"):
        memory = engine(plan, pool).memory
        assert memory.max_kv == 2 << 30
        assert memory.tiers == TiersSection(
            host=HostTierSection(size=1 << 30),
            remote=RemoteTierSection(peers=(f"demo-{pool}:9000",), deadline=0.5),
            file=FileTierSection(path="/var/lib/ullage/kv", size=4 << 30),
        )
        [port] = find(plan, "Service", f"demo-{pool}")["spec"]["ports"]
        assert port["port"] == 9000


def test_a_pools_tiers_take_the_place_of_all_of_the_services(make_plan: MakePlan) -> None:
    own = {"remote": {"copy": True}}
    plan = make_plan(memory={"tiers": ALL}, pools={"large": {"memory": {"tiers": own}}})
    tiers = engine(plan, "large").memory.tiers
    assert tiers.host.size == 256 << 20
    assert tiers.file is None
    assert tiers.remote
    assert tiers.remote.copy
    assert tiers.remote.deadline == 1.0
    assert engine(plan).memory.tiers.file
    assert kv_volume(plan)
    assert kv_volume(plan, "demo-large") is None


@pytest.mark.parametrize(
    ("file", "path", "volume"),
    [
        ({}, "/var/lib/ullage/kv", {"emptyDir": {"sizeLimit": "2240Mi"}}),
        ({"size": "1Gi", "path": "/fast/"}, "/fast", {"emptyDir": {"sizeLimit": "1152Mi"}}),
        (
            {"claimName": "kv", "path": "//kv/a"},
            "/kv/a",
            {"persistentVolumeClaim": {"claimName": "kv"}},
        ),
        (
            {"hostPath": "/mnt/nvme"},
            "/var/lib/ullage/kv",
            {"hostPath": {"path": "/mnt/nvme", "type": "Directory"}},
        ),
    ],
)
def test_files_are_in_a_volume_that_can_be_written(
    make_plan: MakePlan, file: dict[str, Any], path: str, volume: dict[str, Any]
) -> None:
    """The root file system is read only, and nothing is kept in a container's own layer."""
    plan = make_plan(memory={"tiers": {"file": file}})
    tier = engine(plan).memory.tiers.file
    assert tier
    assert kv_volume(plan) == (tier.path, volume) == (path, volume)
    limit = volume.get("emptyDir", {}).get("sizeLimit", "1Ei")
    assert parse_bytes(limit) > tier.size


@pytest.mark.parametrize("mount", ["/data", "/data/kv", "/data/", "/"])
def test_a_mount_of_the_pod_template_may_hold_the_files(make_plan: MakePlan, mount: str) -> None:
    plan_with = {
        "memory": {"tiers": {"file": {"path": "/data/kv"}}},
        "pools": {"single": with_mount({"mountPath": mount})},
    }
    if mount == "/":
        with pytest.raises(InvalidManifest, match=r"holds .* which is the operator's own"):
            make_plan(**plan_with)
        return
    plan = make_plan(**plan_with)
    assert kv_volume(plan) is None
    tier = engine(plan).memory.tiers.file
    assert tier
    assert tier.path == "/data/kv"


segments = st.lists(st.sampled_from(["a", "ab", "b"]), max_size=4)


@given(segments, segments, st.sampled_from(["/", "//", "/./", "/b/../"]))
def test_a_path_lies_in_the_folders_that_it_begins_with(
    path: list[str], folder: list[str], slash: str
) -> None:
    is_inside = path[: len(folder)] == folder
    assert lies_in("/" + slash.join(path), "/" + "/".join(folder) + "/") == is_inside


FILE = "memory.tiers.file.path"


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (
            {"memory": {"tiers": {"file": {"path": "/tmp/kv"}}}},
            f"spec.{FILE}: /tmp/kv lies in /tmp, which is the operator's own; choose another fol",
        ),
        (
            {"pools": {"single": {"memory": {"tiers": {"file": {"path": "/var/x/../cache"}}}}}},
            f"spec.pools.single.{FILE}: /var/cache holds /var/cache/ullage, which is the oper",
        ),
        (
            {
                "memory": {"tiers": {"file": {"path": "/data/kv"}}},
                "pools": {"single": with_mount({"mountPath": "/data", "readOnly": True})},
            },
            f"spec.{FILE}: /data/kv lies in /data, which podTemplate mounts readOnly; leave",
        ),
        (
            {
                "memory": {"tiers": {"file": {"claimName": "kv", "path": "/data/kv"}}},
                "pools": {"single": with_mount({"mountPath": "/data"})},
            },
            "volumeMounts[/data]: holds /data/kv, which is the operator's own; mount it elsewhere",
        ),
    ],
)
def test_folders_that_cannot_be_are_refused(
    make_plan: MakePlan, spec: dict[str, Any], line: str
) -> None:
    spec = spec | {"pools": {"huge": {}} | spec.get("pools", {})}
    with pytest.raises(InvalidManifest, match=re.escape(line)) as caught:
        make_plan(**spec)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_the_host_tier_is_requested_beside_the_device(make_plan: MakePlan, device: str) -> None:
    def requested(size: str) -> int:
        memory = {"deviceBytes": "6Gi", "hostKV": "1Gi", "tiers": {"host": {"size": size}}}
        return requested_bytes(make_plan(device=device, memory=memory))

    assert requested("5Gi") - requested("1Gi") == 4 << 30
    assert requested("1Gi") - requested("0") == 1 << 30


def test_without_a_prefix_cache_no_host_tier_is_paid_for(make_plan: MakePlan) -> None:
    off = make_plan(device="CPU", memory={"prefixCache": False})
    assert requested_bytes(make_plan(device="CPU")) - requested_bytes(off) == 256 << 20
    limits = {"resources": {"limits": {"memory": "4Gi"}}}
    tight = {"deviceBytes": "4Gi", "prefixCache": False}
    assert make_plan(device="CPU", memory=tight, pools={"single": limits})


@pytest.mark.parametrize(
    ("pool", "paid"),
    [
        ({"parallelism": {"tensor": 2}}, 1 << 30),
        ({"parallelism": {"pipeline": 2}}, 0),
        ({"parallelism": {"tensor": 2}, "nodes": 2}, 0),
    ],
)
def test_where_vllm_uses_no_tiers_none_is_paid_for(
    make_plan: MakePlan, pool: dict[str, Any], paid: int
) -> None:
    def requested(size: str) -> int:
        pools = {"single": {"gpus": 2} | pool}
        memory = {"tiers": {"host": {"size": size}}}
        return requested_bytes(make_plan(engine="VLLM", memory=memory, pools=pools))

    assert requested("1Gi") - requested("0") == paid


@pytest.mark.parametrize("limit", ["1500Mi", "1700Mi", "1", "4Gi"])
@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_a_host_tier_that_nobody_asked_for_is_in_nobodys_way(
    manifest: Callable[..., dict[str, Any]], device: str, limit: str
) -> None:
    """Services that were stored before there were tiers stay as valid as they were."""
    given: dict[str, Any] = {"safetyReserve": "32Mi"}
    given |= {"deviceBytes": "1500Mi"} if device == "CPU" and limit != "1" else {}

    def read(**memory: Any) -> Service:
        limits = {"limits": {"memory": limit}}
        written = manifest(
            device=device, memory=given | memory, pools={"single": {"resources": limits}}
        )
        stored, problems = complete(load_schema(), written)
        assert not problems
        return parse_stored(stored)

    service = read()
    room = {"1500Mi": 225, "1700Mi": 425, "1": 0, "4Gi": 2821}[limit]
    room = {"1700Mi": 676, "1500Mi": 476, "1": 0, "4Gi": 3072}[limit] if device == "CUDA" else room
    size = min(256, room // 8)
    line = f"KV tiers: host memory {size} MiB of each pod" if size >= 16 else "KV tiers: none"
    assert tiers_line(service, service.spec.pools["single"], Settings()) == line
    if device == "CPU" and limit == "1700Mi":
        for tiers in ({"host": {"size": "256Mi"}}, {"remote": {}}, {"file": {}}):
            with pytest.raises(InvalidManifest, match="256Mi and deviceBytes 1500Mi together"):
                read(tiers=tiers)


@given(
    percent=st.floats(1, 100),
    device=st.sampled_from(["cpu", "cuda", "auto"]),
    limit=st.integers(0, 64 << 30),
    budget=st.none() | st.integers(0, 64 << 30),
    host_kv=st.integers(0, 8 << 30),
    num_ranks=st.integers(1, 8),
)
def test_what_an_engine_is_given_by_default_is_a_small_part_of_what_is_left(
    percent: float,
    device: Any,
    limit: int,
    budget: int | None,
    host_kv: int,
    num_ranks: int,
) -> None:
    memory = MemoryLimits(threshold_percent=percent, device_bytes=budget, host_kv=host_kv)
    size = default_host_tier(memory, device, num_ranks, limit)
    assert size == 0 or 16 << 20 <= size <= 256 << 20
    on_cpu = percent / 100 * (limit if budget is None else budget * num_ranks)
    on_gpus = host_kv + (num_ranks << 30)
    taken = max(on_cpu * (device != "cuda"), on_gpus * (device != "cpu"))
    assert size == 0 or taken + 8 * size <= limit + 1
    assert size >= 16 << 20 or limit - taken < (128 << 20) + 1
    assert default_host_tier(memory, device, num_ranks, None) == 256 << 20


def test_followers_have_no_files(make_plan: MakePlan) -> None:
    two = {"gpus": 2, "nodes": 2, "parallelism": {"tensor": 2}}
    plan = make_plan(engine="VLLM", memory={"tiers": ALL}, pools={"large": two})
    assert kv_volume(plan, "demo-large")
    assert kv_volume(plan, "demo-large-group") is None


def test_engines_reach_one_another_only_where_they_are_peers(make_plan: MakePlan) -> None:
    def components(**spec: Any) -> list[str]:
        policy = find(make_plan(**spec), "NetworkPolicy", "demo-engine")["spec"]
        grpc = policy["ingress"][0]
        assert [port["port"] for port in grpc["ports"]] == [9000]
        for each in grpc["from"]:
            assert each["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "demo"
        return [
            each["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for each in grpc["from"]
        ]

    assert components() == ["router"]
    assert components(memory={"tiers": {"file": {}}}) == ["router"]
    assert components(memory={"tiers": {"remote": {}}}) == ["router", "engine"]
    pools = {"large": {"memory": {"tiers": {"remote": {}}}}}
    assert components(pools=pools) == ["router", "engine"]


@pytest.mark.parametrize("server_name", [None, "engines.test"])
async def test_engines_show_one_another_the_certificates_that_they_serve_with(
    make_plan: MakePlan,
    make_authority: Callable[[], "Authority"],
    tmp_path: Path,
    server_name: str | None,
) -> None:
    tls = {"secretName": "back", "routerSecretName": "back-router"}
    tls |= {"serverName": server_name} if server_name else {}
    plan = make_plan(tls={"engines": tls}, memory={"tiers": {"remote": {}}})
    config = engine(plan)
    remote = config.memory.tiers.remote
    assert remote
    assert remote.server_name == (server_name or "demo-engine.models.svc")
    volumes = {v["name"]: v["secret"]["secretName"] for v in pod(plan)["volumes"] if "secret" in v}
    mounts = {m["mountPath"]: m["name"] for m in pod(plan)["containers"][0]["volumeMounts"]}
    assert volumes[mounts[str(config.server.tls_dir)]] == "back"

    own = make_authority().issue(tmp_path / "back", remote.server_name)
    certificates = Certificates(own, own)
    await certificates.start()
    server = new_server()
    health = Health()
    try:
        health.attach(server, ())
        port = bind(server, "127.0.0.1:0", certificates.server_credentials())
        await server.start()
        credentials = certificates.channel_credentials()
        async with open_channel(f"127.0.0.1:{port}", credentials, remote.server_name) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="liveness")
            async with asyncio.timeout(60):
                answer = await stub.Check(request, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(None)
        await certificates.close()


MODEL = {"source": "file:///m", "name": "m"}


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ({"host": {"size": 0}, "file": {"path": "/kv"}}, "host.size is 0, but the tier file"),
        ({"host": {"size": 0}, "remote": {"peers": []}}, "host.size is 0, but the tier remote"),
        ({"host": {"size": -1}}, "host.size"),
        ({"file": {"path": "kv"}}, "path 'kv' is not absolute; begin it with /"),
        ({"file": {"path": "/kv", "size": 0}}, "file.size"),
        ({"remote": {"peers": ["demo"]}}, "'demo' is not host:port"),
        ({"remote": {"peers": [], "deadline": 0}}, "remote.deadline"),
    ],
)
def test_an_engines_own_file_is_held_to_the_same(tiers: dict[str, Any], words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(words)):
        msgspec.convert({"model": MODEL, "memory": {"tiers": tiers}}, EngineConfig)


def test_clients_that_reach_engines_reach_no_peers() -> None:
    document = {
        "model": MODEL,
        "tickets": {"keys_dir": "/keys", "required": True},
        "memory": {"tiers": {"remote": {"peers": []}}},
    }
    with pytest.raises(msgspec.ValidationError, match=r"memory\.tiers\.remote is set, but with"):
        msgspec.convert(document, EngineConfig)
    document["tickets"] = {"keys_dir": "/keys"}
    assert msgspec.convert(document, EngineConfig).memory.tiers.remote
