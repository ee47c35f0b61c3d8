"""`ullage bench` from the command line to its reports, over real sockets."""

import asyncio
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ullage_bench import report as reports
from ullage_bench.levels import Objectives
from ullage_bench.load import LOOPS, Sender, Shape, sweep
from ullage_cli.main import main
from ullage_verify.client import OpenAIClient
from ullage_verify.target import describe

Fake = Callable[..., Any]
BRIEF = ["--seconds", "0.5", "--input-tokens", "20", "--output-tokens", "8"]


@pytest.fixture(autouse=True)
def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in a thread here, which cannot handle signals."""
    monkeypatch.setattr("ullage_cli.interruptible.signal.signal", lambda *_: None)


def bench(fake_server: Fake, *arguments: str, **behaviour: Any) -> int:
    async def scenario() -> int:
        async with fake_server(**({"max_running": 100} | behaviour)) as server:
            words = [server.url if word == "URL" else word for word in arguments]
            return await asyncio.to_thread(main, ["bench", *words])

    return asyncio.run(scenario())


def test_reports(fake_server: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"--{form}={tmp_path / form}" for form in ("json", "markdown", "svg")]
    more = ["--loads", "1,4", "--rate", "1000", "--engines", "2", "--price", "2.5"]
    assert bench(fake_server, "URL", *BRIEF, *more, *files) == 0
    out = capsys.readouterr().out
    assert "fake, 20 in, 8 out" in out
    assert "1000 requests/s need " in out
    assert "a request costs " in out

    document = json.loads((tmp_path / "json").read_text())
    assert [level["load"] for level in document["levels"]] == [1, 4]
    assert document["objectives"] == {
        "ttft_p95": None,
        "e2e_p95": None,
        "max_refused_share": 0.01,
    }
    assert all(level["requests"] and not level["failed"] for level in document["levels"])
    assert len((tmp_path / "markdown").read_text().split("\n\n")[0].splitlines()) == 4
    ElementTree.fromstring((tmp_path / "svg").read_text())

    again = reports.read((tmp_path / "json").read_bytes())
    assert again.objectives == Objectives()
    assert json.loads(reports.as_json(again)) == document


@pytest.mark.parametrize(
    ("arguments", "behaviour", "line"),
    [
        (
            [],
            {"names_engines": ("single-0", "large-0")},
            "engines: 2 that answered at the knee (large-0, single-0)",
        ),
        (
            [],
            {"names_engines": ("single-0",)},
            "engines: 1 that answered at the knee (single-0)",
        ),
        ([], {}, "engines: all 2 that are ready; the answers do not name theirs"),
        (
            [],
            {"serves_stats": False},
            "engines: 1 is assumed, because the server names none; give --engines",
        ),
        (["--engines", "3"], {"names_engines": ("a", "b")}, "engines: 3, as --engines says"),
    ],
)
def test_only_engines_that_served_count(
    fake_server: Fake,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    behaviour: dict[str, Any],
    line: str,
) -> None:
    path = tmp_path / "report.json"
    more = ["--loads", "2", "--price", "1", "--rate", "1000", "--json", str(path), *arguments]
    assert bench(fake_server, "URL", *BRIEF, *more, **behaviour) == 0
    assert line in capsys.readouterr().out.splitlines()

    report = reports.read(path.read_bytes())
    assert report.knee
    assert report.cost
    count = int("".join(filter(str.isdigit, line.partition(" (")[0])))
    assert report.num_engines == count
    assert report.engines == math.ceil(1000 * count / report.knee.requests_per_s)
    per_request = count / 3600 / report.knee.requests_per_s
    assert report.cost.per_request == pytest.approx(per_request)


def test_a_worse_run_than_the_baseline_is_status_1(
    fake_server: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "before.json"
    assert bench(fake_server, "URL", *BRIEF, "--loads", "4", "--json", str(path)) == 0
    document = json.loads(path.read_text())
    document["knee"]["requests_per_s"] *= 100
    document["knee"]["ttft_p95"] = document["knee"]["e2e_p95"] = 100.0
    path.write_text(json.dumps(document))
    assert bench(fake_server, "URL", *BRIEF, "--loads", "4", "--baseline", str(path)) == 1
    assert "worse than the baseline: requests_per_s fell from " in capsys.readouterr().out


def test_a_baseline_of_another_test_is_refused(
    fake_server: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "before.json"
    assert bench(fake_server, "URL", *BRIEF, "--loads", "2", "--json", str(path)) == 0
    capsys.readouterr()
    more = ["--loads", "2", "--mode", "conversations", "--baseline", str(path)]
    assert bench(fake_server, "URL", *BRIEF, *more) == 2
    captured = capsys.readouterr()
    assert "--baseline has mode closed, and this run conversations" in captured.err
    assert captured.out == "", "the load was measured first"

    document = json.loads(path.read_text()) | {"knee": None}
    path.write_text(json.dumps(document))
    assert bench(fake_server, "URL", *BRIEF, "--baseline", str(path)) == 2
    assert "it has no knee" in capsys.readouterr().err


def test_a_refused_client_does_not_flood_the_server(fake_server: Fake, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert (
        bench(fake_server, "URL", *BRIEF, "--loads", "8", "--json", str(path), max_running=2) == 1
    )
    [level] = json.loads(path.read_text())["levels"]
    assert level["refused"] < 20


@pytest.mark.parametrize("mode", ["open", "conversations"])
def test_other_modes(fake_server: Fake, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "report.json"
    loads = [] if mode == "open" else ["--loads", "1,2"]
    more = ["--mode", mode, *loads, "--prefix-tokens", "50", "--json", str(path)]
    assert bench(fake_server, "URL", *BRIEF, *more) == 0
    document = json.loads(path.read_text())
    assert document["mode"] == mode
    assert document["knee"]["requests"] > 0


def test_refusals_have_no_knee(fake_server: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(fake_server, "URL", *BRIEF, "--loads", "8", max_running=2) == 1
    assert "no level of load keeps the objectives" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["http://127.0.0.1:9"], "Cannot connect to host"),
        (["chat"], "'chat' is not a URL"),
        (["URL", "--input-tokens", "590"], "do not fit the context of 600; lower"),
        (
            ["URL", "--mode", "conversations", "--input-tokens", "110", "--output-tokens", "40"],
            "conversations of 4 turns of 600 tokens do not fit the context of 600; lower "
            "--input-tokens, --output-tokens or --prefix-tokens",
        ),
        (["http://127.0.0.1:9", "--json", "/nonexistent/a"], "/nonexistent/a: No such file"),
        (["URL", "--baseline", "/nonexistent"], "--baseline /nonexistent: No such file"),
        (["URL", "--baseline", __file__], "not a report of ullage bench"),
    ],
)
def test_errors_are_status_2(
    fake_server: Fake, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert bench(fake_server, *arguments) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--loads=4,2", "--loads=0", "--seconds=0", "--price=-1", "--engines=0"]
)
def test_wrong_options(option: str) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "http://127.0.0.1:9", option])


def test_every_prompt_is_new_and_has_the_shared_beginning(fake_server: Fake) -> None:
    async def scenario() -> None:
        async with fake_server() as server, OpenAIClient(server.url) as client:
            target = await describe(client)
            sender = Sender(target, Shape(30, 4, prefix_tokens=40))
            first = await sender.request()
            second = await sender.request()
            assert first.text != second.text
            assert 60 <= first.prompt_tokens <= 80
            turns = await sender.conversation()
            sizes = [answer.prompt_tokens for answer in turns]
            assert len(turns) == 4
            assert sizes == sorted(set(sizes))

    asyncio.run(scenario())


@pytest.mark.parametrize(("context", "num_turns"), [(120, 2), (150, 3), (190, 4)])
def test_a_conversation_ends_before_it_exceeds_the_context(
    fake_server: Fake, context: int, num_turns: int
) -> None:
    async def scenario() -> None:
        async with fake_server() as server, OpenAIClient(server.url) as client:
            target = await describe(client, context=context)
            turns = await Sender(target, Shape(30, 4)).conversation()
            assert [turn.outcome for turn in turns] == ["200"] * num_turns
            assert turns[-1].prompt_tokens + 4 <= target.usable

    asyncio.run(scenario())


def test_a_sweep_ends_when_more_load_brings_less(fake_server: Fake) -> None:
    async def scenario() -> None:
        async with fake_server(max_running=2) as server, OpenAIClient(server.url) as client:
            target = await describe(client)
            sender = Sender(target, Shape(20, 4))
            loads = [2.0, 1.0, 1.0, 1.0, 1.0, 1.0]  # fewer clients stand for a slower server
            levels = await sweep(LOOPS["closed"], sender, loads, 0.5, lambda _: None)
            assert len(levels) == 3

    asyncio.run(scenario())
