"""The node: a bridge, containerd, kubelet, and GPUs that only their count pretends."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from ullage_local_cluster.archives import write_archive
from ullage_local_cluster.control_plane import kubectl
from ullage_local_cluster.processes import end, run, start, stop, wait_until
from ullage_local_cluster.settings import ClusterError, Settings

PAUSE = "localhost/ullage-cluster/pause:1"
GPUS = 8
STORAGE_CLASS = "rwx"
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
CGROUPS = Path("/sys/fs/cgroup")
CONTAINERD = """version = 2
root = "{home}/containerd"
state = "{home}/run"
disabled_plugins = ["io.containerd.nri.v1.nri"]
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{home}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        Root = "{home}/runc"
"""


def cni_folder() -> Path:
    """Return the folder of the CNI plugins."""
    for folder in CNI_FOLDERS:
        if (folder / "bridge").exists() and (folder / "host-local").exists():
            return folder
    raise ClusterError(
        f"no CNI plugins in {' or '.join(map(str, CNI_FOLDERS))}; on Debian: apt-get install "
        "containernetworking-plugins"
    )


def check_kernel() -> None:
    """Check what the kernel has to do for traffic between pods of one bridge."""
    if not BRIDGED.exists() or BRIDGED.read_text().strip() != "1":
        raise ClusterError(
            "Services need iptables on bridged traffic; run modprobe br_netfilter && sysctl -w "
            "net.bridge.bridge-nf-call-iptables=1"
        )
    if FORWARDING.read_text().strip() != "1":
        raise ClusterError("the kernel forwards no packets; run sysctl -w net.ipv4.ip_forward=1")


def add_bridge(settings: Settings) -> None:
    """Add the bridge that has the node's address. The API server listens there."""
    run("ip", "link", "add", settings.bridge, "type", "bridge")
    run("ip", "address", "add", f"{settings.address}/24", "dev", settings.bridge)
    run("ip", "link", "set", settings.bridge, "up")
    # Programs of this machine reach Services even where no default route leads anywhere.
    run("ip", "route", "add", settings.service_range, "dev", settings.bridge)


def start_containerd(settings: Settings) -> None:
    """Start containerd with the image of the pods' first process."""
    home = settings.home
    network = {
        "cniVersion": "0.4.0",
        "name": settings.name,
        "plugins": [
            {
                "type": "bridge",
                "bridge": settings.bridge,
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": f"{home}/addresses",
                    "ranges": [[{"subnet": settings.pod_range, "gateway": settings.address}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }
    shutil.rmtree(home / "addresses", ignore_errors=True)
    (home / "cni").mkdir(exist_ok=True)
    (home / "cni" / "10-bridge.conflist").write_text(json.dumps(network))
    config = CONTAINERD.format(home=home, socket=settings.socket, pause=PAUSE, cni=cni_folder())
    (home / "containerd.toml").write_text(config)

    start("containerd", ["containerd", "--config", home / "containerd.toml"], home)
    log = home / "log" / "containerd.log"
    wait_until(lambda: ctr(settings, "version", check=False), "containerd answers", log)
    remove_containers(settings)

    pause = home / "pause"
    run("gcc", "-static", "-O2", "-o", pause, Path(__file__).parent / "pause.c")
    archive = home / "pause.tar"
    write_archive(archive, PAUSE, pause, "pause", "/pause")
    ctr(settings, "images", "import", archive)


def ctr(settings: Settings, *words: str | Path, check: bool = True) -> str:
    return run("ctr", "--address", settings.socket, "--namespace", "k8s.io", *words, check=check)


def remove_containers(settings: Settings) -> None:
    """End and remove all containers, so that no shim is left."""
    for container in ctr(settings, "containers", "list", "--quiet").split():
        ctr(settings, "tasks", "kill", "--signal", "SIGKILL", container, check=False)
        ctr(settings, "tasks", "delete", "--force", container, check=False)
        ctr(settings, "containers", "delete", container, check=False)


def start_kubelet(settings: Settings, program: Path) -> None:
    """Start kubelet, wait for the node, and give it GPUs and a volume for several pods."""
    home = settings.home
    make_control_groups(settings)
    root = home / "kubelet"
    root.mkdir(exist_ok=True)
    # Volumes that kubelet mounts have to appear in containers.
    run("mount", "--bind", root, root)
    run("mount", "--make-rshared", root)

    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": settings.address,
        "port": settings.port(5),
        "healthzPort": settings.port(6),
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{settings.name}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "evictionHard": {},
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
    command = [
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
        "the node is ready",
        home / "log" / "kubelet.log",
    )
    patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(GPUS)}]
    status = ("--subresource=status", "--type=json", f"--patch={json.dumps(patch)}")
    kubectl(settings, "patch", "node", settings.node, *status)
    add_volume(settings)


def add_volume(settings: Settings) -> None:
    """Add a storage class with one volume that several pods may mount."""
    folder = settings.home / "shared-volume"
    shutil.rmtree(folder, ignore_errors=True)
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


def control_groups(settings: Settings) -> list[Path]:
    """Return the cluster's control group in each hierarchy of this machine."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS / settings.name]
    return [
        folder / settings.name
        for folder in CGROUPS.iterdir()
        if (folder / "cgroup.procs").exists()
    ]


def make_control_groups(settings: Settings) -> None:
    controllers = CGROUPS / "cgroup.controllers"
    if controllers.exists():
        for name in controllers.read_text().split():
            # Some cannot be delegated here. Kubelet names those that it misses.
            with contextlib.suppress(OSError):
                (CGROUPS / "cgroup.subtree_control").write_text(f"+{name}")
    for group in control_groups(settings):
        group.mkdir(exist_ok=True)


def own_processes(settings: Settings) -> set[int]:
    """Return the processes of the cluster's control groups, and the shims of its containerd."""
    pids = set()
    for group in control_groups(settings):
        for file in group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                pids |= {int(word) for word in file.read_text().split()}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_shim = Path(os.fsdecode(words[0])).name.startswith("containerd-shim")
            if is_shim and os.fsencode(settings.socket) in words:
                pids.add(int(folder.name))
    return pids


def mounts(folder: Path) -> Iterator[str]:
    """Yield the mount points in a folder, the deepest first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].replace("\\040", " ") for line in lines]
    inside = [point for point in points if Path(point).is_relative_to(folder)]
    yield from reversed(inside)


def links(settings: Settings) -> list[str]:
    """Return the cluster's links: the bridge and its ports."""
    shown: list[Mapping[str, object]] = json.loads(run("ip", "-json", "link", "show") or "[]")
    return [
        str(link["ifname"])
        for link in shown
        if settings.bridge in (link["ifname"], link.get("master"))
    ]


def stop_node(settings: Settings) -> None:
    """Stop kubelet and containerd, and remove containers, mounts, links and control groups."""
    home = settings.home
    stop("kubelet", home)
    with contextlib.suppress(ClusterError):
        remove_containers(settings)
    stop("containerd", home)
    if pids := own_processes(settings):
        end(pids)
    for point in mounts(home):
        subprocess.run(["umount", "--lazy", point], check=False)
    for link in links(settings):
        run("ip", "link", "delete", link, check=False)
    for group in control_groups(settings):
        for folder in sorted(group.rglob("*/"), reverse=True) if group.exists() else ():
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(OSError):
            group.rmdir()
    for folder in ("kubelet", "run", "runc", "addresses"):
        shutil.rmtree(home / folder, ignore_errors=True)
