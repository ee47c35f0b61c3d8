"""The `ullage` command: what it prints and how it ends."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage_cli.main import main, make_parser
from ullage_cli.up import traced_to
from ullage_common.process.tracing import TracingSection
from ullage_operator.api.naming import OWNED
from ullage_operator.api.parsing import parse

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
Make = Callable[..., dict[str, Any]]
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(text: str) -> Path:
        path = tmp_path / "service.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return make


def errors(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines on stderr of a command that must end with status 2."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize("example", sorted(EXAMPLE.parent.glob("*.yaml")), ids=lambda p: p.stem)
def test_plan_prints_what_kubectl_takes(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", str(example)]) == 0
    text = capsys.readouterr().out
    kinds = [document["kind"] for document in yaml.safe_load_all(text)]
    pools = yaml.safe_load(example.read_text(encoding="utf-8"))["spec"]["pools"]
    assert kinds.count("StatefulSet") == len(pools)
    assert kinds.count("Deployment") == 1
    assert "&id" not in text


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", str(EXAMPLE), "-o", "json", "--pod-monitors"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["kind"], listed["apiVersion"]) == ("List", "v1")
    assert "PodMonitor" in [item["kind"] for item in listed["items"]]


def test_a_plan_has_the_objects_of_every_kind_that_the_service_asks_for(
    capsys: pytest.CaptureFixture[str], manifest: Make, write: Write
) -> None:
    keda = {"provider": "KEDA", "prometheusURL": "http://prometheus:9090", "maxReplicas": 3}
    service = manifest(
        model={"source": "hf://org/name", "name": "m"},
        pools={"single": {"autoscaling": keda, "modelCache": {"claimName": "c", "warm": True}}},
        router={"autoscaling": {"maxReplicas": 3}, "gateway": {"parentRefs": [{"name": "g"}]}},
    )
    path = write(yaml.safe_dump(service))
    assert main(["plan", "-f", str(path), "--pod-monitors"]) == 0
    kinds = {document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)}
    assert kinds == {kind.name for kind in OWNED}


def test_a_plan_says_of_each_pool_which_engine_it_will_be(
    capsys: pytest.CaptureFixture[str],
    manifest: Make,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ULLAGE_ENGINE_IMAGE", "native:1")
    path = write(yaml.safe_dump(manifest(pools={"large": {}})))

    def lines() -> list[str]:
        assert main(["plan", "-f", str(path)]) == 0
        return capsys.readouterr().err.splitlines()

    unknown = "engine vllm if image native:1 has vLLM, else native (image native:1)"
    assert lines()[:2] == [f"pool single: {unknown}", f"pool large: {unknown}"]
    monkeypatch.setenv("ULLAGE_VLLM_ENGINE_IMAGE", "vllm:1")
    reason = "vLLM is installed and the device is a CUDA GPU"
    assert lines()[0] == f"pool single: engine vllm: {reason} (image vllm:1)"


def test_a_plan_says_of_each_pool_where_its_kv_is(
    capsys: pytest.CaptureFixture[str], manifest: Make, write: Write
) -> None:
    all_tiers = {"host": {"size": "1Gi"}, "remote": {}, "file": {"path": "/kv"}}
    pools = {"large": {"memory": {"tiers": all_tiers}}}
    off = {"memory": {"tiers": {"host": {"size": 0}}}}
    assert main(["plan", "-f", str(write(yaml.safe_dump(manifest(pools=pools | {"x": off}))))]) == 0
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "pool single: KV tiers: host memory 256 MiB of each pod",
        "pool large: KV tiers: host memory 1024 MiB of each pod, that of the pool's other pods, "
        "files 2048 MiB in /kv",
        "pool x: KV tiers: none",
    ]


def test_a_folder_for_kv_that_cannot_be_had_is_one_line(
    capsys: pytest.CaptureFixture[str], manifest: Make, write: Write
) -> None:
    tiers = {"file": {"path": "/proc/nowhere"}}
    path = write(yaml.safe_dump(manifest(memory={"tiers": tiers})))
    ports = ("--http-port", "0", "--grpc-port", "0")
    [line] = errors(capsys, "up", "-f", str(path), *ports)
    assert line.startswith("error: memory.tiers.file.path /proc/nowhere: ")
    assert "choose a folder in which you may write" in line


def test_up_says_that_it_mounts_no_images(
    capsys: pytest.CaptureFixture[str], manifest: Make, write: Write
) -> None:
    model = {"source": "oci://registry.example/llama:1", "name": "llama"}
    path = write(yaml.safe_dump(manifest(model=model)))
    [line] = errors(capsys, "up", "-f", str(path), "--http-port", "0", "--grpc-port", "0")
    assert line.startswith("error: spec.model.source oci://registry.example/llama:1: ")
    assert "unpack it" in line


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"engine": "VLLM"}, "spec.engine: VLLM needs vLLM"),
        (
            {"adapters": [{"name": "a", "source": "file:///a", "rank": 8}]},
            "spec.adapters: the native engine serves no adapters",
        ),
    ],
)
def test_up_says_at_once_what_needs_vllm(
    capsys: pytest.CaptureFixture[str],
    manifest: Make,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    spec: dict[str, Any],
    field: str,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    path = write(yaml.safe_dump(manifest(**spec)))
    [line] = errors(capsys, "up", "-f", str(path))
    assert line.startswith(f"error: {field}")


@pytest.mark.parametrize(
    ("option", "path"), [("--run-dir", "/proc/nowhere"), ("--state-file", "/nowhere/state.json")]
)
def test_a_folder_that_cannot_be_had_is_one_line(
    capsys: pytest.CaptureFixture[str], option: str, path: str
) -> None:
    [line] = errors(capsys, "up", "-f", str(EXAMPLE), option, path)
    assert line.startswith(f"error: {option} {path}: ")


@pytest.mark.parametrize("command", ["up", "plan"])
def test_an_unknown_field_is_one_line(
    capsys: pytest.CaptureFixture[str], manifest: Make, write: Write, command: str
) -> None:
    path = write(yaml.safe_dump(manifest(memory={"treshold": 0.8})))
    assert errors(capsys, command, "-f", str(path)) == [
        f"error: {path}: spec.memory.treshold: unknown field; did you mean thresholdPercent?"
    ]


def test_every_problem_has_its_line(
    capsys: pytest.CaptureFixture[str], manifest: Make, write: Write
) -> None:
    path = write(yaml.safe_dump(manifest(memory={"maxKV": "1Gb"}, device="tpu")))
    lines = errors(capsys, "plan", "-f", str(path))
    assert [line.split(": ")[2] for line in lines] == ["spec.device", "spec.memory.maxKV"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "not YAML"),
        ("", "0 documents"),
        ("a: 1\n---\nb: 2\n", "2 documents"),
        ("- 1\n", "write an LLMService"),
        ("kind: Pod\napiVersion: v1\nmetadata: {name: x}\n", "must be LLMService, not 'Pod'"),
    ],
)
def test_a_file_that_is_no_service(
    capsys: pytest.CaptureFixture[str], write: Write, text: str, said: str
) -> None:
    path = write(text)
    lines = errors(capsys, "up", "-f", str(path))
    assert all(line.startswith(f"error: {path}: ") for line in lines)
    assert said in lines[-1]


HEAD = "apiVersion: serving.ullage.dev/v1alpha1\nkind: LLMService\nmetadata: {name: a}\n"
MODEL = "spec:\n  model: {source: 'hf://a/b', name: m}\n"
LEVELS = "".join(f"  l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 12))
WRONG_FILES = [
    ("  device: CPU\n  device: CUDA\n", "key 'device' occurs twice, first in line 6"),
    ("  memory: {maxKV: 1Gi, 'maxKV': 2Gi}\n", "key 'maxKV' occurs twice"),
    ("  image: 2026-01-02\n  x: 1\n", "spec.x: unknown field"),
    ("  device: 2026-01-02\n", "must be one of Auto, CUDA, CPU, not '2026-01-02'"),
    ("  l0: &l0 [a, a]\n" + LEVELS, "with its aliases it has more than 100000 values"),
    ("  pools: &p {single: *p}\n", "an anchor contains itself"),
    ("  pools: " + "[" * 2000, "nested more than 100 deep"),
    ("  pools: " + "{a: " * 2000, "nested more than 100 deep"),
    ("  vllm: {args: {1: .inf}}\n", "inf is not a number in JSON"),
    ("  vllm: {args: {seed: " + "9" * 5000 + "}}\n", "a number of 5000 characters"),
    ("  vllm: {args: {seed: 0x" + "f" * 5000 + "}}\n", "a number of 5002 characters"),
    ("  vllm: {args: {seed: " + "9" * 30 + "}}\n", "exceeds 64 bits"),
    ("  image: !!binary aGk=\n", "'aGk=' cannot have the tag binary"),
    ("  image: !!set {a, b}\n", "has YAML's type set"),
    ("  image: !!timestamp 2026-13-45\n", "cannot have the tag timestamp"),
    ("  image: !!timestamp x\n", "cannot have the tag timestamp"),
    ("  image: !!bool x\n", "'x' cannot have the tag bool"),
    ("  image: !!python/name:os.system\n", "cannot have the tag python/name:os.system"),
    ("  image: !!int x\n", "'x' cannot have the tag int"),
    ("  null: 1\n", "a key must be text"),
    ("  [a]: 1\n", "a key must be text"),
    ("  ? {a: b}\n  : 1\n", "a key must be text"),
    ('  image: "\\ud800"\n', "cannot be encoded in UTF-8"),
    ("  image: *nowhere\n", "found undefined alias"),
    ("#" * (1 << 20), "longer than 1048576 bytes"),
]


@pytest.mark.parametrize(("text", "said"), WRONG_FILES, ids=[said for _, said in WRONG_FILES])
def test_a_file_that_no_api_server_could_be_sent_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], write: Write, text: str, said: str
) -> None:
    path = write(HEAD + MODEL + text)
    lines = errors(capsys, "plan", "-f", str(path))
    assert all(line.startswith(f"error: {path}: ") for line in lines)
    assert said in lines[0]


def test_dates_keys_and_anchors_are_what_kubectl_makes_of_them(
    capsys: pytest.CaptureFixture[str], write: Write
) -> None:
    shared = """\
  image: 2026-01-02
  router: {podTemplate: {metadata: {labels: &labels {"1": one}, annotations: {at: 12:30:45}}}}
  pools:
    single:
      podTemplate:
        metadata:
          labels: {<<: *labels, on: "2026"}
          annotations: *labels
"""
    assert main(["plan", "-o", "json", "-f", str(write(HEAD + MODEL + shared))]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    [pods] = [item["spec"]["template"] for item in items if item["kind"] == "StatefulSet"]
    assert pods["spec"]["containers"][0]["image"] == "2026-01-02"
    [router] = [item["spec"]["template"] for item in items if item["kind"] == "Deployment"]
    assert router["metadata"]["annotations"]["at"] == "12:30:45"
    assert pods["metadata"]["labels"].items() >= {"1": "one", "on": "2026"}.items()


def test_numbers_to_the_base_60_are_text_however_long(
    capsys: pytest.CaptureFixture[str], write: Write
) -> None:
    path = write(f"{HEAD}{MODEL}  device: {':'.join(['59'] * 200_000)}\n")
    [line] = errors(capsys, "plan", "-f", str(path))
    assert "must be one of Auto, CUDA, CPU, not '59:59:59" in line


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_manifest_ends_in_a_traceback(
    capsys: pytest.CaptureFixture[str], write: Write, stored: Make, data: st.DataObject
) -> None:
    pod = {"containers": [{"name": "engine", "env": [{"name": "A", "value": "b"}]}]}
    pool = {"podTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": pod}, "shmSize": "1Gi"}
    made: Any = stored(pools={"single": pool, "large": {"memory": {"maxKV": "1Gi"}}})
    section = made
    last = "spec"
    while isinstance(section[last], dict | list) and section[last] and data.draw(st.integers(0, 5)):
        section = section[last]
        last = data.draw(st.sampled_from(sorted(section) if isinstance(section, dict) else [0]))
    section[last] = data.draw(JSON)
    status = main(["plan", "-f", str(write(yaml.safe_dump(made, allow_unicode=True)))])
    said = capsys.readouterr()
    assert status in (0, 2)
    assert status == 0 or said.err.startswith("error: ")


def test_missing_and_binary_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    [line] = errors(capsys, "up", "-f", str(tmp_path / "none.yaml"))
    assert "none.yaml: No such file or directory; -f takes an existing manifest" in line
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    [line] = errors(capsys, "up", "-f", str(tmp_path / "bytes"))
    assert "not UTF-8" in line


def test_a_busy_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ports = ["--http-port", "0", "--grpc-port", port]
        [line] = errors(capsys, "up", "-f", str(EXAMPLE), *ports)
    assert line.endswith("choose another with --grpc-port, or 0 for any")


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["plan", "--help"]])
def test_help_has_examples(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "ullage up -f" in (out := capsys.readouterr().out) or "ullage plan -f" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("ullage ")


def up(manifest: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "ullage_cli.main", "up", "-f", str(manifest)]
    command += ["--http-port", "0", "--grpc-port", "0"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def test_a_missing_model_stops_everything(manifest: Make, write: Write, tmp_path: Path) -> None:
    model = {"source": f"file://{tmp_path}/none.gguf", "name": "m"}
    with up(write(yaml.safe_dump(manifest(model=model, device="CPU")))) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    [line] = err.splitlines()
    assert line.startswith("error: pools.single: ")
    assert "none.gguf" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_stops_everything(number: signal.Signals) -> None:
    with up(EXAMPLE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it says what it starts
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.splitlines()[-1].startswith("stopping ...")


def test_spans_go_where_the_command_line_says(manifest: Make) -> None:
    asked = {
        "http://127.0.0.1:4318": "http",
        "http://127.0.0.1:4317": "grpc",
        "https://traces.example.com/v1/traces": "http",
    }
    elsewhere = {"tracing": {"endpoint": "http://elsewhere:1", "samplePercent": 50}}
    service = parse(manifest(observability=elsewhere))
    for url, protocol in asked.items():
        options = make_parser().parse_args(["up", "-f", "x.yaml", "--otlp-endpoint", url])
        tracing = traced_to(service, options.otlp_endpoint).spec.observability.tracing
        assert tracing == TracingSection(endpoint=url, protocol=protocol), url


def test_a_collector_is_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("collector:4317", "http://collector:many"):
        with pytest.raises(SystemExit):
            main(["up", "-f", str(EXAMPLE), "--otlp-endpoint", wrong])
        assert "--otlp-endpoint" in capsys.readouterr().err
