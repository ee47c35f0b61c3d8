"""The plan on loopback: the same pods and files with other addresses."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry

from ullage_cli.local.files import make_folders, write_files
from ullage_cli.local.plan import LocalPlan, plan_local
from ullage_common.config.engine import EngineConfig
from ullage_common.config.router import RouterConfig
from ullage_common.process.addresses import listen
from ullage_common.process.cores import physical_cores
from ullage_common.process.memory import usable_bytes
from ullage_common.process.metrics_endpoint import serve_metrics
from ullage_common.wire.servers import bind, new_server
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.parsing import parse
from ullage_router.rollout.canary import RolloutFile

Make = Callable[..., dict[str, Any]]
LARGE = {"gpus": 1, "parallelism": {"tensor": 1, "pipeline": 1}}


def local(
    manifest: dict[str, Any],
    run_dir: Path,
    http_port: int = 0,
    grpc_port: int = 0,
    kept: contextlib.ExitStack | None = None,
    secrets: Path | None = None,
) -> LocalPlan:
    ports = {"http_port": http_port, "grpc_port": grpc_port}
    return plan_local(
        parse(manifest), run_dir, **ports, log_level="warning", kept=kept, secrets=secrets
    )


def read(plan: LocalPlan, pod: str, kind: type[Any]) -> Any:
    [text] = [file.text for file in plan.files if file.path.parent.parent.name == pod]
    return msgspec.convert(yaml.safe_load(text), kind)


def test_every_replica_is_a_process_and_the_router_one(manifest: Make, tmp_path: Path) -> None:
    plan = local(manifest(pools={"single": {"replicas": 2}, "large": LARGE}), tmp_path)
    assert [(pod.name, pod.part) for pod in plan.pods] == [
        ("demo-single-0", "pools.single"),
        ("demo-single-1", "pools.single"),
        ("demo-large-0", "pools.large"),
        ("demo-router-0", "router"),
    ]
    assert plan.model == "smollm2"


def test_the_router_listens_on_loopback_for_the_pages_that_are_allowed(
    manifest: Make, tmp_path: Path
) -> None:
    """There it checks Host and Origin."""
    origins = ["http://localhost:3000"]
    plan = local(manifest(router={"cors": {"allowedOrigins": origins}}), tmp_path)
    config = read(plan, "demo-router-0", RouterConfig)
    hosts = {config.http.host, config.grpc.host, config.metrics.host}
    assert hosts == {"127.0.0.1"}
    assert config.cors is not None
    assert config.cors.allowed_origins == tuple(origins)


def test_statistics_are_public_on_loopback_only(manifest: Make, tmp_path: Path) -> None:
    def router(host: str) -> RouterConfig:
        plan = plan_local(
            parse(manifest()),
            tmp_path,
            http_port=0,
            grpc_port=0,
            log_level="warning",
            host=host,
        )
        config: RouterConfig = read(plan, "demo-router-0", RouterConfig)
        return config

    inside = router("127.0.0.1")
    assert inside.http.public_stats
    assert inside.console is not None
    assert inside.console.local
    outside = router("0.0.0.0")
    assert (outside.http.host, outside.grpc.host) == ("0.0.0.0", "0.0.0.0")
    assert outside.metrics.host == "127.0.0.1"
    assert not outside.http.public_stats
    assert outside.console is None or not outside.console.local


def test_engines_take_the_devices_that_the_machine_has(manifest: Make, tmp_path: Path) -> None:
    assert read(local(manifest(), tmp_path), "demo-single-0", EngineConfig).device == "auto"


def test_no_two_pods_share_a_port(manifest: Make, tmp_path: Path) -> None:
    plan = local(manifest(pools={"single": {"replicas": 3}}), tmp_path)
    ports = [port for pod in plan.pods for port in pod.ports.values()]
    assert len(set(ports)) == len(ports) == 3 * 3 + 3


def test_the_router_finds_every_engine_on_loopback(manifest: Make, tmp_path: Path) -> None:
    plan = local(manifest(pools={"single": {"replicas": 2}, "large": LARGE}), tmp_path)
    router = read(plan, "demo-router-0", RouterConfig)
    grpc = {pod.name: f"127.0.0.1:{pod.ports['grpc']}" for pod in plan.pods}
    assert [(pool.name, pool.targets) for pool in router.pools] == [
        ("single", (grpc["demo-single-0"], grpc["demo-single-1"])),
        ("large", (grpc["demo-large-0"],)),
    ]
    assert router.http.host == router.grpc.host == router.metrics.host == "127.0.0.1"
    assert router.log_level == "warning"
    own = local(manifest(observability={"logLevel": "Debug"}), tmp_path)
    assert read(own, "demo-router-0", RouterConfig).log_level == "debug"


def test_an_engine_lives_in_its_own_folder(manifest: Make, tmp_path: Path) -> None:
    plan = local(manifest(pools={"single": {"replicas": 2}}), tmp_path)
    servers = [read(plan, f"demo-single-{i}", EngineConfig).server for i in (0, 1)]
    assert [server.engine_id for server in servers] == ["demo-single-0", "demo-single-1"]
    assert servers[1].run_dir == str(tmp_path / "demo-single-1")
    assert servers[0].weights_dir == servers[1].weights_dir == str(tmp_path / "weights")
    assert servers[0].host == "127.0.0.1"
    assert servers[0].grpc_port == plan.pods[0].ports["grpc"]
    assert servers[0].metrics_port == plan.pods[0].ports["metrics"]


def test_commands_name_files_that_are_written(manifest: Make, tmp_path: Path) -> None:
    plan = local(manifest(), tmp_path)
    write_files(plan.files)
    engine, router = plan.pods
    for pod in (engine, router):
        assert Path(pod.command[pod.command.index("--config") + 1]).is_file()
    assert engine.command[1:3] == ("-m", "ullage_engine.main")
    assert engine.command[-2:] == ("--engine-id", "demo-single-0")
    assert router.command[1:3] == ("-m", "ullage_router.main")


def test_everything_stays_in_the_run_directory(manifest: Make, tmp_path: Path) -> None:
    plan = local(manifest(), tmp_path)
    assert all(file.path.is_relative_to(tmp_path) for file in plan.files)
    assert plan.pods[0].env["HF_HOME"] == str(tmp_path / "cache" / "huggingface")


def test_credentials_of_buckets_are_of_the_environment_or_the_folder_of_secrets(
    manifest: Make, tmp_path: Path
) -> None:
    model = {"source": "s3://models/m.gguf", "name": "m"}
    s3 = {"endpoint": "http://127.0.0.1:9000", "secretName": "models"}
    env = local(manifest(model=model, s3=s3), tmp_path).pods[0].env
    assert env["ULLAGE_S3_CACHE"] == str(tmp_path / "cache" / "s3")
    assert env["AWS_ENDPOINT_URL_S3"] == "http://127.0.0.1:9000"
    assert "AWS_ACCESS_KEY_ID" not in env, "inherited from ullage up"

    folder = tmp_path / "secrets" / "models"
    folder.mkdir(parents=True)
    (folder / "AWS_ACCESS_KEY_ID").write_text("AKIDEXAMPLE\n")
    with pytest.raises(LocalFailure, match=r"there is no .*AWS_SECRET_ACCESS_KEY; write the key"):
        local(manifest(model=model, s3=s3), tmp_path, secrets=folder.parent)
    (folder / "AWS_SECRET_ACCESS_KEY").write_text("secret")
    env = local(manifest(model=model, s3=s3), tmp_path, secrets=folder.parent).pods[0].env
    keys = {name: value for name, value in env.items() if "KEY" in name or "TOKEN" in name}
    assert keys == {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}


def test_a_pool_without_engines_is_no_target(manifest: Make, tmp_path: Path) -> None:
    plan = local(manifest(pools={"large": LARGE | {"replicas": 0}}), tmp_path)
    assert [pool.name for pool in read(plan, "demo-router-0", RouterConfig).pools] == ["single"]


def test_a_service_without_engines_is_refused(manifest: Make, tmp_path: Path) -> None:
    with pytest.raises(LocalFailure, match=r"set spec\.replicas, or replicas of a pool"):
        local(manifest(pools={"single": {"replicas": 0}}), tmp_path)


def test_a_busy_port_names_its_flag(manifest: Make, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LocalFailure, match=rf"^port {port} on 127\.0\.0\.1 .*--http-port"):
            local(manifest(), tmp_path, http_port=port)


def test_a_port_cannot_be_asked_for_twice(manifest: Make, tmp_path: Path) -> None:
    with pytest.raises(LocalFailure, match=r"^port 18080 is given twice; .*--grpc-port"):
        local(manifest(), tmp_path, http_port=18080, grpc_port=18080)


def test_ports_are_kept_for_the_pods_that_bind_them_later(manifest: Make, tmp_path: Path) -> None:
    """Whatever kind of server a pod has there."""

    async def bind_grpc(port: int) -> None:
        server = new_server()
        assert bind(server, f"127.0.0.1:{port}") == port
        await server.start()
        await server.stop(None)

    with contextlib.ExitStack() as kept:
        plan = local(manifest(), tmp_path, kept=kept)
        for port in [port for pod in plan.pods for port in pod.ports.values()]:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        asyncio.run(bind_grpc(port))
        serve_metrics(CollectorRegistry(), port, "127.0.0.1")()
        listen("127.0.0.1", port).close()


def test_a_folder_too_deep_for_sockets_is_refused(manifest: Make) -> None:
    with pytest.raises(LocalFailure, match="choose a shorter one"):
        local(manifest(), Path("/", "d" * 100))


def test_engines_share_what_the_machine_has_free(manifest: Make, tmp_path: Path) -> None:
    large = LARGE | {"memory": {"deviceBytes": "1Gi", "safetyReserve": "64Mi"}}
    plan = local(manifest(pools={"single": {"replicas": 2}, "large": large}), tmp_path)
    assert read(plan, "demo-large-0", EngineConfig).memory.device_bytes == 1 << 30
    shares = [read(plan, f"demo-single-{i}", EngineConfig).memory.device_bytes for i in range(2)]
    assert shares[0] == shares[1]
    assert shares[0] == pytest.approx((usable_bytes() - (1 << 30)) // 2, rel=0.2)


def test_an_engines_workers_share_as_engines_do(manifest: Make, tmp_path: Path) -> None:
    ranks = {"gpus": 3, "parallelism": {"pipeline": 3}}
    large = LARGE | {"memory": {"deviceBytes": "1Gi", "safetyReserve": "64Mi"}}
    plan = local(manifest(pools={"single": ranks, "large": large}), tmp_path)
    share = read(plan, "demo-single-0", EngineConfig).memory.device_bytes
    assert share == pytest.approx((usable_bytes() - (1 << 30)) // 3, rel=0.2)


def test_host_tiers_are_no_part_of_what_engines_share(manifest: Make, tmp_path: Path) -> None:
    def share(size: int) -> int:
        memory = {"tiers": {"host": {"size": size}}}
        made = manifest(memory=memory, pools={"single": {"replicas": 2}})
        engine = read(local(made, tmp_path), "demo-single-0", EngineConfig)
        assert engine.memory.tiers.host.size == size
        return int(engine.memory.device_bytes)

    quarter = usable_bytes() // 4
    assert share(0) - share(quarter) == pytest.approx(quarter, rel=0.2)


def test_peers_are_the_other_engines_of_the_pool(manifest: Make, tmp_path: Path) -> None:
    scaling = {"minReplicas": 1, "maxReplicas": 3}
    pools = {"single": {"autoscaling": scaling}, "large": LARGE}
    plan = local(manifest(pools=pools, memory={"tiers": {"remote": {}}}), tmp_path)
    own = {pod.name: f"127.0.0.1:{pod.ports['grpc']}" for pod in plan.pods}
    for pod in plan.pods[:-1]:
        remote = read(plan, pod.name, EngineConfig).memory.tiers.remote
        mates = [each.name for each in plan.pods if each.part == pod.part and each is not pod]
        assert remote.peers == tuple(own[name] for name in mates)


def test_files_are_in_the_run_directory_or_in_a_folder_of_this_machine(
    manifest: Make, tmp_path: Path
) -> None:
    chosen = tmp_path / "more" / "kv"
    large = LARGE | {"memory": {"tiers": {"file": {"path": str(chosen), "claimName": "kv"}}}}
    pools = {"single": {"replicas": 2}, "large": large, "huge": {"memory": {"tiers": {}}}}
    plan = local(manifest(pools=pools, memory={"tiers": {"file": {"size": "1Gi"}}}), tmp_path)
    folders = [
        tier.path if (tier := read(plan, pod.name, EngineConfig).memory.tiers.file) else None
        for pod in plan.pods[:-1]
    ]
    own = [str(tmp_path / f"demo-single-{index}" / "kv") for index in range(2)]
    assert folders == [*own, str(chosen), None]
    assert list(plan.folders) == [*map(Path, own), chosen]
    make_folders(plan.folders)
    make_folders(plan.folders)
    assert chosen.is_dir()
    assert not any(chosen.iterdir())


def test_uploaded_files_are_in_the_run_directory_or_in_a_folder_of_this_machine(
    manifest: Make, tmp_path: Path
) -> None:
    plan = local(manifest(router={"replicas": 1, "files": {"maxBytes": "1Gi"}}), tmp_path)
    config = read(plan, "demo-router-0", RouterConfig)
    own = tmp_path / "demo-router-0" / "files"
    assert config.files
    assert (config.files.dir, config.files.max_bytes) == (str(own), 1 << 30)
    assert plan.folders == {own: "router.files.path"}

    taken = tmp_path / "taken"
    taken.write_text("no folder")
    chosen = {"path": str(taken / "files"), "claimName": "files"}
    plan = local(manifest(router={"replicas": 1, "files": chosen}), tmp_path)
    with pytest.raises(LocalFailure, match=f"router.files.path {taken}/files: Not a directory"):
        make_folders(plan.folders)


def engine_with(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "engine", **fields}]}


@pytest.mark.parametrize(
    ("pod", "field"),
    [
        (engine_with(env=[{"name": "A", "valueFrom": {}}]), r"containers\[engine\]\.env"),
        (engine_with(envFrom=[{"secretRef": {"name": "s"}}]), r"containers\[engine\]\.env"),
        (engine_with(volumeMounts=[{"mountPath": "/d"}]), r"containers\[engine\]\.volumeMounts"),
        ({"volumes": [{"name": "v", "emptyDir": {}}]}, "volumes"),
        ({"initContainers": [{"name": "x"}]}, "initContainers"),
        ({"containers": [{"name": "x"}]}, r"containers\[x\]"),
    ],
)
def test_what_only_a_cluster_can_give_is_refused(
    manifest: Make, tmp_path: Path, pod: dict[str, Any], field: str
) -> None:
    where = rf"^spec\.pools\.huge\.podTemplate\.spec\.{field}: "
    with pytest.raises(LocalFailure, match=rf"{where}.* leave .* out"):
        local(manifest(pools={"huge": {"podTemplate": {"spec": pod}}}), tmp_path)


def test_engines_of_this_machine_have_their_pools_environment(
    manifest: Make, tmp_path: Path
) -> None:
    env = [{"name": "A", "value": "x"}, {"name": "B"}]
    template = {"spec": engine_with(env=env, ports=[{"containerPort": 8080}])}
    plan = local(manifest(pools={"single": {"podTemplate": template}}), tmp_path)
    [engine, _] = plan.pods
    assert (engine.env["A"], engine.env["B"]) == ("x", "")
    assert set(engine.ports) == {"grpc", "metrics", "probe"}


def test_pools_of_any_name_run_and_are_known_to_the_router(manifest: Make, tmp_path: Path) -> None:
    plan = local(manifest(pools={"huge": {}, "large": LARGE}), tmp_path)
    assert [pod.part for pod in plan.pods[:-1]] == ["pools.single", "pools.large", "pools.huge"]
    pools = read(plan, "demo-router-0", RouterConfig).pools
    assert [pool.name for pool in pools] == ["single", "large", "huge"]


def test_a_pool_that_scales_has_ports_for_all_its_engines(manifest: Make, tmp_path: Path) -> None:
    scaling = {"minReplicas": 0, "maxReplicas": 3}
    pools = {"single": {"replicas": 0, "autoscaling": scaling}, "large": LARGE}
    plan = local(manifest(pools=pools), tmp_path)
    engines = [pod for pod in plan.pods if pod.part == "pools.single"]
    assert len(engines) == 3
    assert plan.sizes == {"single": 0}
    assert plan.policies["single"].max_replicas == 3
    router = read(plan, "demo-router-0", RouterConfig)
    assert [(pool.name, pool.sleeps, len(pool.targets)) for pool in router.pools] == [
        ("single", True, 3),
        ("large", False, 1),
    ]


def test_the_router_knows_the_adapters_of_engines_that_sleep(
    manifest: Make, tmp_path: Path
) -> None:
    pools = {"single": {"replicas": 0, "autoscaling": {"minReplicas": 0, "maxReplicas": 1}}}
    adapters = [{"name": "sql", "source": "pvc://tuned/sql", "rank": 8}]
    service = parse(manifest(engine="VLLM", pools=pools, adapters=adapters))
    ports = {"http_port": 0, "grpc_port": 0}
    plan = plan_local(service, tmp_path, **ports, log_level="warning", has_vllm=True)
    files = {file.path: yaml.safe_load(file.text) for file in plan.files}
    config = msgspec.convert(
        files[tmp_path / "demo-router-0" / "config" / "router.yaml"], RouterConfig
    )
    assert config.rollout_file
    rollout = msgspec.convert(files[Path(config.rollout_file)], RolloutFile)
    assert (rollout.adapters, rollout.canary) == (("sql",), None)


def test_all_engines_read_their_adapters_from_one_file(manifest: Make, tmp_path: Path) -> None:
    adapters = [{"name": "sql", "source": "file:///sql", "rank": 8}]
    pools = {"single": {"replicas": 2}}
    ports = {"http_port": 0, "grpc_port": 0}
    for given, names in (({"adapters": adapters}, ["sql"]), ({"memory": {"maxLoras": 2}}, [])):
        service = parse(manifest(engine="VLLM", pools=pools, **given))
        plan = plan_local(service, tmp_path, **ports, log_level="warning", has_vllm=True)
        engines = [read(plan, f"demo-single-{i}", EngineConfig) for i in range(2)]
        [path] = {engine.adapters_file for engine in engines}
        [file] = [each for each in plan.files if str(each.path) == path]
        assert [each["name"] for each in yaml.safe_load(file.text)["adapters"]] == names


def own_cores(plan: LocalPlan) -> dict[str, tuple[bool | None, tuple[int, ...]]]:
    engines = [pod.name for pod in plan.pods if "http" not in pod.ports]
    servers = {name: read(plan, name, EngineConfig).server for name in engines}
    return {name: (each.owns_cores, each.cores) for name, each in servers.items()}


def test_a_lone_engine_owns_its_cores(manifest: Make, tmp_path: Path) -> None:
    assert own_cores(local(manifest(), tmp_path)) == {"demo-single-0": (True, ())}


@pytest.mark.parametrize(
    ("num_cores", "num_threads", "expected"),
    [
        (16, 1, {"0": (True, (0, 1, 2, 3, 4)), "1": (True, (5, 6, 7, 8, 9))}),
        (6, 1, {"0": (True, (0, 1)), "1": (True, (2, 3))}),
        (5, 1, {"0": (False, ()), "1": (False, ())}),
        # Threads i and i + 8 are those of one core.
        (16, 2, {"0": (True, (0, 8, 1, 9)), "1": (True, (2, 10, 3, 11))}),
        (10, 2, {"0": (False, ()), "1": (False, ())}),
    ],
)
def test_several_engines_get_their_own_cores_where_these_suffice(
    manifest: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_cores: int,
    num_threads: int,
    expected: dict[str, tuple[bool, tuple[int, ...]]],
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_cores)))
    monkeypatch.setattr("ullage_cli.local.shares.usable_cores", lambda: num_cores)
    for core in range(num_cores):
        topology = tmp_path / f"cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        num_physical = num_cores // num_threads
        threads = range(core % num_physical, num_cores, num_physical)
        (topology / "core_cpus_list").write_text(",".join(map(str, threads)) + "\n")
    by_core = partial(physical_cores, root=tmp_path)
    monkeypatch.setattr("ullage_cli.local.shares.physical_cores", by_core)
    scaling = {"replicas": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 3}}
    plan = local(manifest(pools={"single": scaling}), tmp_path)
    cores = own_cores(plan)
    assert cores.pop("demo-single-2")[0] == expected["0"][0]
    assert {name.rpartition("-")[2]: each for name, each in cores.items()} == expected
