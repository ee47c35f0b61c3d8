"""Run a real single-node Kubernetes cluster on this machine, without a virtual machine.

`up` starts etcd, Kubernetes's control plane, containerd and the kubelet, with a small separate
network, and imports the images of `make images`. `down` stops and removes all of them, even after a
crash. `test` runs `up`, then scripts/e2e.sh with the given pytest arguments, then `down`. `check`
checks this machine and builds Kubernetes if needed, but starts nothing.

The Kubernetes programs come from a source tree, which is built once, or from a folder. Without
either, the programs of the last build are used. The cluster needs root, and the Debian packages
etcd-server, containerd, runc, containernetworking-plugins, kubernetes-client, iptables and gcc.

examples:
  python scripts/local_cluster.py test --source ~/kubernetes   build it, and run the suite
  python scripts/local_cluster.py test -- -k drain             one lane, with the last build
  python scripts/local_cluster.py up --programs /opt/k8s/bin   start, and print how to use it
  python scripts/local_cluster.py up --name two --number 2     a second cluster
  python scripts/local_cluster.py down

exit status: 0 done, 1 tests failed, 2 the cluster cannot run, 130 interrupted
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ullage_local_cluster.cleanup import links, started_mark, take_down
from ullage_local_cluster.containerd import (
    SECOND_TAG,
    cni_folder,
    import_model,
    import_product,
    start_containerd,
)
from ullage_local_cluster.control_plane import kubectl, make_credentials, start_control_plane
from ullage_local_cluster.kubernetes_build import build, newest, programs
from ullage_local_cluster.node import (
    STORAGE_CLASS,
    add_bridge,
    add_volume,
    check_kernel,
    start_kubelet,
    start_proxy,
)
from ullage_local_cluster.processes import check_programs, kill_all, run, running_pid, session
from ullage_local_cluster.settings import ClusterError, ClusterSettings

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "dist" / "images"
BUILDS = "kubernetes"
"""Name of the folder with built programs. It is too long to be the name of a cluster."""
NO_CLUSTER = 2
INTERRUPTED = 130


def main(words: Sequence[str]) -> int:
    """Run one command of the script, and return its exit status."""
    # argparse would drop the `--` that separates pytest's options from these.
    own, pytest_arguments = split(words)
    options = parser().parse_args(own)
    if pytest_arguments and options.command != "test":
        parser().error("only test takes arguments of pytest")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        settings = ClusterSettings(options.folder.resolve(), options.name, options.number)
        if os.geteuid() != 0:
            raise ClusterError("containers need root; run this with sudo")
        if options.command == "down":
            down(settings)
            return 0
        check_machine()
        programs_by_name = find_programs(options.programs, options.source, settings.folder / BUILDS)
        if options.command == "test":
            return test(settings, programs_by_name, options.manifests, pytest_arguments)
        if options.command == "up":
            up(settings, programs_by_name, options.manifests)
        return 0
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_CLUSTER
    except KeyboardInterrupt:
        return INTERRUPTED


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line into the words before and after the first `--`."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def check_machine() -> None:
    """Check that this machine has everything that a cluster needs, except for Kubernetes."""
    check_programs()
    check_kernel()
    cni_folder()


def find_programs(ready: Path | None, source: Path | None, builds: Path) -> dict[str, Path]:
    """Return the paths of Kubernetes's programs: from a folder, a source tree or the last build."""
    if not ready:
        ready = build(source, builds) if source else newest(builds)
    return programs(ready)


def up(
    settings: ClusterSettings, programs_by_name: Mapping[str, Path], manifests: str | None
) -> dict[str, str]:
    """Start the cluster, and return the test suite's variables. A failed start leaves nothing."""
    check_free(settings)
    began = time.monotonic()
    make_home(settings)
    try:
        print(f"starting {programs_by_name['kubelet'].parent} in {settings.home}", flush=True)
        make_credentials(settings)
        add_bridge(settings)
        start_control_plane(settings, programs_by_name)
        start_containerd(settings)
        start_proxy(settings)
        start_kubelet(settings, programs_by_name["kubelet"])
        import_product(settings, IMAGES)
        add_volume(settings)
        if manifests:
            kubectl(settings, "apply", "--server-side", "--filename", manifests)
        variables = {
            "KUBECONFIG": str(settings.kubeconfig),
            "ULLAGE_E2E_RWX": STORAGE_CLASS,
            "ULLAGE_E2E_TAG": SECOND_TAG,
        }
        if model := import_model(settings):
            variables["ULLAGE_E2E_MODEL"] = model
    except BaseException:
        down(settings)
        raise

    print(f"{settings.node} is ready after {time.monotonic() - began:.0f} s:", flush=True)
    for name, value in variables.items():
        print(f"export {name}={value}", flush=True)
    return variables


def check_free(settings: ClusterSettings) -> None:
    """Remove a crashed cluster with the same folder and name.

    Raises:
        ClusterError: The cluster is running, or a cluster in another folder has the same name.
    """
    if any(running_pid(file) for file in settings.home.glob("*.pid")):
        raise ClusterError(f"{settings.home} has a running cluster; end it with down")
    if started_mark(settings).exists():
        down(settings)
    if taken := links(settings):
        raise ClusterError(
            f"the link {taken[0]} exists; take down the other folder's cluster of this name, or "
            "give another --name and --number"
        )
    if f" {settings.address}/" in run("ip", "-oneline", "address", "show"):
        raise ClusterError(
            f"another cluster of this machine has the address {settings.address}; give another "
            "--number"
        )


def make_home(settings: ClusterSettings) -> None:
    """Create the cluster's folder, with a mark file that lets `down` remove the whole folder."""
    home = settings.home
    if home.exists() and any(path.name != "log" for path in home.iterdir()):
        raise ClusterError(f"{home} has files of others; give another --folder")
    shutil.rmtree(home / "log", ignore_errors=True)
    (home / "log").mkdir(parents=True)
    started_mark(settings).touch()


def down(settings: ClusterSettings) -> None:
    """Stop the cluster, and remove everything except its logs. Ctrl-C does not interrupt this."""
    if not started_mark(settings).exists():
        print(f"no cluster in {settings.home}", flush=True)
        return
    print(f"taking down {settings.node} (logs: {settings.home}/log)", flush=True)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        take_down(settings)
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def test(
    settings: ClusterSettings,
    programs_by_name: Mapping[str, Path],
    manifests: str | None,
    arguments: Sequence[str],
) -> int:
    """Run the test suite in a new cluster, and return the suite's exit status."""
    variables = up(settings, programs_by_name, manifests)
    try:
        return run_suite(settings, variables, arguments)
    finally:
        down(settings)


def run_suite(
    settings: ClusterSettings, variables: dict[str, str], arguments: Sequence[str]
) -> int:
    """Run scripts/e2e.sh, and print the result."""
    temporary = settings.home / "tmp"
    temporary.mkdir()
    began = time.monotonic()
    suite = subprocess.Popen(
        [ROOT / "scripts" / "e2e.sh", sys.executable, *arguments],
        env={**os.environ, **variables, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    try:
        status = suite.wait()
    finally:
        # An interrupted suite would uninstall the chart for minutes; the cluster goes anyway.
        kill_all(lambda: session(suite.pid))
        suite.wait()
    result = "passed" if status == 0 else f"failed with {status}"
    print(f"the suite {result} after {time.monotonic() - began:.0f} s", flush=True)
    return 1 if status else 0


def parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    options = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("command", choices=("up", "down", "test", "check"))
    options.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        default=ROOT / ".cluster",
        help="of everything that is written; default: .cluster",
    )
    options.add_argument(
        "--name", default="ullage", help="of links, iptables chains and control groups (ullage)"
    )
    options.add_argument(
        "--number", type=int, default=0, help="0 to 99, of addresses and ports (0)"
    )
    options.add_argument(
        "--source", type=Path, metavar="TREE", help="source of Kubernetes, or one that vendors it"
    )
    options.add_argument(
        "--programs", type=Path, metavar="DIR", help="with kube-apiserver, kubelet, ..., ready-made"
    )
    options.add_argument(
        "--manifests", metavar="DIR", help="to apply, such as definitions of Gateway API and KEDA"
    )
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
