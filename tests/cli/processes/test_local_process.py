"""Pods as processes: started, restarted, stopped, and never left behind."""

import asyncio
import contextlib
import dataclasses
import fcntl
import http.server
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from ullage_testing.ports import free_port

from ullage_cli.local.pods import Pod
from ullage_cli.processes.pod_process import PodFailed, PodProcess, progress_of
from ullage_cli.processes.runtime import LocalRuntime, keep_scaled
from ullage_cli.up import StartView, open_console, run_directory, wait_for_eof
from ullage_common.wire.load_report import PoolReport
from ullage_operator.api.sections import AutoscalingSpec, ScalingPace, Targets

DEADLINE_S = 60.0
FOREVER = "import signal; print('up', flush=True); signal.pause()"
SERVER = """
import http.server, sys

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""
"""A pod that is ready until it is killed."""
SLEEPING = AutoscalingSpec(
    enabled=True,
    provider="ullage",
    min_replicas=0,
    max_replicas=1,
    warm_spares=0,
    targets=Targets(kv_utilization_percent=70, queue_wait=2.0, ttft=True),
    scale_up=ScalingPace(window=0, pods=4, percent=100, period=15),
    scale_down=ScalingPace(window=300, pods=1, percent=50, period=60),
    idle_after=600,
)
"""Scaling of a pool that sleeps until a request wants it."""
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n" + (
    "while True: signal.pause()"
)


def pod(
    code: str,
    name: str = "demo-single-0",
    grace_s: float = DEADLINE_S,
    ports: dict[str, int] | None = None,
) -> Pod:
    """A pod that runs Python code."""
    command = (sys.executable, "-c", code)
    env = {"POD_NAME": name}
    return Pod(name, name.rpartition("-")[0], "pools.single", command, env, ports or {}, grace_s)


def process(
    code: str,
    folder: Path,
    progress: Callable[[str], None] = print,
    grace_s: float = DEADLINE_S,
) -> PodProcess:
    return PodProcess(pod(code, grace_s=grace_s), folder / "pod.log", progress)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        await asyncio.sleep(0.02)


def is_up(folder: Path) -> bool:
    log = folder / "pod.log"
    return log.exists() and "up" in log.read_text(encoding="utf-8")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


def test_a_process_stops_at_sigterm(tmp_path: Path) -> None:
    async def scenario() -> None:
        running = process(FOREVER, tmp_path)
        task = asyncio.create_task(running.run())
        await until(lambda: is_up(tmp_path))
        await running.stop()
        await task
        assert not psutil.pid_exists(running.pid)
        assert running.restarts == 0

    run(scenario)


def test_a_deaf_process_is_killed_after_the_grace(tmp_path: Path) -> None:
    async def scenario() -> None:
        running = process(STUBBORN, tmp_path, grace_s=0.1)
        task = asyncio.create_task(running.run())
        await until(lambda: is_up(tmp_path))
        await running.stop()
        await task
        assert not psutil.pid_exists(running.pid)

    run(scenario)


def test_a_crashed_process_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        said: list[str] = []
        running = process(FOREVER, tmp_path, said.append)
        task = asyncio.create_task(running.run())
        await until(lambda: is_up(tmp_path))
        first = running.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: running.pid != first)
        await running.stop()
        await task
        assert running.restarts == 1
        assert said == ["exited with status -9; restarting in 0.5 s"]

    run(scenario)


def test_stopping_does_not_wait_for_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        said: list[str] = []
        running = process("raise SystemExit(1)", tmp_path, said.append)
        task = asyncio.create_task(running.run())
        await until(lambda: said)
        await running.stop()
        await asyncio.wait_for(task, DEADLINE_S)
        assert running.restarts == 0

    run(scenario)


def test_misuse_is_told_in_its_own_words_and_not_tried_again(tmp_path: Path) -> None:
    code = "import sys; print('error: model.source: no such file', file=sys.stderr); sys.exit(2)"

    async def scenario() -> None:
        running = process(code, tmp_path)
        with pytest.raises(PodFailed, match=r"^model.source: no such file$"):
            await running.run()
        assert running.restarts == 0

    run(scenario)


def test_a_pod_that_gives_up_again_and_again_says_why_each_time_and_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_cli.processes.pod_process.FIRST_BACKOFF_S", 0.01)
    said: list[str] = []
    code = "import sys; print('error: 3 starts failed their proof', file=sys.stderr); sys.exit(1)"

    async def scenario() -> None:
        running = process(code, tmp_path, said.append)
        last = r"^exited 5 times in a row, last with status 1: 3 starts failed their proof$"
        with pytest.raises(PodFailed, match=last):
            await running.run()

    run(scenario)
    why = "exited with status 1 (3 starts failed their proof); restarting in"
    assert [each.startswith(why) for each in said] == [True] * 4


def test_a_pod_that_never_starts_is_given_up_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_cli.processes.pod_process.FIRST_BACKOFF_S", 0.01)

    async def scenario() -> None:
        running = process("raise RuntimeError('boom')", tmp_path)
        with pytest.raises(PodFailed, match=r"(?s)5 times in a row.*status 1.*RuntimeError: boom"):
            await running.run()

    run(scenario)


def test_a_pod_that_is_never_ready_is_given_up_however_long_its_starts_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_cli.processes.pod_process.FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr("ullage_cli.processes.pod_process.STEADY_S", 0.0)

    async def scenario() -> None:
        loading = pod("raise SystemExit(1)", ports={"http": free_port()})
        running = PodProcess(loading, tmp_path / "pod.log", print)
        with pytest.raises(PodFailed, match=r"^exited 5 times in a row, last with status 1"):
            await asyncio.wait_for(running.run(), DEADLINE_S)

    run(scenario)


def test_a_pod_that_was_ready_once_is_never_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_cli.processes.pod_process.FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr("ullage_cli.processes.pod_process.MAX_BACKOFF_S", 0.01)
    port = free_port()
    served = tmp_path / "served"
    code = f"""
import pathlib, sys
served = pathlib.Path({str(served)!r})
if served.exists():
    sys.exit(1)
served.touch()
{SERVER.replace("sys.argv[1]", str(port))}
"""

    async def scenario() -> None:
        running = PodProcess(pod(code, ports={"http": port}), tmp_path / "pod.log", print)
        task = asyncio.create_task(running.run())
        await until(lambda: running.ready_since)
        os.kill(running.pid, signal.SIGKILL)
        await until(lambda: running.restarts == 7 or task.done())
        assert not task.done()
        await running.stop()
        await task

    run(scenario)


@pytest.mark.parametrize("steady_s", [0.0, 60.0])
def test_a_pod_that_was_ready_is_started_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steady_s: float
) -> None:
    monkeypatch.setattr("ullage_cli.processes.pod_process.FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr("ullage_cli.processes.pod_process.STEADY_S", steady_s)

    async def scenario() -> None:
        port = free_port()
        code = SERVER.replace("sys.argv[1]", str(port))
        running = PodProcess(pod(code, ports={"http": port}), tmp_path / "pod.log", print)
        task = asyncio.create_task(running.run())
        for number in range(6):
            await until(lambda count=number: running.restarts == count and running.ready_since)
            os.kill(running.pid, signal.SIGKILL)
            await until(lambda: not running.ready_since or task.done())
        assert not task.done()
        await running.stop()
        await task

    run(scenario)


def test_a_pod_whose_log_cannot_be_written_runs_on_and_its_log_goes_on_with_free_space(
    tmp_path: Path,
) -> None:
    log = tmp_path / "pod.log"
    log.symlink_to("/dev/full")
    printed = tmp_path / "printed"
    code = f"""
import pathlib, signal, sys
for number in range(20_000):
    print("more than the pipe holds", number, flush=True)
pathlib.Path({str(printed)!r}).touch()
signal.sigwait({{signal.SIGUSR1}})
print("up", flush=True)
signal.pause()
"""
    blocked = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})\n{code}"

    async def scenario() -> None:
        said: list[str] = []
        running = process(blocked, tmp_path, said.append)
        task = asyncio.create_task(running.run())
        await until(printed.exists)
        log.unlink()
        os.kill(running.pid, signal.SIGUSR1)
        await until(lambda: is_up(tmp_path))
        await running.stop()
        await task
        assert len(said) == 1
        assert said[0].startswith(f"its log {log} cannot be written: No space left on device;")

    run(scenario)


def test_a_pod_without_a_folder_for_its_log_is_given_up_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_cli.processes.pod_process.FIRST_BACKOFF_S", 0.01)

    async def scenario() -> None:
        failing = pod("raise RuntimeError('boom')")
        runtime = LocalRuntime([failing], tmp_path / "gone", lambda name, text: None)
        with pytest.raises(PodFailed, match=r"(?s)pools\.single: exited 5 times.*boom"):
            async with runtime.running() as failed:
                await asyncio.wait_for(asyncio.shield(failed), DEADLINE_S)

    run(scenario)


def test_a_process_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_cli.processes.pod_process.FIRST_BACKOFF_S", 0.01)
    program = tmp_path / "python"
    missing = dataclasses.replace(pod(""), command=(str(program), "-c", FOREVER))

    async def scenario() -> None:
        with pytest.raises(PodFailed, match=r"could not be started: .*No such file.*; check the"):
            await PodProcess(missing, tmp_path / "pod.log", print).run()

        def on_progress(text: str) -> None:
            said.append(text)
            if len(said) == 2:
                program.symlink_to(sys.executable)

        said: list[str] = []
        running = PodProcess(missing, tmp_path / "pod.log", on_progress)
        task = asyncio.create_task(running.run())
        await until(lambda: is_up(tmp_path))
        assert running.restarts == 2
        assert [text.startswith("could not be started (") for text in said] == [True, True]
        await running.stop()
        await task

    run(scenario)


def test_an_error_of_the_supervision_ends_the_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def on_progress(name: str, text: str) -> None:
        raise ValueError(f"no such {text}")

    async def scenario() -> None:
        loading = pod("""print('{"stage": "weights"}', flush=True)\n""" + FOREVER)
        runtime = LocalRuntime([loading], tmp_path, on_progress)
        reason = r"^pools\.single: ValueError while demo-single-0 .*: no such weights; .*report"
        with pytest.raises(PodFailed, match=reason):
            async with runtime.running() as failed:
                await asyncio.wait_for(asyncio.shield(failed), DEADLINE_S)

    run(scenario)
    assert "supervising demo-single-0 failed" in caplog.text


def test_progress_survives_a_terminal_that_is_gone() -> None:
    reader, writer = os.openpty()
    terminal = os.fdopen(writer, "w")
    view = StartView(["demo-single-0"], open_console(terminal))
    view.update("demo-single-0", "weights 1%")
    assert b"demo-single-0: weights 1%" in os.read(reader, 1000)
    os.close(reader)
    for percent in range(2, 5):
        view.update("demo-single-0", f"weights {percent}%")
    with contextlib.suppress(OSError):
        terminal.close()


def test_a_large_log_is_rotated_and_one_older_file_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_cli.processes.pod_log.MAX_BYTES", 1000)
    code = f"for number in range(200): print(f'line {{number:03}} ' + 'x' * 90)\n{FOREVER}"

    async def scenario() -> None:
        running = process(code, tmp_path)
        task = asyncio.create_task(running.run())
        await until(lambda: is_up(tmp_path))
        await running.stop()
        await task

    run(scenario)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pod.log", "pod.log.1"]
    older = (tmp_path / "pod.log.1").read_text(encoding="utf-8")
    newer = (tmp_path / "pod.log").read_text(encoding="utf-8")
    assert (len(older), len(newer)) == (1000, 3)
    numbers = [int(line[5:8]) for line in older.splitlines()]
    assert numbers == list(range(190, 200))


@pytest.mark.parametrize("has_terminal", [False, True])
def test_the_end_of_input_is_seen_without_its_terminal_and_on_non_blocking_pipes(
    has_terminal: bool,
) -> None:
    writer, reader = os.openpty() if has_terminal else os.pipe()[::-1]
    os.set_blocking(reader, False)
    waiting = threading.Thread(target=wait_for_eof, args=(reader,), daemon=True)
    waiting.start()
    os.write(writer, b"line\n")
    waiting.join(0.2)
    assert waiting.is_alive()
    os.close(writer)
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    os.close(reader)


def test_the_run_directory_is_locked_against_removal_of_old_files(tmp_path: Path) -> None:
    for chosen in (None, tmp_path):
        with run_directory(chosen) as folder:
            descriptor = os.open(folder, os.O_RDONLY)
            with pytest.raises(BlockingIOError):  # as systemd-tmpfiles tries
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
        assert folder.exists() == (chosen is not None)


def test_scaling_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ullage_cli.processes.runtime.SCALING_RETRY_S", 0.01)
    idle = dict.fromkeys(PoolReport.__struct_fields__, 0)
    body = json.dumps([{"single": idle | {"wanted": 1}}]).encode()

    class Router(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    said: list[str] = []

    def on_scaled(pool: str, text: str) -> None:
        said.append(text)
        if len(said) == 1:
            raise ValueError("a bug")

    async def scenario(port: int) -> None:
        runtime = LocalRuntime([pod(FOREVER)], tmp_path, lambda name, text: None, {"single": 0})
        async with runtime.running():
            scaling = asyncio.create_task(
                keep_scaled(runtime, {"single": SLEEPING}, {"single": 0}, port, on_scaled)
            )
            await until(lambda: runtime.processes or scaling.done())
            assert not scaling.done()
            scaling.cancel()
            await asyncio.gather(scaling, return_exceptions=True)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Router) as router:
        threading.Thread(target=router.serve_forever, daemon=True).start()
        asyncio.run(scenario(router.server_port))
        router.shutdown()
    assert [text.partition(" (")[0] for text in said] == ["1 engines"] * 2
    assert "scaling failed" in caplog.text


def test_an_overlong_line_is_logged_and_ends_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        running = process(f"print('x' * (5 << 20)); {FOREVER}", tmp_path)
        task = asyncio.create_task(running.run())
        await until(lambda: is_up(tmp_path))
        await running.stop()
        await task
        text = (tmp_path / "pod.log").read_text(encoding="utf-8")
        assert (text.count("x"), text.splitlines()[-1]) == (5 << 20, "up")

    run(scenario)


def test_environment_and_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        running = process(f"import os; print('I am', os.environ['POD_NAME']); {FOREVER}", tmp_path)
        task = asyncio.create_task(running.run())
        await until(lambda: is_up(tmp_path))
        await running.stop()
        await task
        assert "I am demo-single-0" in (tmp_path / "pod.log").read_text(encoding="utf-8")

    run(scenario)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('{"stage": "weights", "done_bytes": 30, "total_bytes": 40}', "weights 75%"),
        ('{"stage": "warm_up", "done_bytes": 0, "total_bytes": 0}', "warm_up"),
        ('{"message": "hello"}', ""),
        ('{"stage": 7}', ""),
        ("{broken", ""),
        ("plain", ""),
    ],
)
def test_progress_comes_from_the_log(line: str, shown: str) -> None:
    assert progress_of(line) == shown


def test_one_hopeless_pod_ends_the_whole_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        bad = "print('error: memory.deviceBytes: too small'); raise SystemExit(2)"
        pods = [pod(FOREVER, "demo-single-0"), pod(bad, "demo-single-1")]
        runtime = LocalRuntime(pods, tmp_path, lambda name, text: None)
        with pytest.raises(PodFailed, match=r"^pools\.single: memory\.deviceBytes: too small$"):
            async with runtime.running() as followed:
                await asyncio.wait_for(asyncio.shield(followed), DEADLINE_S)
        assert not any(psutil.pid_exists(each.pid) for each in runtime.processes)

    run(scenario)


def test_a_pool_grows_sleeps_and_wakes(tmp_path: Path) -> None:
    async def scenario() -> None:
        pods = [pod(FOREVER, f"demo-single-{index}") for index in range(3)]
        runtime = LocalRuntime(pods, tmp_path, lambda name, text: None, {"single": 1})

        def names() -> list[str]:
            return sorted(each.pod.name for each in runtime.processes if each.pid)

        async with runtime.running() as followed:
            await until(lambda: names() == ["demo-single-0"])
            await runtime.scale("single", 3)
            await until(lambda: len(names()) == 3)
            pids = [each.pid for each in runtime.processes]
            await runtime.scale("single", 0)
            assert runtime.processes == []
            assert not any(map(psutil.pid_exists, pids))
            await runtime.scale("single", 1)
            await until(lambda: names() == ["demo-single-0"])
            assert not followed.done()
            [pid] = [each.pid for each in runtime.processes]
        assert not psutil.pid_exists(pid)

    run(scenario)


def test_whoever_cannot_wait_ends_all_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        pods = [pod(STUBBORN, f"demo-single-{index}", grace_s=math.inf) for index in range(2)]
        runtime = LocalRuntime(pods, tmp_path, lambda name, text: None)
        async with runtime.running():
            await until(lambda: all(each.pid for each in runtime.processes))
            pids = [each.pid for each in runtime.processes]
            asyncio.get_running_loop().call_later(0.5, runtime.kill)
        assert not any(map(psutil.pid_exists, pids))

    run(scenario)


def test_killing_the_parent_leaves_no_pod_behind(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
from ullage_cli.local.pods import Pod
from ullage_cli.processes.pod_process import PodProcess
pod = Pod("p-0", "p", "pools.single", (sys.executable, "-c", {FOREVER!r}), {{}}, {{}}, 20)
asyncio.run(PodProcess(pod, Path({str(tmp_path / "pod.log")!r}), print).run())
"""
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        asyncio.run(until(lambda: is_up(tmp_path)))
        [child] = psutil.Process(parent.pid).children()
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        child.wait(DEADLINE_S)
    assert not child.is_running()
