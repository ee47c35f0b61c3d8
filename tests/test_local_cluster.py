"""The local cluster's parts that start nothing: rules, DNS, archives, settings and programs."""

import json
import os
import socket
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import local_cluster
import pytest
from ullage_local_cluster import dns, proxy
from ullage_local_cluster.archives import write_archive
from ullage_local_cluster.cleanup import remove_files, started_mark
from ullage_local_cluster.kubernetes_build import build, newest, programs
from ullage_local_cluster.policies import (
    EGRESS,
    INGRESS,
    Direction,
    matches,
    networks_without,
    pod_network,
    policy_rules,
)
from ullage_local_cluster.processes import (
    PACKAGES,
    check_programs,
    kill_all,
    running_pid,
    session,
    start,
    start_time,
    wait_until,
)
from ullage_local_cluster.services import dns_records, service_rules
from ullage_local_cluster.settings import PORTS, ClusterError, ClusterSettings

Object = dict[str, Any]
ROOT = Path(__file__).parents[1]
READY = {"ready": True, "serving": True, "terminating": False}
TERMINATING = {"ready": False, "serving": True, "terminating": True}
FAILED = {"ready": False, "serving": False, "terminating": True}
ANYWHERE = "10.1.0.0/16"


def service(name: str, address: str = "None", **ports: int) -> Object:
    listed = [{"name": key, "port": port, "protocol": "TCP"} for key, port in ports.items()]
    spec = {"clusterIP": address, "ports": listed}
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": spec}


def endpoint(address: str, conditions: Object = READY, **more: str) -> Object:
    return {"addresses": [address], "conditions": conditions, **more}


def slice_of(name: str, *endpoints: Object, **ports: int) -> Object:
    return {
        "addressType": "IPv4",
        "metadata": {"namespace": "ns", "labels": {"kubernetes.io/service-name": name}},
        "ports": [{"name": key, "port": port} for key, port in ports.items()],
        "endpoints": list(endpoints),
    }


def test_packets_to_a_service_go_to_its_ready_pods_with_equal_chances() -> None:
    pods = [endpoint("10.0.0.2"), endpoint("10.0.0.3"), endpoint("10.0.0.4", TERMINATING)]
    translating, rejecting, loops = service_rules(
        [service("web", "10.9.0.5", http=80)], [slice_of("web", *pods, http=8000)]
    )
    to_web = "-d 10.9.0.5/32 -p tcp --dport 80"
    assert translating == [
        f"{to_web} -m statistic --mode random --probability 0.500000"
        " -j DNAT --to-destination 10.0.0.2:8000",
        f"{to_web} -j DNAT --to-destination 10.0.0.3:8000",
    ]
    assert not rejecting
    assert loops == [f"-s {it}/32 -d {it}/32 -j MASQUERADE" for it in ("10.0.0.2", "10.0.0.3")]


def test_each_port_of_a_service_has_the_pods_port_of_its_name() -> None:
    slices = [slice_of("web", endpoint("10.0.0.2"), http=8000, grpc=9000)]
    translating, _, _ = service_rules([service("web", "10.9.0.5", grpc=1, http=2)], slices)
    assert [rule.split()[5] + rule.split()[-1] for rule in translating] == [
        "110.0.0.2:9000",
        "210.0.0.2:8000",
    ]


def test_pods_that_terminate_serve_while_none_is_ready() -> None:
    pods = [endpoint("10.0.0.3", FAILED), endpoint("10.0.0.4", TERMINATING)]
    services = [service("web", "10.9.0.5", http=80)]
    translating, rejecting, _ = service_rules(services, [slice_of("web", *pods, http=8000)])
    assert [rule.split()[-1] for rule in translating] == ["10.0.0.4:8000"]
    assert not rejecting


def test_packets_to_a_service_without_pods_are_rejected() -> None:
    empty = {**slice_of("web"), "ports": None, "endpoints": None}
    for slices in ([], [empty], [slice_of("web", endpoint("10.0.0.3", FAILED), http=1)]):
        found = service_rules([service("web", "10.9.0.5", http=80)], slices)
        assert found == (
            [],
            ["-d 10.9.0.5/32 -p tcp --dport 80 -j REJECT --reject-with tcp-reset"],
            [],
        )


def test_names_of_services_and_of_the_pods_of_headless_ones() -> None:
    pods = [endpoint("10.0.0.3", hostname="b-1"), endpoint("10.0.0.2", hostname="b-0")]
    unready = endpoint("10.0.0.4", FAILED, hostname="b-2")
    services = [service("a", "10.9.0.5"), service("b"), service("c")]
    of_ipv6 = {**slice_of("b", endpoint("fd00::1")), "addressType": "IPv6"}
    assert dns_records(services, [slice_of("b", *pods, unready), of_ipv6]) == {
        "a.ns.svc.cluster.local": ["10.9.0.5"],
        "b.ns.svc.cluster.local": ["10.0.0.2", "10.0.0.3"],
        "b-0.b.ns.svc.cluster.local": ["10.0.0.2"],
        "b-1.b.ns.svc.cluster.local": ["10.0.0.3"],
        "c.ns.svc.cluster.local": [],
    }


def expression(operator: str, *values: str) -> Object:
    return {"matchExpressions": [{"key": "tier", "operator": operator, "values": list(values)}]}


def test_label_selectors(subtests: pytest.Subtests) -> None:
    front = {"app": "web", "tier": "front"}
    bare = {"app": "web"}
    cases: list[tuple[Object, tuple[bool, bool]]] = [
        ({}, (True, True)),
        ({"matchLabels": {"app": "web"}}, (True, True)),
        ({"matchLabels": {"app": "web", "tier": "front"}}, (True, False)),
        (expression("In", "front", "back"), (True, False)),
        (expression("In", "back"), (False, False)),
        (expression("NotIn", "front"), (False, True)),
        (expression("Exists"), (True, False)),
        (expression("DoesNotExist"), (False, True)),
        ({"matchLabels": {"app": "db"}, **expression("Exists")}, (False, False)),
    ]
    for selector, expected in cases:
        with subtests.test(json.dumps(selector)):
            assert (matches(selector, front), matches(selector, bare)) == expected


def pod(name: str, number: int, namespace: str = "ns", **more: Any) -> Object:
    ports = [{"name": "http", "containerPort": 8000 + number, "protocol": "TCP"}]
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"containers": [{"ports": ports}], **more},
        "status": {"podIP": f"10.0.0.{number}", "phase": "Running"},
    }


PODS = [pod("web", 2), pod("db", 3), pod("web", 4, "other")]
NAMESPACES: list[Object] = [
    {"metadata": {"name": name, "labels": {"name": name}}} for name in ("ns", "other")
]


def rules_of(
    direction: Direction, *rules: Object, pods: list[Object] = PODS, kinds: str = "Ingress Egress"
) -> list[str]:
    """Return the rules of a policy for the pods `web` of the namespace `ns`."""
    spec = {
        "podSelector": {"matchLabels": {"app": "web"}},
        "policyTypes": kinds.split(),
        direction.kind.lower(): list(rules),
    }
    policy = {"metadata": {"namespace": "ns"}, "spec": spec}
    return policy_rules([policy], pod_network(pods, NAMESPACES), direction)


DROP = "-d 10.0.0.2/32 -j DROP"


def test_a_policy_without_rules_isolates_its_pods() -> None:
    assert rules_of(INGRESS) == [DROP]
    assert rules_of(EGRESS) == ["-s 10.0.0.2/32 -j DROP"]
    assert rules_of(EGRESS, kinds="Ingress") == []


def test_a_rule_without_peers_and_ports_allows_everything() -> None:
    assert rules_of(INGRESS, {}) == ["-d 10.0.0.2/32 -s 0.0.0.0/0 -j RETURN", DROP]


def test_peers_are_pods_of_namespaces(subtests: pytest.Subtests) -> None:
    databases = {"podSelector": {"matchLabels": {"app": "db"}}}
    others = {"namespaceSelector": {"matchLabels": {"name": "other"}}}
    webs = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}
    everybody: Object = {"namespaceSelector": {}}
    cases = [
        ([databases], [3]),
        ([others], [4]),
        ([{**others, **databases}], []),
        ([webs], [2, 4]),
        ([databases, others], [3, 4]),
        ([everybody], [2, 3, 4]),
    ]
    for entries, numbers in cases:
        with subtests.test(json.dumps(entries)):
            expected = [f"-d 10.0.0.2/32 -s 10.0.0.{it}/32 -j RETURN" for it in numbers]
            assert rules_of(INGRESS, {"from": entries}) == [*expected, DROP]


def test_pods_that_ended_or_share_the_nodes_network_are_no_peers() -> None:
    ended = pod("db", 5)
    ended["status"]["phase"] = "Succeeded"
    unplaced = pod("db", 6)
    del unplaced["status"]["podIP"]
    pods = [PODS[0], ended, unplaced, pod("db", 7, hostNetwork=True)]
    assert rules_of(INGRESS, {"from": [{"podSelector": {}}]}, pods=pods) == [
        "-d 10.0.0.2/32 -s 10.0.0.2/32 -j RETURN",
        DROP,
    ]


def test_ports_of_policies(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Object, list[str]]] = [
        ({"port": 80}, ["-p tcp --dport 80"]),
        ({"port": 80, "endPort": 90}, ["-p tcp --dport 80:90"]),
        ({"port": 53, "protocol": "UDP"}, ["-p udp --dport 53"]),
        ({"protocol": "UDP"}, ["-p udp"]),
        ({"port": "http"}, ["-p tcp --dport 8002"]),
        ({"port": "http", "protocol": "UDP"}, []),
        ({"port": "metrics"}, []),
    ]
    for port, expected in cases:
        with subtests.test(json.dumps(port)):
            wanted = [f"-d 10.0.0.2/32 -s 0.0.0.0/0 {it} -j RETURN" for it in expected]
            assert rules_of(INGRESS, {"ports": [port]}) == [*wanted, DROP]


def test_a_named_port_of_egress_is_the_destinations() -> None:
    rule = {"to": [{"podSelector": {"matchLabels": {"app": "db"}}}], "ports": [{"port": "http"}]}
    assert rules_of(EGRESS, rule)[0] == (
        "-s 10.0.0.2/32 -d 10.0.0.3/32 -p tcp --dport 8003 -j RETURN"
    )


def test_blocks_of_addresses_with_exceptions() -> None:
    assert networks_without(ANYWHERE, []) == [ANYWHERE]
    assert networks_without(ANYWHERE, ["10.1.0.0/17", "10.1.128.0/18"]) == ["10.1.192.0/18"]
    assert networks_without(ANYWHERE, [ANYWHERE]) == []
    assert networks_without("10.1.2.0/24", [ANYWHERE, "10.2.0.0/16"]) == []
    assert networks_without("fd00::/8", []) == []
    block = {"ipBlock": {"cidr": "10.1.0.0/31", "except": ["10.1.0.0/32"]}}
    assert rules_of(INGRESS, {"from": [block]}) == [
        "-d 10.0.0.2/32 -s 10.1.0.1/32 -j RETURN",
        DROP,
    ]


def query(name: str, kind: int = dns.TYPE_A) -> bytes:
    words = b"".join(bytes([len(word)]) + word.encode() for word in name.split("."))
    return struct.pack(">6H", 7, 0x0100, 1, 0, 0, 0) + words + struct.pack(">BHH", 0, kind, 1)


def answered(reply: bytes) -> tuple[int, bool, list[str]]:
    """Return the code, whether the answer is truncated, and the addresses in order."""
    number, flags, _, count, _, _ = struct.unpack_from(">6H", reply)
    assert number == 7
    assert flags & 0x8000
    ends = [len(reply) - 16 * left for left in range(count)]
    return (
        flags & 15,
        bool(flags & 0x0200),
        sorted(socket.inet_ntoa(reply[e - 4 : e]) for e in ends),
    )


def test_dns_answers() -> None:
    many = [f"10.0.0.{number}" for number in range(40)]
    records = {"a.ns": ["10.0.0.2", "10.0.0.3"], "empty.ns": [], "many.ns": many}

    def ask(name: str, kind: int = dns.TYPE_A, limit: int = 512) -> tuple[int, bool, list[str]]:
        return answered(dns.answer(query(name, kind), records, limit))

    assert ask("A.ns") == (0, False, ["10.0.0.2", "10.0.0.3"])
    assert ask("a.ns", kind=28) == (0, False, [])
    assert ask("empty.ns") == (0, False, [])
    assert ask("b.ns") == (3, False, [])
    assert ask("many.ns") == (0, True, [])
    assert ask("many.ns", limit=65535) == (0, False, sorted(many))
    for broken in (b"", query("a.ns")[:-1], query("a.ns")[:14]):
        with pytest.raises(ValueError, match="not a DNS query"):
            dns.answer(broken, records, 512)


def test_dns_serves_udp_and_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(dns, "PORT", port)
    with dns.serve("127.0.0.1", lambda: {"a.ns": ["10.0.0.2"]}):
        expected = (0, False, ["10.0.0.2"])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(10)
            udp.sendto(b"no query", ("127.0.0.1", port))
            udp.sendto(query("a.ns"), ("127.0.0.1", port))
            assert answered(udp.recv(512)) == expected

        with socket.create_connection(("127.0.0.1", port), 10) as tcp, tcp.makefile("rb") as stream:
            for _ in range(2):
                tcp.sendall(len(query("a.ns")).to_bytes(2) + query("a.ns"))
                assert answered(stream.read(int.from_bytes(stream.read(2)))) == expected


def test_rules_are_in_the_clusters_own_chains() -> None:
    objects: dict[str, list[Any]] = {
        proxy.SERVICES: [service("web", "10.9.0.5", http=80), service("db", "10.9.0.6", sql=1)],
        proxy.SLICES: [slice_of("web", endpoint("10.0.0.2"), http=8000)],
        proxy.POLICIES: [],
        proxy.PODS: PODS,
        proxy.NAMESPACES: NAMESPACES,
    }
    assert proxy.ruleset("two", objects).splitlines() == [
        "*nat",
        ":ULLAGE-TWO-SERVICES - [0:0]",
        ":ULLAGE-TWO-LOOPS - [0:0]",
        "-A ULLAGE-TWO-SERVICES -d 10.9.0.5/32 -p tcp --dport 80 -j DNAT "
        "--to-destination 10.0.0.2:8000",
        "-A ULLAGE-TWO-LOOPS -s 10.0.0.2/32 -d 10.0.0.2/32 -j MASQUERADE",
        "COMMIT",
        "*filter",
        ":ULLAGE-TWO-REJECT - [0:0]",
        ":ULLAGE-TWO-EGRESS - [0:0]",
        ":ULLAGE-TWO-INGRESS - [0:0]",
        "-A ULLAGE-TWO-REJECT -d 10.9.0.6/32 -p tcp --dport 1 -j REJECT --reject-with tcp-reset",
        "COMMIT",
    ]


def test_chains_are_removed_and_those_of_others_stay() -> None:
    saved = """# Generated by iptables-save
*filter
:FORWARD ACCEPT [0:0]
:KC-FWD - [0:0]
:ULLAGE-TWO-FORWARD - [0:0]
:ULLAGE-TWO-REJECT - [0:0]
-A FORWARD -s 10.250.2.0/24 -j ULLAGE-TWO-FORWARD
-A FORWARD -j KC-FWD
-A OUTPUT -j ULLAGE-TWO-REJECT
-A ULLAGE-TWO-FORWARD -j ULLAGE-TWO-REJECT
COMMIT
"""
    assert proxy.removal("two", saved).splitlines() == [
        "*filter",
        "-D FORWARD -s 10.250.2.0/24 -j ULLAGE-TWO-FORWARD",
        "-D OUTPUT -j ULLAGE-TWO-REJECT",
        "-F ULLAGE-TWO-FORWARD",
        "-F ULLAGE-TWO-REJECT",
        "-X ULLAGE-TWO-FORWARD",
        "-X ULLAGE-TWO-REJECT",
        "COMMIT",
    ]


def test_clusters_of_two_numbers_share_nothing(tmp_path: Path) -> None:
    one = ClusterSettings(tmp_path)
    two = ClusterSettings(tmp_path, "two", 2)
    for field in ("home", "node", "bridge", "address", "pod_range", "service_range", "socket"):
        assert getattr(one, field) != getattr(two, field)
    assert not {one.port(it) for it in PORTS} & {two.port(it) for it in PORTS}


def test_settings_that_do_not_fit_are_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "Two"}, "--name 'Two'"),
        ({"name": "toolongname"}, "at most eight"),
        ({"number": 100}, "--number 100"),
        ({"folder": tmp_path / ("x" * 90)}, "shorter --folder"),
    ]
    for given, message in cases:
        with subtests.test(message), pytest.raises(ClusterError, match=message):
            ClusterSettings(**{"folder": Path("/c"), **given})


def test_an_archive_holds_one_file(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"some bytes")
    archive = tmp_path / "image.tar"
    write_archive(archive, "localhost/image:1", file, "inside", "/inside", "word")

    with tarfile.open(archive) as tar:

        def blob(descriptor: Object) -> bytes:
            stream = tar.extractfile(f"blobs/{descriptor['digest'].replace(':', '/')}")
            assert stream
            return stream.read()

        index = tar.extractfile("index.json")
        assert index
        [described] = json.loads(index.read())["manifests"]
        manifest = json.loads(blob(described))
        config = json.loads(blob(manifest["config"]))
        layer = tmp_path / "layer.tar"
        layer.write_bytes(blob(manifest["layers"][0]))

    assert described["annotations"] == {"io.containerd.image.name": "localhost/image:1"}
    assert config["config"]["Entrypoint"] == ["/inside", "word"]
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
    with tarfile.open(layer) as tar:
        assert tar.getnames() == ["inside"]
        inside = tar.extractfile("inside")
        assert inside
        assert inside.read() == b"some bytes"


def test_programs_of_a_folder_may_have_short_names(tmp_path: Path) -> None:
    for name in ("kube-apiserver", "kcm", "sched"):
        (tmp_path / name).touch()
    with pytest.raises(ClusterError, match="has no kubelet; build"):
        programs(tmp_path)
    (tmp_path / "kubelet").touch()
    assert programs(tmp_path)["kube-scheduler"] == tmp_path / "sched"


def test_the_newest_whole_build_is_used(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no Kubernetes was built"):
        newest(tmp_path)
    for age, version in enumerate(("v1.36.2-a", "v1.35.0-b", "v1.37.0-c")):
        folder = tmp_path / version
        folder.mkdir()
        names = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
        for name in names[: 3 if version.endswith("c") else 4]:
            (folder / name).touch()
        os.utime(folder, (1000 - age, 1000 - age))
    assert newest(tmp_path) == tmp_path / "v1.36.2-a"


def test_a_tree_without_kubernetes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="holds no Kubernetes"):
        build(tmp_path, tmp_path / "builds")


def test_missing_programs_are_named_with_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PACKAGES.keys() - {"etcd", "ctr", "containerd"}:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError) as raised:
        check_programs()
    assert str(raised.value) == (
        "not on PATH: etcd, containerd, ctr; on Debian: apt-get install containerd etcd-server"
    )


def test_a_started_program_is_found_and_killed_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    file = tmp_path / "sleeper.pid"
    start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path)
    pid = running_pid(file)
    assert pid
    # The id alone does not name a process: the kernel uses it again.
    other = tmp_path / "other.pid"
    other.write_text(f"{pid} 1")
    assert running_pid(other) is None

    kill_all(lambda: filter(None, [running_pid(file)]))
    assert running_pid(file) is None
    os.waitpid(pid, 0)


def test_a_session_ends_with_the_jobs_of_its_shell() -> None:
    # As the suite's lanes, the job has a process group of its own.
    script = "set -m; sleep 600 & echo started; wait"
    shell = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    with shell:
        assert shell.stdout
        assert shell.stdout.readline() == b"started\n"
        assert len(session(shell.pid)) == 2
        kill_all(lambda: session(shell.pid))
    assert not any(start_time(pid) for pid in session(shell.pid))


def test_a_program_that_ends_instead_of_being_ready_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    start("etcd", [sys.executable, "-c", "print('port taken')"], tmp_path)
    with pytest.raises(ClusterError, match=r"etcd has ended; (?s:.*)port taken"):
        wait_until(lambda: False, "etcd", tmp_path)


def test_a_folder_with_files_of_others_is_refused_and_logs_stay(tmp_path: Path) -> None:
    settings = ClusterSettings(tmp_path)
    foreign = settings.home / "thesis.txt"
    foreign.parent.mkdir()
    foreign.touch()
    with pytest.raises(ClusterError, match="files of others"):
        local_cluster.make_home(settings)
    foreign.unlink()

    local_cluster.make_home(settings)
    assert started_mark(settings).exists()
    (settings.home / "log" / "etcd.log").touch()
    os.mkfifo(settings.socket)
    (settings.home / "etcd" / "member").mkdir(parents=True)
    remove_files(settings)
    assert [path.name for path in settings.home.rglob("*")] == ["log", "etcd.log"]


def test_only_the_suite_takes_arguments_of_pytest(capsys: pytest.CaptureFixture[str]) -> None:
    assert local_cluster.split(["test", "--", "-k", "a -- b"]) == (["test"], ["-k", "a -- b"])
    with pytest.raises(SystemExit):
        local_cluster.main(["up", "--", "-k", "drain"])
    assert "only test takes" in capsys.readouterr().err


def test_help_shows_examples() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "local_cluster.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "examples:" in shown
    assert "local_cluster.py test -- -k drain" in shown
