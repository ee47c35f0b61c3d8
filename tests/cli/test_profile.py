"""`ullage profile` finds an engine and says what is wrong; what it gets, the engine's tests say."""

import json
import os
from pathlib import Path

import pytest

from ullage_cli.main import main


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an `ullage up` whose engine nobody can reach."""
    folder = tmp_path / "ullage-x"
    folder.mkdir()
    engines = [{"id": "chat-single-0", "grpc_target": "127.0.0.1:1"}]
    (folder / "state.json").write_text(json.dumps({"engines": engines}))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


def test_errors_say_what_is_wrong(
    running: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "t.json.gz"
    wrong = [
        (["other"], "no engine 0 of other runs here (running: chat-single-0)"),
        (["chat", "--pool", "large"], "no engine 0 of chat-large runs here"),
        (["chat", "--engine", "3"], "no engine 3 of chat"),
        (["chat", "-o", str(output)], "127.0.0.1:1"),
        (["chat", "-o", "/nowhere/t.gz"], "-o /nowhere/t.gz: "),
    ]
    for arguments, words in wrong:
        assert main(["profile", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("t.json*"))
    for arguments in (["--steps", "0"], ["--seconds", "301"]):
        with pytest.raises(SystemExit):
            main(["profile", "chat", *arguments])
    assert "use 1 to 1000" in capsys.readouterr().err


KUBECTL = """#!/bin/sh
case "$*" in
    *"get llms chat "*) printf '{selector}' ;;
    *) echo "not forwarded: $*" >&2; exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("selector", "arguments", "words"),
    [
        ("app=x,serving.ullage.dev/pool=main", [], "pod/chat-main-0"),
        (
            "app=x,serving.ullage.dev/pool=main",
            ["--pool", "big", "--engine", "2"],
            "pod/chat-big-2",
        ),
        ("", [], "chat has no status yet; give --pool"),
    ],
)
def test_in_a_cluster_it_asks_the_pool_of_ordinary_requests(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    selector: str,
    arguments: list[str],
    words: str,
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.replace("{selector}", selector))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["profile", "chat", "--namespace", "prod", *arguments]) == 2
    assert words in capsys.readouterr().err
