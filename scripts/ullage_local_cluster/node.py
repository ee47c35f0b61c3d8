"""Sets up the node: a network bridge, the kubelet, and fake GPUs."""

import contextlib
import json
import sys
from pathlib import Path

from ullage_local_cluster.cleanup import CGROUPS, control_groups
from ullage_local_cluster.control_plane import api_client, kubectl
from ullage_local_cluster.processes import run, start, wait_until
from ullage_local_cluster.settings import ClusterError, ClusterSettings

GPUS = 8
STORAGE_CLASS = "rwx"
BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


def check_kernel() -> None:
    """Check the kernel's settings for traffic between pods on one bridge."""
    if not BRIDGED.exists() or BRIDGED.read_text().strip() != "1":
        raise ClusterError(
            "Services need iptables on bridged traffic; run modprobe br_netfilter && sysctl -w "
            "net.bridge.bridge-nf-call-iptables=1"
        )
    if FORWARDING.read_text().strip() != "1":
        raise ClusterError("the kernel forwards no packets; run sysctl -w net.ipv4.ip_forward=1")


def add_bridge(settings: ClusterSettings) -> None:
    """Add the bridge with the node's address, on which the API server listens."""
    run("ip", "link", "add", settings.bridge, "type", "bridge")
    run("ip", "address", "add", f"{settings.address}/24", "dev", settings.bridge)
    run("ip", "link", "set", settings.bridge, "up")
    # Programs of this machine reach Services even where no default route leads anywhere.
    run("ip", "route", "add", settings.service_range, "dev", settings.bridge)


def start_proxy(settings: ClusterSettings) -> None:
    """Start the program that implements Services, NetworkPolicies and DNS."""
    module = (sys.executable, "-m", "ullage_local_cluster.proxy")
    arguments = (str(settings.folder), settings.name, str(settings.number))
    scripts = Path(__file__).parents[1]
    start("proxy", [*module, *arguments], settings.home, {"PYTHONPATH": str(scripts)})


def start_kubelet(settings: ClusterSettings, program: Path) -> None:
    """Start the kubelet, wait until the node is ready, and advertise fake GPUs on the node."""
    home = settings.home
    make_control_groups(settings)
    root = home / "kubelet"
    root.mkdir()
    # Volumes that kubelet mounts have to appear in containers.
    run("mount", "--bind", root, root)
    # Otherwise they would appear a second time beneath this mount's parent.
    run("mount", "--make-private", root)
    run("mount", "--make-rshared", root)

    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": settings.address,
        "port": settings.port("kubelet"),
        "healthzPort": settings.port("kubelet-health"),
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{settings.group}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "evictionHard": {},
        # No registry has the images, so none may be removed when the disk fills.
        "imageGCHighThresholdPercent": 100,
        "failSwapOn": False,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": f"{home}/pki/ca.crt"},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": f"unix://{settings.socket}",
        "clusterDNS": [settings.address],
        "clusterDomain": "cluster.local",
        "podLogsDir": f"{home}/log/pods",
        # Another kubelet of this machine has the same chains.
        "makeIPTablesUtilChains": False,
    }
    (home / "kubelet.json").write_text(json.dumps(config))
    command: list[str | Path] = [
        program,
        f"--config={home}/kubelet.json",
        f"--kubeconfig={home}/kubelet.conf",
        f"--root-dir={root}",
        f"--cert-dir={home}/pki",
        f"--hostname-override={settings.node}",
        f"--node-ip={settings.address}",
    ]
    start("kubelet", command, home)
    ready = ("get", "node", settings.node, "--output", "jsonpath={.status.conditions}")
    wait_until(
        lambda: '"reason":"KubeletReady","status":"True"' in kubectl(settings, *ready, check=False),
        "kubelet",
        home,
    )

    # Debian 12's kubectl knows no subresources.
    patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(GPUS)}]
    with api_client(settings) as client:
        status = client.patch(
            f"/api/v1/nodes/{settings.node}/status",
            headers={"Content-Type": "application/json-patch+json"},
            content=json.dumps(patch),
        )
        status.raise_for_status()


def make_control_groups(settings: ClusterSettings) -> None:
    controllers = CGROUPS / "cgroup.controllers"
    if controllers.exists():
        for name in controllers.read_text().split():
            # Some cannot be delegated here. Kubelet names those that it misses.
            with contextlib.suppress(OSError):
                (CGROUPS / "cgroup.subtree_control").write_text(f"+{name}")
    for group in control_groups(settings):
        group.mkdir(exist_ok=True)


def add_volume(settings: ClusterSettings) -> None:
    """Add a storage class with one volume that several pods can mount."""
    folder = settings.home / "shared-volume"
    folder.mkdir()
    folder.chmod(0o777)
    storage = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": STORAGE_CLASS},
        "provisioner": "kubernetes.io/no-provisioner",
    }
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{STORAGE_CLASS}-1"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": STORAGE_CLASS,
            "hostPath": {"path": str(folder)},
        },
    }
    manifest = settings.home / "volume.json"
    items = {"apiVersion": "v1", "kind": "List", "items": [storage, volume]}
    manifest.write_text(json.dumps(items))
    kubectl(settings, "apply", "--filename", manifest)
