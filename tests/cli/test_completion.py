"""`ullage completion`: scripts that complete words in real shells."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ullage_cli.main import COMMANDS, main


def script(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


COMPLETE = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
COMP_LINE="${{COMP_WORDS[*]}}"
COMP_POINT=${{#COMP_LINE}}
spec=$(complete -p ullage)
function_name=${{spec#*-F }}
${{function_name%% *}} ullage "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
"""Completes the last word as an interactive bash does."""


def completions(path: Path, words: str) -> set[str]:
    text = COMPLETE.format(script=path, words=words)
    done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_values(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "ullage.bash"
    path.write_text(script(capsys, "bash"))
    commands = completions(path, "ullage ''")
    assert {
        "serve",
        "chat",
        "models",
        "up",
        "convert",
        "completion",
        "upgrade-manifest",
    } <= commands
    assert completions(path, "ullage ser") == {"serve"}
    assert {"--max-model-len", "--max-num-seqs"} <= completions(path, "ullage serve --max")
    assert completions(path, "ullage serve x --device c") == {"cpu", "cuda"}
    assert {"bash", "zsh", "fish"} <= completions(path, "ullage completion ''")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_parse_their_scripts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shell: str
) -> None:
    text = script(capsys, shell)
    for command in ("serve", "chat", "convert"):
        assert command in text
    assert "max-model-len" in text
    program = shutil.which(shell)
    if program is not None:
        path = tmp_path / f"script.{shell}"
        path.write_text(text)
        done = subprocess.run([program, "-n", str(path)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for command in COMMANDS:
        name = command.__name__.removesuffix(".command").rpartition(".")[2].replace("_", "-")
        assert len(re.findall(rf"\n    {name}\s", out)) == 1, name
