"""`ullage verify` from the command line to its reports and exit statuses."""

import asyncio
import functools
import json
import os
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ullage_cli.main import main
from ullage_verify import report as reports
from ullage_verify.criteria import Criterion
from ullage_verify.faults import PROCESS_FAULT_NAMES
from ullage_verify.run import SCENARIOS, VerifyReport
from ullage_verify.scenarios import streams
from ullage_verify.scenarios.inject import SHARED_FILES

Fake = Callable[..., Any]
NUM_TURNS = 12


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SLOW_READ_S", 0.01)
    monkeypatch.setattr(streams, "FREE_WITHIN_S", 0.15)


def _replaced(text: str, pair: tuple[str, str]) -> str:
    return text.replace(*pair)


def verify(fake_server: Fake, *arguments: str, **behaviour: Any) -> int:
    """Run the command against a server of this behaviour, and return its status."""

    async def scenario() -> int:
        async with fake_server(**behaviour) as server:
            places = (("MONITORING", server.monitoring_url), ("URL", server.url))
            words = [functools.reduce(_replaced, places, word) for word in arguments]
            return await asyncio.to_thread(main, ["verify", *words])

    return asyncio.run(scenario())


@pytest.fixture(autouse=True)
def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in a thread here, which cannot handle signals."""
    monkeypatch.setattr("ullage_cli.interruptible.signal.signal", lambda *_: None)


def test_reports(fake_server: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"--{form}={tmp_path / form}" for form in ("json", "markdown", "svg")]
    assert verify(fake_server, "streams", "URL", *files) == 0
    out = capsys.readouterr().out
    assert "fake, 600 tokens of context" in out
    assert "✓ every stream ends with a finish reason: " in out
    assert out.splitlines()[-1].startswith("7 passed, 0 failed, 0 skipped in ")

    document = json.loads((tmp_path / "json").read_text())
    assert (document["passed"], document["failed"], document["context"]) == (7, 0, 600)
    assert document["complete"]
    assert {each["scenario"] for each in document["criteria"]} == {"streams"}
    assert len((tmp_path / "markdown").read_text().splitlines()) == 2 + 7
    ElementTree.fromstring((tmp_path / "svg").read_text())


def test_without_a_terminal_a_step_is_printed_from_time_to_time(
    fake_server: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ullage_cli.verify.QUIET_INTERVAL_S", 0.0)
    assert verify(fake_server, "streams", "URL") == 0
    steps = capsys.readouterr().err.splitlines()
    assert "  … a slow client" in steps

    monkeypatch.setattr("ullage_cli.verify.QUIET_INTERVAL_S", 600.0)
    assert verify(fake_server, "streams", "URL") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_reports_the_criteria_so_far(
    fake_server: Fake, tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "ullage_cli.main", "verify", "soak"]
    options = ["--minutes", "60", "--json", str(path)]

    async def scenario() -> tuple[int, str]:
        async with fake_server(max_running=100) as server:
            process = await asyncio.create_subprocess_exec(
                *command, server.url, *options, stdout=asyncio.subprocess.PIPE
            )
            await server.receives(NUM_TURNS)
            process.send_signal(number)
            output, _ = await process.communicate()
            return process.returncode or 0, output.decode()

    status, output = asyncio.run(scenario())
    assert status == 130
    assert output.splitlines()[-1].endswith(", interrupted")
    document = json.loads(path.read_text())
    assert document["complete"] is False
    assert document["criteria"][0]["name"].startswith("every answer of ")


def test_a_failure_is_status_1(fake_server: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(fake_server, "streams", "URL", keeps_vanished=True) == 1
    assert "✗ requests of vanished clients end: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "behaviour", "error"),
    [
        (["http://127.0.0.1:9"], {}, "http://127.0.0.1:9/v1/models: Cannot connect to host"),
        (["https://127.0.0.1:9"], {}, "https://127.0.0.1:9/v1/models: Cannot connect to host"),
        (["URL"], {"key": "secret"}, "status 401; give an API key with --api-key"),
        (["URL/nowhere"], {}, "/nowhere/v1/models: status 404; check the URL"),
        (["chat"], {}, "'chat' is not a URL; give http://HOST:PORT, or an LLMService with"),
        (["URL", "--model", "gpt"], {}, "--model 'gpt': the server has fake"),
        (["URL"], {"states_context": False}, "does not state its context; give it with --context"),
        (["URL", "--pid", "4194304"], {}, "--pid 4194304: no such process"),
        (
            ["URL", "--monitoring", "http://127.0.0.1:9/metrics"],
            {},
            "--monitoring http://127.0.0.1:9/metrics: neither /stats nor /metrics is there",
        ),
        (["URL", "--pod", "chat-0"], {}, "--pod needs --namespace"),
        (["URL", "--node", "a", "-n", "b"], {}, "--node needs --namespace and the name of an LLM"),
        (["URL"], {"max_running": 0}, "a short request failed (429)"),
        (["http://127.0.0.1:9", "--svg", "/nonexistent/a"], {}, "/nonexistent/a: No such file"),
        (["http://127.0.0.1:9", "--json", "/"], {}, "/: Is a directory; choose another file"),
    ],
)
def test_errors_are_status_2(
    fake_server: Fake,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    behaviour: dict[str, Any],
    error: str,
) -> None:
    assert verify(fake_server, "streams", *arguments, **behaviour) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--minutes=0", "--minutes=2000", "--pid=0", "--context=-1"])
def test_wrong_options(option: str) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "soak", "http://127.0.0.1:9", option])


def test_faults_of_processes_are_skipped_by_name(
    fake_server: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(fake_server, "inject", "URL") == 0
    out = capsys.readouterr().out
    for name in (*PROCESS_FAULT_NAMES, SHARED_FILES):
        assert f"- {name}: needs --pid" in out


@pytest.fixture
def run_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder where `ullage up` leaves its state, which is empty at first."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


HIDDEN = "- requests of vanished clients end: the server does not report its running requests"


@pytest.mark.usefixtures("run_dirs")
def test_pages_on_another_port(fake_server: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(fake_server, "streams", "URL", hides_pages=True) == 0
    out = capsys.readouterr().out
    assert HIDDEN in out
    assert "give --monitoring URL" in out

    for address in ("MONITORING", "MONITORING/metrics"):
        options = ["--monitoring", address]
        assert verify(fake_server, "streams", "URL", *options, hides_pages=True) == 0
        assert "7 passed, 0 failed, 0 skipped" in capsys.readouterr().out


def write_state(run_dirs: Path, http_url: str, metrics_url: str) -> None:
    folder = run_dirs / "ullage-1"
    folder.mkdir()
    engine = {"metrics_url": f"{metrics_url}/metrics"}
    state = {"http_url": http_url, "metrics_url": f"{metrics_url}/metrics", "engines": [engine]}
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("is_alive", "is_same", "skipped"), [(True, True, 0), (False, True, 1), (True, False, 1)]
)
def test_pages_of_a_local_service_are_found(
    fake_server: Fake,
    run_dirs: Path,
    capsys: pytest.CaptureFixture[str],
    is_alive: bool,
    is_same: bool,
    skipped: int,
) -> None:
    """A state file of a service that has ended, or of another service, is not used."""

    async def scenario() -> int:
        async with fake_server(hides_pages=True) as server:
            metrics_url = server.monitoring_url if is_alive else "http://127.0.0.1:9"
            http_url = server.url if is_same else "http://127.0.0.1:9"
            write_state(run_dirs, http_url, metrics_url)
            url = server.url.replace("127.0.0.1", "localhost")
            return await asyncio.to_thread(main, ["verify", "streams", url])

    assert asyncio.run(scenario()) == 0
    assert f" 0 failed, {skipped} skipped" in capsys.readouterr().out


def test_pages_and_engines_of_a_service_in_a_cluster(
    fake_server: Fake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The router's API and metrics, and the engines' metrics, are three ports of kubectl."""
    monkeypatch.setattr("ullage_verify.scenarios.soak.SAMPLE_S", 0.2)

    async def scenario() -> int:
        async with fake_server(hides_pages=True, has_worker=True) as server:
            ports = [url.rpartition(":")[2] for url in (server.url, server.monitoring_url)]
            kubectl = tmp_path / "kubectl"
            kubectl.write_text(
                f"#!/bin/sh\necho $@ >> {tmp_path}/said\nport={ports[1]}\n"
                f'test "$5" = :8000 && port={ports[0]}\n'
                'echo "Forwarding from 127.0.0.1:$port -> 1"\nexec sleep 600\n'
            )
            kubectl.chmod(0o755)
            monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
            command = ["verify", "soak", "chat", "-n", "prod", "--minutes", "0.1"]
            return await asyncio.to_thread(main, command)

    assert asyncio.run(scenario()) == 0
    out = capsys.readouterr().out
    assert "✓ growth of the server's memory (engines with their workers, 2 x /metrics)" in out
    assert "✓ allocated share of the device's memory" in out
    said = sorted((tmp_path / "said").read_text().splitlines())
    assert said == [
        "--namespace prod port-forward deployment/chat-router :8000",
        "--namespace prod port-forward deployment/chat-router :9090",
        "--namespace prod port-forward pod/chat-large-0 :9090",
        "--namespace prod port-forward pod/chat-single-0 :9090",
    ]


def test_a_cluster_that_forwards_no_port_of_metrics_is_verified_all_the_same(
    fake_server: Fake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def scenario() -> int:
        async with fake_server(hides_pages=True) as server:
            port = server.url.rpartition(":")[2]
            kubectl = tmp_path / "kubectl"
            kubectl.write_text(
                '#!/bin/sh\ntest "$5" = :8000 || { echo no such port >&2; exit 1; }\n'
                f'echo "Forwarding from 127.0.0.1:{port} -> 1"\nexec sleep 600\n'
            )
            kubectl.chmod(0o755)
            monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
            return await asyncio.to_thread(main, ["verify", "streams", "chat", "-n", "prod"])

    assert asyncio.run(scenario()) == 0
    out, said = capsys.readouterr()
    assert " 0 failed, 1 skipped" in out
    assert "no /stats and no /metrics" in said
    assert "no such port" in said


def test_a_server_without_models_pages_is_described_by_an_option(fake_server: Fake) -> None:
    options = ["streams", "URL", "--context", "500"]
    assert verify(fake_server, *options, states_context=False, serves_stats=False) == 0


def test_every_scenario_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in SCENARIOS)


def test_the_table_has_no_stray_bars() -> None:
    criterion = Criterion("s", "a | b", "≤ 1", "x|y", "failed")
    report = VerifyReport("u", "m", 1, [criterion], {}, 1.0, is_complete=True)
    assert reports.as_markdown(report).splitlines()[-1] == "| s | a / b | ≤ 1 | x/y | ✗ |"
    assert report.num_failed == 1
