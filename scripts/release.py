#!/usr/bin/env python3
"""Release a version: changelog, versions, checks, commit, tag, wheel, images, chart and SBOMs.

usage: release.py VERSION [--dry-run] [--out DIR] [--registry HOST/FOLDER] [--images NAME ...]
                  [--skip-check]

The steps, of which each stops the release where it fails:

1. The tree is clean, VERSION is newer than the current one, its tag is free, and `newsfragments/`
   has something to tell.
2. The version is written into pyproject.toml and the chart, and towncrier joins the fragments into
   CHANGELOG.md.
3. `make check` passes.
4. A commit `release: VERSION` and a tag vVERSION are made. Nothing is pushed.
5. DIR gets the wheel, the images as OCI archives, the chart, a CycloneDX SBOM of the Python
   packages of each image, and SHA256SUMS.
6. With --registry the images and the chart, as an OCI artefact, are pushed there.

Until step 4 `git checkout . && git clean -f newsfragments` takes everything back.

examples:
  release.py 0.2.0 --dry-run
  release.py 0.2.0
  release.py 0.2.0 --registry ghcr.io/ullage --images operator engine engine-cuda
"""

import argparse
import contextlib
import hashlib
import re
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
TOOLS = ("towncrier", "cyclonedx-py", "helm")
"""Programs that the release needs from the virtual environment."""
_PROJECT_VERSION = re.compile(r'^version = ".*"$', re.MULTILINE)
_CHART_VERSION = re.compile(r"^(version|appVersion): .*$", re.MULTILINE)


class ReleaseError(Exception):
    """The release cannot go on; the message is one line with the remedy."""


@dataclass(frozen=True, slots=True)
class Release:
    """One release.

    Attributes:
        version: a version of PEP 440 that is one of semantic versioning, too.
        out: folder of the artefacts.
        registry: host and folder that images and chart are pushed to; empty: nowhere.
        images: names of images in docker/Dockerfile.
    """

    version: str
    out: Path
    registry: str
    images: tuple[str, ...]

    @property
    def tag(self) -> str:
        return f"v{self.version}"

    @property
    def chart_archive(self) -> Path:
        return self.out / f"ullage-{self.version}.tgz"


# --- Deciding ---


def check_version(version: str, current: str) -> None:
    """Check that a version may follow the current one.

    Raises:
        ReleaseError: it is malformed, or not newer.
    """
    try:
        parsed = Version(version)
    except InvalidVersion as error:
        raise ReleaseError(f"version {version!r} is malformed; use one as 0.2.0") from error
    if len(parsed.release) != 3 or str(parsed) != version or parsed.is_prerelease:
        raise ReleaseError(f"version {version!r} is not MAJOR.MINOR.PATCH; use one as 0.2.0")
    if parsed <= Version(current):
        raise ReleaseError(f"version {version} is not above {current}; use a higher one")


def with_project_version(text: str, version: str) -> str:
    """Return the text of pyproject.toml with another version."""
    return _PROJECT_VERSION.sub(f'version = "{version}"', text, count=1)


def with_chart_version(text: str, version: str) -> str:
    """Return the text of a Chart.yaml with another version of chart and application."""
    return _CHART_VERSION.sub(rf"\1: {version}", text)


def requirements(wheels: Sequence[Path]) -> list[str]:
    """Return the packages in a folder of wheels as exact requirements, by name."""
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
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def current_version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def fragments() -> list[Path]:
    """Return the files of news that the release tells."""
    folder = ROOT / "newsfragments"
    return sorted(path for path in folder.glob("*.*.md") if path.name != "README.md")


def check_tree(release: Release) -> None:
    """Check that the repository is ready for the release.

    Raises:
        ReleaseError: it is not.
    """
    check_version(release.version, current_version())
    if changes := git("status", "--porcelain"):
        raise ReleaseError(f"the tree has changes ({changes.splitlines()[0].strip()}); commit them")
    if git("tag", "--list", release.tag):
        raise ReleaseError(f"tag {release.tag} exists; use a higher version")
    if not fragments():
        raise ReleaseError("newsfragments/ is empty; say what changed (newsfragments/README.md)")


def check_tools() -> None:
    """Check that every program that a release runs is there.

    Raises:
        ReleaseError: one is missing.
    """
    if missing := [tool for tool in TOOLS if not (BIN / tool).exists()]:
        raise ReleaseError(
            f"{', '.join(missing)} is missing; pip install -c constraints.txt -e '.[release]'"
        )


def write_versions(release: Release) -> None:
    files = {
        ROOT / "pyproject.toml": with_project_version,
        CHART / "Chart.yaml": with_chart_version,
    }
    for path, with_version in files.items():
        text = path.read_text(encoding="utf-8")
        path.write_text(with_version(text, release.version), encoding="utf-8")
    run(BIN / "towncrier", "build", "--yes", "--version", release.version)


def commit(release: Release) -> None:
    run("git", "add", "--all")
    message = f"release: publish {release.version}\n\nCHANGELOG.md says what changed."
    run("git", "commit", "--quiet", "--message", message)
    run("git", "tag", "--annotate", release.tag, "--message", f"Ullage {release.version}")


def make_artefacts(release: Release) -> None:
    release.out.mkdir(parents=True, exist_ok=True)
    pip = (BIN / "python", "-m", "pip")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", release.out, ".")
    run(BIN / "helm", "lint", CHART)
    run(BIN / "helm", "package", CHART, "--destination", release.out)
    run(BIN / "python", "scripts/images.py", "--out", release.out, *release.images)
    for name in release.images:
        make_sbom(release, name)

    sums = release.out / "SHA256SUMS"
    files = [path for path in release.out.iterdir() if path.is_file() and path != sums]
    sums.write_text(checksums(files), encoding="utf-8")


def make_sbom(release: Release, image: str) -> None:
    """Write the SBOM of an image's Python packages; its base has dpkg's own list."""
    folder = release.out / "build" / "wheels" / image
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(requirements(sorted(folder.glob("*.whl")))) + "\n")
    sbom = release.out / f"{image}.cdx.json"
    output = ("--output-reproducible", "--of", "JSON", "--output-file", sbom)
    run(BIN / "cyclonedx-py", "requirements", listed, *output)


def push(release: Release) -> None:
    """Push images and chart; `buildah login` and `helm registry login` come before."""
    for name in release.images:
        archive = release.out / f"{name}.tar"
        target = f"docker://{release.registry}/{name}:{release.version}"
        with buildah_root(release) as buildah:
            run(*buildah, "pull", "--quiet", f"oci-archive:{archive}")
            source = f"localhost/ullage/{name}:{release.version}"
            run(*buildah, "push", *insecure(release.registry, "--tls-verify=false"), source, target)
    plain = insecure(release.registry, "--plain-http")
    run(BIN / "helm", "push", release.chart_archive, f"oci://{release.registry}/charts", *plain)


def insecure(registry: str, option: str) -> list[str]:
    """Return the option for a registry without TLS, which only this machine may have."""
    host = registry.split("/")[0].rsplit(":", 1)[0]
    return [option] if host in ("localhost", "127.0.0.1") else []


@contextlib.contextmanager
def buildah_root(release: Release) -> Iterator[list[str]]:
    """Give buildah a store of its own for a push."""
    folder = release.out / "build" / "push"
    try:
        store = ["--root", f"{folder}/storage", "--runroot", f"{folder}/run"]
        yield ["buildah", *store, "--storage-driver", "vfs"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    made = argparse.ArgumentParser(
        description=summary,
        epilog=rest.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("version", metavar="VERSION")
    made.add_argument("--dry-run", action="store_true", help="check, and show the news")
    made.add_argument("--out", type=Path, default=ROOT / "dist" / "release", metavar="DIR")
    made.add_argument("--registry", default="", metavar="HOST/FOLDER")
    made.add_argument("--images", nargs="+", default=USUAL_IMAGES, metavar="NAME")
    made.add_argument("--skip-check", action="store_true", help="`make check` passed just now")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    release = Release(
        version=options.version,
        out=options.out.resolve(),
        registry=options.registry.removeprefix("oci://").rstrip("/"),
        images=tuple(options.images),
    )
    try:
        check_tree(release)
        if options.dry_run:
            run(BIN / "towncrier", "build", "--draft", "--version", release.version)
            return 0

        check_tools()
        write_versions(release)
        if not options.skip_check:
            run("make", "check")
        commit(release)
        make_artefacts(release)
        if release.registry:
            push(release)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{release.out} has {release.tag}; `git push --follow-tags` publishes commit and tag")
    return 0


if __name__ == "__main__":
    sys.exit(main())
