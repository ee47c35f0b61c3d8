"""`ullage profile` finds an engine and says what is wrong; what it gets, the engine's tests say."""

import json
from pathlib import Path

import pytest

from ullage_operator.cli.main import main


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
        (["other"], "no engine 0 of other runs here, only chat-single-0"),
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
