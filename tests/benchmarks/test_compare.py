"""The comparison of servers: verdicts, files, and no process left behind."""

import asyncio
import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from ullage_common.chat.template import ChatTemplate
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.tokenizer.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]

STAND_IN = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

how, port = sys.argv[1:]
if how == "child":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(os.getpid(), child.pid, flush=True)

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        refuses = how == "refuses" and body.get("stream")
        self.send_response(503 if refuses else 200)
        self.end_headers()
        if refuses:
            self.wfile.write(b"no room")
        if refuses or not body.get("stream"):
            return
        if how == "silent":
            time.sleep(600)
        if how == "crashes":
            os.kill(os.getpid(), 11)
        delta = [{"role": "assistant", "content": ""}, *[{"content": "a"}] * 4]
        usage = {"prompt_tokens": 180, "completion_tokens": body["max_tokens"]}
        chunks = [{"choices": [{"delta": each}]} for each in delta] + [{"usage": usage}]
        if how == "fails":
            chunks = [*chunks[:3], {"error": {"message": "a worker ended"}}]
        if how == "short":
            chunks[-1]["usage"]["completion_tokens"] = 3
        stream = "".join(f"data: {json.dumps(chunk)}\\n\\n" for chunk in chunks)
        self.wfile.write(f": a comment\\n\\n{stream}data: [DONE]\\n\\n".encode())

    def log_message(self, *arguments):
        pass

class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

Server(("127.0.0.1", int(port)), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def compare() -> Any:
    return importlib.import_module("benchmarks.compare.benchmark")


def figures(speed: float, ttft: float) -> dict[str, float]:
    return {"output_tokens_per_s": speed, "ttft_p50_ms": ttft}


def test_ullage_is_compared_with_the_better_of_the_others(compare: Any) -> None:
    servers = {
        "ullage": {1: figures(150, 60), 8: figures(300, 61), 32: figures(299, 60)},
        "llama.cpp": {1: figures(100, 300), 8: figures(90, 300), 32: figures(90, 300)},
        "vllm": {1: figures(50, 100), 8: figures(200, 100), 32: figures(200, 100)},
    }
    first, second, third = compare.ratios(servers)
    assert (first.throughput, first.throughput_peer) == (1.5, "llama.cpp")
    assert (first.ttft, first.ttft_peer) == (0.6, "vllm")
    assert first.is_reached
    assert not second.is_reached  # its first tokens are late
    assert not third.is_reached  # its throughput is low
    assert str(third) == "c=32: tok/s x1.50 (vllm), TTFT p50 x0.60 (vllm): MISSED"


def test_nothing_is_judged_without_both_sides(compare: Any) -> None:
    ours = {1: figures(9, 1)}
    theirs = {1: figures(1, 9)}
    assert compare.ratios({"ullage": ours}) == []
    assert compare.ratios({"vllm": theirs, "llama.cpp": theirs}) == []


def stand_in(compare: Any, name: str, how: str = "well") -> Any:
    """Return a server that answers at once."""
    command = [sys.executable, "-c", STAND_IN, how]
    return compare.Server(name, "1", "a stand-in", lambda port: [*command, str(port)])


def living(pids: list[str]) -> list[str]:
    """Return the processes that exist and are no zombies."""
    from benchmarks.compare.servers import lives

    return [pid for pid in pids if psutil.pid_exists(int(pid)) and lives(psutil.Process(int(pid)))]


def test_a_server_is_measured_and_ended_with_its_children(compare: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = compare.measure(stand_in(compare, "vllm", "child"), [1, 8], log)
    assert not living(log.read_text().split())
    assert result.pss_mb > 0
    means = compare.means([result, result])
    assert means == result.levels
    assert [each["requests"] for each in means.values()] == [32, 32]
    assert means[8]["prompt_tokens"] == 180
    assert 0 < means[8]["ttft_p50_ms"] <= means[8]["e2e_p95_ms"]

    plot = tmp_path / "plot.svg"
    compare.plot(plot, {"vllm": {"means": means}})
    assert len(list(ET.parse(plot).iter("{http://www.w3.org/2000/svg}rect"))) == 4


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words_and_leaves_nothing(
    compare: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", "sleep 600 & echo $!; echo no room; exit 3"]
    server = compare.Server("vllm", "1", "", lambda port: command)
    with pytest.raises(SystemExit, match=r"vllm ended with status 3:\n[0-9]+\nno room"):
        compare.measure(server, [1], log)
    assert not living(log.read_text().split()[:1])


def test_the_reason_of_a_failed_start_is_its_first_error() -> None:
    from benchmarks.compare.servers import reason_of

    lines = ["WARNING this can cause OSError: [Errno 24]", "ERROR [core.py:1] ValueError: no room"]
    lines += ["RuntimeError: the child failed", "", "  warnings.warn('leaked')", ""]
    assert reason_of(lines) == "ValueError: no room"
    assert reason_of(lines[-3:]) == "warnings.warn('leaked')"
    assert reason_of([]) == ""


def test_a_child_that_has_just_ended_counts_for_nothing(compare: Any) -> None:
    child = subprocess.Popen(["sleep", "600"])
    gone = psutil.Process(child.pid)
    child.kill()
    child.wait()

    class Family(compare.Running):
        def family(self) -> list[psutil.Process]:
            return [psutil.Process(), gone]

    run = Family("", 0.0, psutil.Process())
    assert run.pss_bytes() > 0
    assert run.cpu_s() > 0


def test_ullage_serves_the_given_manifest_under_its_name(compare: Any) -> None:
    manifest = ROOT / "examples" / "smollm2.yaml"
    server = compare.SERVERS["ullage"](manifest)
    assert server.model == "smollm2-135m"
    assert str(manifest) in server.command(8000)


def test_an_answer_that_is_none_names_the_server_its_log_and_the_cause(
    compare: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    causes = {
        "fails": 'broke off an answer: {"message": "a worker ended"}',
        "refuses": "answered 503: no room",
        "short": "sent 3 of 64 tokens",
    }
    said = {}
    for how in causes:
        with pytest.raises(compare.ServerError) as error:
            compare.measure(stand_in(compare, "vllm", how), [1], log)
        said[how] = str(error.value)
    assert said == {how: f"error: vllm (its log: {log}) {cause}" for how, cause in causes.items()}


def test_a_silent_server_is_an_answer_of_status_0(compare: Any, tmp_path: Path) -> None:
    from benchmarks.support.load import ask, messages

    async def answer(url: str) -> Any:
        timeout = aiohttp.ClientTimeout(total=0.2)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return await ask(session, url, "smollm2", messages(1, 9), 64)

    with compare.running(stand_in(compare, "vllm", "silent"), tmp_path / "log") as run:
        result = asyncio.run(answer(run.url))
    assert (result.status, result.error) == (0, "was silent or slow for 0 s")


def test_prompts_are_of_180_tokens_and_no_block_of_two_is_the_same(compare: Any) -> None:
    from benchmarks.support.load import INPUT_WORDS, messages
    from benchmarks.support.one_engine import MODEL

    tokenizer = load_tokenizer(resolve_source(MODEL).path)
    chat = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    prompts = [
        tokenizer.encode_rendered(chat.render(messages(number, INPUT_WORDS)))
        for number in (*range(1_000_000, 1_000_032), *range(32_000_000, 32_000_032))
    ]
    assert {len(prompt) for prompt in prompts} == {180}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)


Played = tuple[int, dict[str, Any]]
Play = Callable[..., Played]

QUALITY = [sys.executable, "-c", "print('pass auto: perplexity +0.05%, at most +0.5%')"]


def stand_ins(compare: Any, servers: dict[str, str]) -> dict[str, Any]:
    """Return makers of stand-ins, by name and behaviour."""
    return {
        name: lambda path, name=name, how=how: stand_in(compare, name, how)
        for name, how in servers.items()
    }


@pytest.fixture
def play(compare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    """Run the program with these makers, and return its status and the file of --json."""

    def run(makers: dict[str, Any], *options: str) -> Played:
        path = tmp_path / "bench.json"
        arguments = ["compare", str(tmp_path / "peers"), *options, "--json", str(path)]
        monkeypatch.setattr(sys, "argv", arguments)
        status = compare.main(makers, QUALITY)
        return status, json.loads(path.read_text())

    return run


WELL = {"llama.cpp": "well", "vllm": "well", "ullage": "well"}


def test_a_whole_run_is_judged_and_written(
    compare: Any, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = play(stand_ins(compare, WELL), "--quality")
    printed = capsys.readouterr().out
    # Which of two stand-ins is the faster one is chance.
    is_reached = ": MISSED" not in printed
    assert status == (0 if is_reached else 1)
    assert result["verdict"] == ("reached" if is_reached else "missed")
    assert result["goal"] in printed
    assert result["left_out"] == []
    assert result["failures"] == {}
    assert result["quality"]["gates"] == ["pass auto: perplexity +0.05%, at most +0.5%"]
    assert printed.count("ready after") == printed.count("MB resident (PSS)") == 3
    assert [len(each["rounds"]) for each in result["servers"].values()] == [2, 2, 2]


def test_what_was_measured_before_ullage_failed_is_kept(
    compare: Any, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = stand_ins(compare, {**WELL, "ullage": "fails"})
    status, result = play(servers, "--concurrency", "8")
    assert status == 2
    assert [*result["servers"]] == ["llama.cpp", "vllm"]
    assert result["verdict"] == "not judged"
    printed = capsys.readouterr()
    assert "llama.cpp 1: a stand-in" in printed.out
    assert "error: ullage (its log: " in printed.err


@pytest.mark.parametrize("how", ["fails", "refuses", "crashes"])
def test_a_peer_that_fails_is_left_out_by_name_and_the_rest_is_judged(
    how: str, compare: Any, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = play(stand_ins(compare, {**WELL, "llama.cpp": how}), "--quality")
    assert status in (0, 1)
    assert [*result["servers"]] == ["vllm", "ullage"]
    assert [*result["failures"]] == ["llama.cpp"]
    assert result["left_out"] == []
    assert result["verdict"] != "not judged"
    printed = capsys.readouterr()
    assert "llama.cpp is left out: llama.cpp (its log: " in printed.out
    assert ("ended by SIGSEGV" in printed.out) == (how == "crashes")


@pytest.mark.parametrize("how", ["says so", "fails"])
def test_a_peer_that_cannot_be_installed_is_left_out(how: str, compare: Any, play: Play) -> None:
    def failing(folder: Path) -> Any:
        if how == "says so":
            raise compare.ServerError("error: `pip install` failed:\nno compiler")
        subprocess.run(["sh", "-c", "exit 7"], check=True)

    servers = {**stand_ins(compare, WELL), "llama.cpp": failing}
    status, result = play(servers, "--concurrency", "8", "--rounds", "1")
    assert status == 3
    reasons = {"says so": "`pip install` failed:\nno compiler", "fails": "non-zero exit status 7"}
    assert reasons[how] in result["failures"]["llama.cpp"]
    assert [*result["servers"]] == ["vllm", "ullage"]


def test_nothing_is_judged_without_a_peer_that_answers(compare: Any, play: Play) -> None:
    servers = stand_ins(compare, {"llama.cpp": "refuses", "vllm": "fails", "ullage": "well"})
    status, result = play(servers, "--concurrency", "8", "--quality")
    assert status == 3
    assert "a peer that answers" in result["left_out"]


def measured(compare: Any, **changes: Any) -> Any:
    """Return a sitting that has reached its goal, except for these attributes."""
    manifest = ROOT / "examples" / "bench.yaml"
    sitting = compare.Sitting(manifest, None)
    for name, speed, ttft in (("llama.cpp", 10, 100), ("vllm", 5, 200), ("ullage", 15, 60)):
        figure = {**figures(speed, ttft), "prompt_tokens": 180.0}
        one = compare.Round(1.0, 100.0, dict.fromkeys(compare.JUDGED_LEVELS, figure))
        sitting.rounds[name] = [one, one]
    sitting.quality = compare.Quality(True, [])
    for name, value in changes.items():
        setattr(sitting, name, value)
    return sitting


def judged(compare: Any, sitting: Any) -> str:
    figures = {name: compare.means(rounds) for name, rounds in sitting.rounds.items()}
    verdict: str = sitting.verdict(compare.ratios(figures))
    return verdict


def test_only_a_whole_run_is_judged(compare: Any) -> None:
    whole = measured(compare).rounds
    one = compare.Round(1.0, 100.0, {8: figures(1, 1)})
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "whole": ({}, "reached"),
        "worse text": ({"quality": compare.Quality(False, [])}, "missed"),
        "slow": ({"rounds": {**whole, "ullage": whole["vllm"]}}, "missed"),
        "without quality": ({"quality": None}, "not judged"),
        "one round": ({"rounds": {**whole, "vllm": whole["vllm"][:1]}}, "not judged"),
        "one level": ({"rounds": {name: [one, one] for name in whole}}, "not judged"),
        "two servers": (
            {"rounds": {name: whole[name] for name in ("vllm", "ullage")}},
            "not judged",
        ),
        "alone": ({"rounds": {"ullage": whole["ullage"]}}, "not judged"),
        "another manifest": ({"manifest": ROOT / "examples" / "smollm2.yaml"}, "not judged"),
        "nothing": ({"rounds": {}}, "not judged"),
    }
    verdicts = {
        name: judged(compare, measured(compare, **changes)) for name, (changes, _) in cases.items()
    }
    assert verdicts == {name: verdict for name, (_, verdict) in cases.items()}
    assert compare.STATUSES == {"reached": 0, "missed": 1, "not judged": 3}


def test_servers_that_count_other_prompt_tokens_are_not_compared(compare: Any) -> None:
    ours = {8: {"prompt_tokens": 180.0}}
    theirs = {8: {"prompt_tokens": 181.0}}
    compare.check_prompts({"vllm": ours, "ullage": ours})
    with pytest.raises(compare.ServerError, match=r"llama\.cpp 181, ullage 180"):
        compare.check_prompts({"llama.cpp": theirs, "ullage": ours})


def test_options_that_measure_nothing_are_refused(
    compare: Any, play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [
        ("--concurrency", "64"), ("--concurrency", "0"), ("--concurrency", "a"),
        ("--concurrency", ""), ("--rounds", "0"), ("--rounds", "x"), ("--only", "sglang"),
        ("--json", tmp_path / "none" / "a.json"), ("--plot", tmp_path), ("-f", tmp_path / "none"),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(SystemExit, match="2"):
            play(stand_ins(compare, WELL), *map(str, arguments))
        assert f"argument {arguments[0]}" in capsys.readouterr().err
    assert not (tmp_path / "peers").exists()
