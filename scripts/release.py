#!/usr/bin/env python3
"""Release a version: changelog, versions, checks, commit, tag, wheel, images, chart and SBOMs.

usage: release.py VERSION [--dry-run] [--out DIR] [--registry HOST/FOLDER] [--plain-http]
                  [--images NAME ...] [--base IMAGE] [--skip-check]

The steps run in this order, and the release stops at the first that fails:

1. The script checks that the tree is clean, that VERSION is newer than the current one, that its
   tag is free, that `newsfragments/` has news, and that every program is installed.
2. It writes the version into pyproject.toml and the chart, and towncrier joins the fragments into
   CHANGELOG.md.
3. `make check` passes.
4. It makes a commit `release: publish VERSION` and a tag vVERSION. It pushes neither.
5. It writes the wheel, the images as OCI archives, the chart, a CycloneDX SBOM of the Python
   packages of each image, and SHA256SUMS into DIR.
6. With --registry it pushes the images and the chart, as an OCI artefact, with buildah and helm.

If step 2 or 3 fails, undo the changes:

  git restore --staged --worktree --source=HEAD -- pyproject.toml charts CHANGELOG.md newsfragments

If step 4, 5 or 6 fails, run the same command again: the commit gets its tag if the tag is missing,
and the script continues with step 5. To undo a committed release instead:
`git tag --delete vVERSION; git reset --hard HEAD~1`.

examples:
  release.py 1.2.3 --dry-run
  release.py 1.2.3
  release.py 1.2.3 --registry ghcr.io/ullage --images operator engine engine-cuda
  release.py 1.2.3 --registry registry.test:5000/ullage --plain-http
"""

import argparse
import contextlib
import hashlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
CHART = ROOT / "charts" / "ullage"
USUAL_IMAGES = ("operator", "engine")
CHANGED = ("pyproject.toml", "charts/ullage/Chart.yaml", "CHANGELOG.md", "newsfragments")
"""Paths that the release commit changes."""
REMEDIES = {
    "towncrier": ".venv/bin/pip install -c constraints.txt -e '.[release]'",
    "cyclonedx-py": ".venv/bin/pip install -c constraints.txt -e '.[release]'",
    "helm": "`make install-dev`, or put helm on the PATH",
    "buildah": "install Debian's package buildah",
}
"""How to install each program that a release runs."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_PROJECT_VERSION = re.compile(r'^version = ".*"$', re.MULTILINE)
_CHART_VERSION = re.compile(r"^(version|appVersion): .*$", re.MULTILINE)


class ReleaseError(Exception):
    """The release cannot continue. The message names the reason and the remedy in one line."""


@dataclass(frozen=True, slots=True)
class Release:
    """The settings of one release.

    Attributes:
        version: a PEP 440 version that is also a semantic version.
        out: folder for the artefacts.
        registry: host and folder to which to push images and chart (empty to push nothing).
        images: names of the images in docker/Dockerfile to build.
        base: base image for the images (empty to build a base image).
        is_plain: whether the registry has no TLS.
    """

    version: str
    out: Path
    registry: str
    images: tuple[str, ...]
    base: str
    is_plain: bool

    @property
    def tag(self) -> str:
        return f"v{self.version}"

    @property
    def subject(self) -> str:
        """The first line of the release commit's message."""
        return f"release: publish {self.version}"

    @property
    def chart_archive(self) -> Path:
        return self.out / f"ullage-{self.version}.tgz"


# --- Deciding ---


def check_version(version: str, current: str) -> None:
    """Check that a version may follow the current version.

    Raises:
        ReleaseError: the version is malformed, or not newer than the current version.
    """
    try:
        parsed = Version(version)
    except InvalidVersion as error:
        raise ReleaseError(f"version {version!r} is malformed; use one such as 1.2.3") from error
    if len(parsed.release) != 3 or str(parsed) != version or parsed.is_prerelease:
        raise ReleaseError(f"version {version!r} is not MAJOR.MINOR.PATCH; use one such as 1.2.3")
    if parsed <= Version(current):
        raise ReleaseError(f"version {version} is not above {current}; use a higher one")


def with_project_version(text: str, version: str) -> str:
    """Return the text of pyproject.toml with its version replaced."""
    return _PROJECT_VERSION.sub(f'version = "{version}"', text, count=1)


def with_chart_version(text: str, version: str) -> str:
    """Return the text of a Chart.yaml with its chart and application versions replaced."""
    return _CHART_VERSION.sub(rf"\1: {version}", text)


def requirements(wheels: Sequence[Path]) -> list[str]:
    """Return exact requirements for all packages in a folder of wheels, sorted by name."""
    parsed = [parse_wheel_filename(wheel.name) for wheel in wheels]
    return sorted({f"{name}=={version}" for name, version, *_ in parsed})


def checksums(files: Sequence[Path]) -> str:
    """Return the lines of a SHA256SUMS file."""
    return "".join(f"{_sha256(file)}  {file.name}\n" for file in sorted(files))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- Acting ---


def run(*command: str | Path) -> None:
    """Run a command in the repository's root.

    Raises:
        ReleaseError: the command failed.
    """
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    done = subprocess.run(words, cwd=ROOT, check=False)
    if done.returncode:
        raise ReleaseError(f"{words[0]} ended with {done.returncode}; see above")


def git(*arguments: str) -> str:
    """Return the output of git in the repository's root.

    Raises:
        ReleaseError: git failed, for example outside of a repository.
    """
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[:1]
        raise ReleaseError(f"git {arguments[0]}: {' '.join(reason)}; use a clone of the repository")
    return done.stdout.strip()


def program(name: str) -> str:
    """Return a program's path in the virtual environment or on the PATH (empty if not found)."""
    inside = BIN / name
    return str(inside) if inside.exists() else shutil.which(name) or ""


def current_version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def fragments() -> list[Path]:
    """Return the news fragments of the release."""
    folder = ROOT / "newsfragments"
    return sorted(path for path in folder.glob("*.*.md") if path.name != "README.md")


def is_committed(release: Release) -> bool:
    """Return whether HEAD is this release's commit, so that only the artefacts are missing.

    Raises:
        ReleaseError: the release's tag points to another commit.
    """
    if not git("tag", "--list", release.tag):
        if git("log", "-1", "--format=%s") != release.subject:
            return False
        tag(release)
    tagged = git("rev-list", "--max-count=1", release.tag)
    head = git("rev-parse", "HEAD")
    if tagged != head or current_version() != release.version:
        raise ReleaseError(
            f"tag {release.tag} is at {tagged[:8]} and HEAD at {head[:8]}; use a higher version, "
            f"or check out {release.tag} to make its artefacts"
        )
    return True


def check_tree(release: Release) -> None:
    """Check that the repository is ready for the release.

    Raises:
        ReleaseError: the repository is not ready.
    """
    check_clean()
    check_version(release.version, current_version())
    if not fragments():
        raise ReleaseError("newsfragments/ is empty; say what changed (newsfragments/README.md)")


def check_clean(*options: str) -> None:
    if changes := git("status", "--porcelain", *options):
        raise ReleaseError(f"the tree has changes ({changes.splitlines()[0].strip()}); commit them")


def check_programs(names: Sequence[str]) -> None:
    """Check that all programs that the release needs are installed.

    Raises:
        ReleaseError: a program is missing.
    """
    for name in names:
        if not program(name):
            raise ReleaseError(f"{name} is missing; {REMEDIES[name]}")


def check_target(release: Release) -> None:
    """Check the names of the images and the registry.

    Raises:
        ReleaseError: a name is wrong.
    """
    images = runpy.run_path(str(ROOT / "scripts" / "images.py"))["IMAGES"]
    if unknown := sorted(set(release.images) - set(images)):
        raise ReleaseError(f"--images {' '.join(unknown)} is none of {', '.join(images)}")
    host, _, folder = release.registry.partition("/")
    if release.registry and not (host and folder):
        raise ReleaseError(f"--registry {release.registry!r} is not HOST/FOLDER; ghcr.io/ullage is")


def write_versions(release: Release) -> None:
    files = {
        ROOT / "pyproject.toml": with_project_version,
        CHART / "Chart.yaml": with_chart_version,
    }
    for path, with_version in files.items():
        text = path.read_text(encoding="utf-8")
        path.write_text(with_version(text, release.version), encoding="utf-8")
    run(program("towncrier"), "build", "--yes", "--version", release.version)


def commit(release: Release) -> None:
    run("git", "add", "--all", "--", *CHANGED)
    message = f"{release.subject}\n\nCHANGELOG.md says what changed."
    run("git", "commit", "--quiet", "--message", message)
    tag(release)


def tag(release: Release) -> None:
    run("git", "tag", "--annotate", release.tag, "--message", f"Ullage {release.version}")


def make_artefacts(release: Release) -> None:
    release.out.mkdir(parents=True, exist_ok=True)
    pip = (BIN / "python", "-m", "pip")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", release.out, ".")
    helm = program("helm")
    run(helm, "lint", CHART)
    run(helm, "package", CHART, "--destination", release.out)
    base = ("--base", release.base) if release.base else ()
    run(BIN / "python", "scripts/images.py", "--out", release.out, *base, *release.images)
    for name in release.images:
        make_sbom(release, name)

    sums = release.out / "SHA256SUMS"
    files = [path for path in release.out.iterdir() if path.is_file() and path != sums]
    sums.write_text(checksums(files), encoding="utf-8")


def make_sbom(release: Release, image: str) -> None:
    """Write an SBOM for an image's Python packages.

    The SBOM leaves out the base image's packages, which are in dpkg's own list, and pip, which
    installs the packages during the build and is in no image.
    """
    folder = release.out / "build" / "wheels" / image
    wheels = [wheel for wheel in folder.glob("*.whl") if not wheel.name.startswith("pip-")]
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(requirements(wheels)) + "\n")
    sbom = release.out / f"{image}.cdx.json"
    output = ("--output-reproducible", "--of", "JSON", "--output-file", sbom)
    run(program("cyclonedx-py"), "requirements", listed, *output)


def push(release: Release) -> None:
    """Push images and chart. Log in first with `buildah login` and `helm registry login`."""
    for name in release.images:
        archive = release.out / f"{name}.tar"
        target = f"docker://{release.registry}/{name}:{release.version}"
        with buildah_root(release) as buildah:
            run(*buildah, "pull", "--quiet", f"oci-archive:{archive}")
            source = f"localhost/ullage/{name}:{release.version}"
            plain = ("--tls-verify=false",) if release.is_plain else ()
            run(*buildah, "push", *plain, source, target)

    plain = ("--plain-http",) if release.is_plain else ()
    charts = f"oci://{release.registry}/charts"
    run(program("helm"), "push", release.chart_archive, charts, *plain)


def is_local(registry: str) -> bool:
    """Return whether a registry is on this machine. Such registries have no TLS."""
    host = registry.partition("/")[0]
    return any(host == name or host.startswith(f"{name}:") for name in LOOPBACK)


@contextlib.contextmanager
def buildah_root(release: Release) -> Iterator[list[str]]:
    """Create a separate buildah store for a push."""
    folder = release.out / "build" / "push"
    try:
        store = ["--root", f"{folder}/storage", "--runroot", f"{folder}/run"]
        yield ["buildah", *store, "--storage-driver", "vfs"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    options = argparse.ArgumentParser(
        description=summary,
        epilog=rest.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("version", metavar="VERSION", help="MAJOR.MINOR.PATCH, such as 1.2.3")
    options.add_argument("--dry-run", action="store_true", help="check, and show the news")
    options.add_argument(
        "--out", type=Path, metavar="DIR", help="of the artefacts; default: dist/release/VERSION"
    )
    options.add_argument("--registry", default="", metavar="HOST/FOLDER", help="push there")
    options.add_argument(
        "--plain-http", action="store_true", help="no TLS; always so for a registry on localhost"
    )
    options.add_argument(
        "--images",
        nargs="+",
        default=USUAL_IMAGES,
        metavar="NAME",
        help=f"default: {' '.join(USUAL_IMAGES)}",
    )
    options.add_argument("--base", default="", metavar="IMAGE", help="as for scripts/images.py")
    options.add_argument("--skip-check", action="store_true", help="`make check` passed just now")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    registry = options.registry.removeprefix("oci://").rstrip("/")
    release = Release(
        version=options.version,
        out=(options.out or ROOT / "dist" / "release" / options.version).resolve(),
        registry=registry,
        images=tuple(options.images),
        base=options.base,
        is_plain=options.plain_http or is_local(registry),
    )
    try:
        if options.dry_run:
            check_programs(["towncrier"])
            check_tree(release)
            run(program("towncrier"), "build", "--draft", "--version", release.version)
            return 0

        check_target(release)
        check_programs([name for name in REMEDIES if name != "buildah" or registry])
        if is_committed(release):
            check_clean("--untracked-files=no")  # artefacts may be in the checkout
            print(f"HEAD is {release.tag}: making its artefacts", flush=True)
        else:
            check_tree(release)
            write_versions(release)
            if not options.skip_check:
                run("make", "check")
            commit(release)

        make_artefacts(release)
        if registry:
            push(release)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{release.out} has {release.tag}; `git push --follow-tags` publishes commit and tag")
    return 0


if __name__ == "__main__":
    sys.exit(main())
