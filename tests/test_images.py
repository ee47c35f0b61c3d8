"""The images' Dockerfile and the commands that build them, without building."""

import gzip
import hashlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.__main__ import BENCHMARKS

from ullage_operator import main
from ullage_operator.api import naming
from ullage_operator.api.sections import USER
from ullage_operator.api.settings import Settings

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
FINAL = ("operator", "engine", "engine-cuda", "engine-vllm")
Stage = list[tuple[str, str]]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


images = load("images")


def stages() -> dict[str, Stage]:
    """Name of each stage -> its instructions, the first of which says what it begins with."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE))
    found: dict[str, Stage] = {}
    for line in filter(None, joined.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            source, _, name = rest.partition(" AS ")
            found[name] = [("FROM", source)]
        elif found:
            found[name].append((word, rest))
        else:
            assert (word, rest) == ("ARG", "BASE"), "the base is the caller's to name, and pin"
    return found


def values(stage: str, word: str) -> list[str]:
    return [rest for found, rest in stages()[stage] if found == word]


def test_there_is_a_stage_for_every_image_and_none_beside():
    targets = {image.target or name for name, image in images.IMAGES.items()}
    assert {*stages()} == {*targets, "base", "install"}


@pytest.mark.parametrize("name", FINAL)
def test_the_image_runs_as_the_pods_user_and_starts_its_program(name):
    assert values(name, "USER") == [f"{USER}:{USER}"]
    assert f"ullage:x:{USER}:{USER}:" in values("base", "RUN")[0]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,) = json.loads(values(name, "ENTRYPOINT")[0])
    assert entry in scripts


def test_what_installs_stays_behind():
    for name in FINAL:
        assert values(name, "FROM") == ["base"]
        assert values(name, "COPY") == ["--from=install /opt/ullage /opt/ullage"]
        assert not any("pip" in run for run in values(name, "RUN"))


def test_nothing_of_this_machine_can_get_in():
    """No file of the build context is copied, and pip asks no index."""
    copied = [v for name in stages() for word in ("COPY", "ADD") for v in values(name, word)]
    assert all(value.startswith("--from=install ") for value in copied)
    (install,) = values("install", "RUN")
    assert "--no-index --find-links /wheels" in install
    assert "direct_url.json -delete" in install
    assert not re.search(r"https?://|index-url|trusted-host|proxy", DOCKERFILE)


def test_bytecode_knows_no_times():
    """A bytecode file with its source's time would differ from build to build."""
    (install,) = values("install", "RUN")
    assert "--no-compile" in install
    assert "PYTHONHASHSEED=0" in install
    assert "compileall -qf --invalidation-mode unchecked-hash" in install  # -f: whatever is there
    assert any("PYTHONDONTWRITEBYTECODE=1" in value for value in values("base", "ENV"))
    assert values("install", "FROM") == ["base"]


def test_ports_are_those_of_the_pods():
    engine = {naming.GRPC_PORT, naming.METRICS_PORT}
    both = engine | {naming.HTTP_PORT, main.PROBES_PORT}
    for name in FINAL:
        ports = both if name == "operator" else engine
        assert {int(port) for port in values(name, "EXPOSE")[0].split()} == ports


def test_extras_are_the_projects_and_only_engines_have_torch():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    for name, image in images.IMAGES.items():
        named = [requirement for extra in image.extra.split(",") for requirement in extras[extra]]
        named += extras["engine"] if "ullage[engine]" in named else []
        assert any(requirement.startswith("vllm==") for requirement in named) is ("vllm" in name)
        has_torch = any(requirement.startswith("torch") for requirement in named)
        assert has_torch is (name != "operator")


def test_pods_run_the_images_that_are_built():
    settings = Settings()
    names = {image.split("/")[-1] for image in (settings.engine_image, settings.router_image)}
    assert names == {f"{name}:{images.version()}" for name in images.USUAL}


@pytest.mark.parametrize("tool", ["buildah", "docker"])
def test_a_target_is_built_with_its_wheels_base_and_date(tool, tmp_path):
    command = images.Build(tool, tmp_path, 1234).target("engine", "some/tag:1", "some/base@x")
    text = shlex.join(command)
    wheels = tmp_path / "wheels" / "engine"
    assert command[0] == tool
    assert command[-1] == str(wheels)
    assert f"--build-context wheels={wheels}" in text
    assert "--target engine" in text
    assert "--tag some/tag:1" in text
    assert "BASE=some/base@x" in command
    assert f"ALONE={images.DEMO_MODEL}" in command
    assert ("--timestamp=1234" in command) or ("SOURCE_DATE_EPOCH=1234" in command)


def test_only_wheels_for_the_images_python_and_c_library_are_fetched(tmp_path):
    own, needed, model = images.fetch_commands("engine", tmp_path, "aarch64")
    assert own[3:] == ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), "."]
    assert "--only-binary=:all:" in needed
    assert "--python-version=3.11" in needed
    assert "--platform=manylinux_2_28_aarch64" in needed
    assert not any("manylinux_2_37" in part for part in needed)
    assert needed[-4:-2] == ["--constraint", "constraints.txt"]
    assert model[-2:] == ["--no-deps", images.DEMO_MODEL]


@pytest.mark.parametrize(
    ("system", "machine", "compiler", "tag"),
    [
        ("linux", "x86_64", "", "manylinux_2_28_x86_64"),
        ("linux", "x86_64", "g++", "linux_x86_64"),
        ("linux", "aarch64", "", "any"),
        ("darwin", "x86_64", "", "any"),
    ],
)
def test_the_products_own_wheel_is_asked_for_by_the_name_that_it_is_built_with(
    system, machine, compiler, tag, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setenv("ULLAGE_CXX", compiler)
    _, needed, _ = images.fetch_commands("engine", tmp_path, machine)
    assert needed[-2] == f"{tmp_path}/ullage-{images.version()}-py3-none-{tag}.whl[engine,s3]"


@pytest.mark.parametrize("name", ["engine-vllm", "engine-vllm-cpu"])
def test_images_with_vllm_have_what_was_tested_with_it(name, tmp_path):
    commands = [shlex.join(command) for command in images.fetch_commands(name, tmp_path, "x86_64")]
    made = [i for i, command in enumerate(commands) if "scripts/vllm_cpu_wheel.py" in command]
    (needed,) = [i for i, command in enumerate(commands) if "--constraint" in command]
    assert "--constraint constraints-vllm.txt" in commands[needed]
    assert commands[needed].endswith(f"vllm,s3]' {images.PIP}")
    # vLLM for CPUs is preferred to the index's, being X+cpu, where it is there before.
    assert (f"--find-links {tmp_path}" in commands[needed]) is (name == "engine-vllm-cpu")
    assert made == ([needed - 1] if name == "engine-vllm-cpu" else [])
    build = images.Build("buildah", tmp_path, 1).target(name, "tag", "base")
    assert "--target engine-vllm --build-context" in shlex.join(build)


def test_vllm_reports_nothing_and_keeps_what_it_compiles_where_pods_have_a_volume():
    (environment,) = values("engine-vllm", "ENV")
    named = dict(variable.split("=") for variable in environment.split())
    assert named["VLLM_CACHE_ROOT"] == f"{naming.CACHE_DIR}/vllm"
    assert named["VLLM_NO_USAGE_STATS"] == named["DO_NOT_TRACK"] == "1"
    assert "HF_HUB_OFFLINE" not in named


@pytest.mark.parametrize("name", ["engine-cuda", "engine-vllm"])
def test_what_builds_kernels_has_a_compiler_and_pythons_headers(name: str) -> None:
    """Triton's launcher of a kernel includes Python.h, which the base's python3-minimal lacks."""
    [installation] = values(name, "RUN")
    packages = set(
        installation.partition(" --no-install-recommends ")[2].partition("&&")[0].split()
    )
    assert packages >= {"libc6-dev", "libpython3-dev"}
    assert packages & {"gcc", "g++"}


def test_the_demo_model_is_the_one_that_is_tested():
    assert f"'{images.DEMO_MODEL}'" in (ROOT / "Makefile").read_text()


def oci_archive(path: Path, layers: list[bytes]) -> str:
    """Writes an archive in OCI layout; answers the digest of its manifest."""
    blobs: dict[str, bytes] = {}

    def add(content: bytes) -> dict[str, object]:
        name = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{name}"] = content
        return {"digest": f"sha256:{name}", "size": len(content)}

    manifest = add(json.dumps({"layers": [add(layer) for layer in layers]}).encode())
    blobs["index.json"] = json.dumps({"manifests": [manifest]}).encode()
    with tarfile.open(path, "w") as tar:
        for name, content in blobs.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return str(manifest["digest"])


def test_an_archives_digest_and_sizes_are_told(tmp_path):
    plain = bytes(5_000)
    packed = gzip.compress(bytes(100_000))
    digest = oci_archive(tmp_path / "x.tar", [plain, packed])
    made = images.inspect(tmp_path / "x.tar")
    assert made == images.Made(digest, len(plain) + len(packed), 105_000)


def test_a_step_that_fails_ends_the_build_without_a_traceback():
    with pytest.raises(SystemExit, match="error: false ended with 1"):
        images.run(["false"])


def test_an_unknown_image_is_named(capsys):
    assert images.main(["router"]) == 2
    assert "no image router: operator, engine, engine-cuda, engine-vllm" in capsys.readouterr().err


BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import {program}
"""


@pytest.mark.parametrize("program", ["ullage_router.main", "ullage_operator.main"])
def test_a_program_needs_nothing_beyond_its_images_extras(program: str) -> None:
    absent = [
        "torch",
        "numpy",
        "psutil",
        "zmq",
        "gguf",
        "safetensors",
        "llguidance",
        "transformers",
        "awscrt",
    ]
    absent += ["celpy", "jsonschema", "kubernetes_validate", "rich", "httpx", "pytest"]
    code = BLOCKED.format(absent=set(absent), program=program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_benchmarks_explain_themselves() -> None:
    wrong = {}
    for name in BENCHMARKS:
        command = [sys.executable, "-m", "benchmarks", name, "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        explains = done.stdout.startswith("usage: ") and "\nexamples:\n" in done.stdout
        if done.returncode or not explains:
            wrong[name] = done.stderr or done.stdout
    assert wrong == {}


def test_every_benchmark_is_listed_with_an_example() -> None:
    command = [sys.executable, "-m", "benchmarks"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in BENCHMARKS:
        assert f"\n{name} " in listed, name
        assert f" python -m benchmarks {name}" in listed, name

    unknown = subprocess.run([*command, "none"], cwd=ROOT, capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "there is no benchmark 'none'; choose from compare, " in unknown.stderr
