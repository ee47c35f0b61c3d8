"""The bundle that a GPU machine without a network installs, and the script that installs it."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import gpu_bundle
import pytest

ROOT = Path(__file__).parents[1]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PROGRAMME = 'import sys, some_words; print(some_words.WORD, " ".join(sys.argv[1:]))'


def make_wheel(folder: Path, name: str, version: str, code: str = "") -> Path:
    """Write a wheel of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", code)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(
            f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that takes the place of the network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_every_package_is_pinned() -> None:
    pins = gpu_bundle.read_pins()
    assert set(pins) == set(gpu_bundle.PACKAGES)
    assert all(version[0].isdigit() for version in pins.values())


def test_a_package_without_a_pin_is_named(tmp_path: Path) -> None:
    lines = gpu_bundle.CONSTRAINTS.read_text().splitlines()
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if not line.startswith("msgspec")))
    with pytest.raises(gpu_bundle.BundleError, match=r"pins no msgspec: add"):
        gpu_bundle.read_pins(constraints)


def test_wheels_are_fetched_once_and_the_missing_ones_are_named(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheels = tmp_path / "bundle" / "wheels"
    pins = {"some-words": "1.0", "Other.Words": "2.0"}
    make_wheel(index, "some_words", "1.0")
    make_wheel(index, "other_words", "2.0")
    fetched = gpu_bundle.fetch_wheels(pins, wheels, PYTHON)
    assert [path.name.split("-")[0] for path in fetched] == ["some_words", "other_words"]

    shutil.rmtree(index)
    assert gpu_bundle.fetch_wheels(pins, wheels, PYTHON) == fetched

    with pytest.raises(gpu_bundle.BundleError, match=r"some-words==1\.1, see above: connect"):
        gpu_bundle.fetch_wheels(pins | {"some-words": "1.1"}, wheels, PYTHON)
    assert sorted(wheels.iterdir()) == sorted(fetched), "no half of a download stays"
    assert not [path for path in wheels.parent.iterdir() if path != wheels]


def test_what_is_too_large_is_named(tmp_path: Path) -> None:
    small = tmp_path / "small.whl"
    large = tmp_path / "large.bin"
    small.write_bytes(bytes(1000))
    large.write_bytes(bytes(5000))
    assert gpu_bundle.check_size([small], [large], limit=6000).startswith("bundle 0.0 MiB")
    with pytest.raises(gpu_bundle.BundleError, match=r"would travel.*\(.*large\.bin.*small\.whl"):
        gpu_bundle.check_size([small], [large], limit=5999)


def test_a_file_is_made_again_when_it_or_its_sources_changed(tmp_path: Path) -> None:
    path = tmp_path / "oracle.json"
    path.write_text("{}")
    recorded = gpu_bundle.described(path, sources="a")
    assert not gpu_bundle.has_changed(path, recorded, "a")
    assert gpu_bundle.has_changed(path, recorded, "b")
    assert gpu_bundle.has_changed(path, None, "a")
    path.write_text("{ }")
    assert gpu_bundle.has_changed(path, recorded, "a")
    path.unlink()
    assert gpu_bundle.has_changed(path, recorded, "a")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the script, a programme that prints its arguments, and a bundle."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "gpu.sh", root / "scripts")
    (root / "benchmarks" / "gpu").mkdir(parents=True)
    (root / "benchmarks" / "gpu" / "__init__.py").touch()
    (root / "benchmarks" / "gpu" / "__main__.py").write_text(PROGRAMME)
    bundle = root / "dist" / "gpu-bundle"
    make_wheel(bundle / "wheels", "some_words", "1.0", "WORD = 'carried'")
    (bundle / "manifest.json").write_text(json.dumps({"python": PYTHON}))
    return root


def gpu(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "SITE": str(root / "site"), **variables
    }  # fmt: skip
    command = [str(root / "scripts" / "gpu.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_programme_runs_with_what_the_bundle_carries(checkout: Path) -> None:
    done = gpu(checkout, "first", "--tiny")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "carried --out gpu-results --bundle dist/gpu-bundle first --tiny\n"
    assert "unpack" in done.stderr

    again = gpu(checkout, "table", OUT="elsewhere")
    assert again.stdout == "carried table elsewhere/results.jsonl\n"
    assert not again.stderr, "unpacked once"

    make_wheel(checkout / "dist/gpu-bundle/wheels", "some_words", "1.0", "WORD = 'newer'")
    manifest = {"python": PYTHON, "commit": "another"}
    (checkout / "dist/gpu-bundle/manifest.json").write_text(json.dumps(manifest))
    assert gpu(checkout, "second").stdout.startswith("newer ")
    assert gpu(checkout, "python", "-c", "import some_words").returncode == 0


def test_what_keeps_it_from_running_is_said_with_a_remedy(checkout: Path) -> None:
    nothing = gpu(checkout)
    assert nothing.returncode == 2
    assert "say first, second" in nothing.stderr

    manifest = checkout / "dist/gpu-bundle/manifest.json"
    manifest.write_text(json.dumps({"python": "3.2"}))
    other = gpu(checkout, "first")
    assert other.returncode == 2
    assert f'make gpu-bundle ARGS="--python {PYTHON}"' in other.stderr

    manifest.unlink()
    missing = gpu(checkout, "first")
    assert missing.returncode == 2
    assert "run make gpu-bundle" in missing.stderr
