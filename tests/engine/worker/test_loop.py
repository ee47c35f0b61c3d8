"""The worker's loop between steps: how long it waits for further requests."""

import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ullage_common.config.engine import BatchingSection, DegradeSection
from ullage_engine.memory.out_of_memory import OutOfMemoryFault
from ullage_engine.memory.pressure import PressureController
from ullage_engine.protocol.errors import MemoryShortError
from ullage_engine.protocol.messages import Shutdown, StateReport, Submit, ToWorker
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.protocol.worker_state import WorkerState
from ullage_engine.worker.loop import DRAIN_S, Link, StartedEngine, Turns, Worker


class FakeEngine:
    """Takes requests and computes nothing."""

    def __init__(self, has_work: bool, has_decodes: bool) -> None:
        self.events = RequestEvents()
        self.has_work = has_work
        self.has_decodes = has_decodes

    def submit_group(self, requests: list[EngineRequest], *, resumed: bool) -> list[object]:
        return []

    def take_failed(self) -> list[object]:
        return []

    def take_scored(self) -> list[object]:
        return []


class FakeLink:
    """Has some requests at once, and notes for how long more are waited for; none come."""

    def __init__(self, num_requests: int) -> None:
        self.waited_s: list[float] = []
        self._messages: list[ToWorker] = [request(str(number)) for number in range(num_requests)]

    def send(self, message: object) -> None: ...

    def receive(self, timeout_s: float) -> ToWorker | None:
        if self._messages:
            return self._messages.pop()
        if timeout_s:
            self.waited_s.append(timeout_s)
            return Shutdown() if len(self.waited_s) == 1 else None
        return None


def take_messages(worker: Worker, link: FakeLink) -> None:
    """Let the worker take the link's messages, as `Worker.run` does at the start of each turn."""
    receiving: Turns = worker._take_messages()
    with contextlib.suppress(StopIteration):
        timeout_s = next(receiving)
        while True:
            timeout_s = receiving.send(link.receive(timeout_s))


def request(name: str) -> Submit:
    return Submit(
        requests=[
            EngineRequest(
                request_id=name,
                token_ids=[1],
                num_prompt_tokens=1,
                max_tokens=1,
                sampling=SamplingParams(),
            )
        ]
    )


@pytest.mark.parametrize(
    ("num_requests", "has_work", "has_decodes", "window_s"),
    [
        (1, True, True, 0.0),
        (2, True, True, 0.0),
        (1, True, False, 0.0),
        (2, True, False, 30.0),
        (2, False, False, 60.0),
    ],
    ids=["one", "decodes are due", "one beside prompts", "prompts", "idle"],
)
def test_more_requests_are_waited_for_only_where_no_decode_is_due(
    num_requests: int, has_work: bool, has_decodes: bool, window_s: float
) -> None:
    link = FakeLink(num_requests)
    started = cast(StartedEngine, SimpleNamespace(engine=FakeEngine(has_work, has_decodes)))
    pressure = PressureController(DegradeSection())
    windows = BatchingSection(prefill_window=60.0, decode_window=30.0)
    worker = Worker(started, windows, cast(Link, link), pressure)
    take_messages(worker, link)
    assert bool(link.waited_s) == bool(window_s)
    assert all(window_s / 2 < waited <= window_s for waited in link.waited_s[:1])


class SlowEngine(FakeEngine):
    """Takes a millisecond of a clock for each request."""

    now_s = 0.0
    num_taken = 0

    def submit_group(self, requests: list[EngineRequest], *, resumed: bool) -> list[object]:
        self.now_s += 1e-3
        self.num_taken += 1
        return []


@pytest.mark.parametrize("has_work", [True, False], ids=["busy", "idle"])
def test_a_flood_of_requests_delays_a_step_by_no_more_than_its_time(has_work: bool) -> None:
    engine = SlowEngine(has_work, has_decodes=has_work)
    link = FakeLink(1000)
    started = cast(StartedEngine, SimpleNamespace(engine=engine))
    windows = BatchingSection(prefill_window=0.01, decode_window=0.01)
    pressure = PressureController(DegradeSection())
    worker = Worker(started, windows, cast(Link, link), pressure, clock=lambda: engine.now_s)

    taken = []
    while engine.num_taken < 1000:
        engine.now_s += 0.1  # a step
        before = engine.num_taken
        take_messages(worker, link)
        taken.append(engine.num_taken - before)

    # An idle worker collects more until its window ends, within the same bound.
    most = DRAIN_S if has_work else DRAIN_S + 0.01 + DRAIN_S
    assert sum(taken) == 1000
    assert max(taken) <= most * 1e3 + 1
    assert min(taken[:-1]) >= DRAIN_S * 1e3 - 1


def make_state(num_oom_events: int) -> WorkerState:
    return WorkerState(
        kv_pool_bytes=1,
        kv_free_bytes=1,
        kv_reclaimable_bytes=0,
        kv_committed_bytes=0,
        num_running=0,
        num_waiting=0,
        num_steps=0,
        expected_output_tokens=1,
        prefill_backlog_tokens=0,
        num_preemptions=0,
        total_bytes=1,
        threshold=1.0,
        decode_tokens_per_second=0.0,
        prefill_tokens_per_second=0.0,
        num_oom_events=num_oom_events,
        releases=[],
        ledger=[],
        rss_bytes=1,
    )


@pytest.mark.parametrize("error", [OutOfMemoryFault("injected"), MemoryShortError("others")])
def test_a_worker_that_a_step_ends_reports_the_shortages_before_that(error: Exception) -> None:
    """The server counts the last one by the worker's exit status."""
    sent: list[object] = []

    def step() -> None:
        raise error

    engine = FakeEngine(has_work=True, has_decodes=True)
    engine.num_steps = 0  # type: ignore[attr-defined]
    engine.step = step
    engine.tiers = None
    engine.set_batch_share = lambda share: None  # type: ignore[attr-defined]
    link = FakeLink(0)
    link.send = sent.append  # type: ignore[method-assign]
    started = SimpleNamespace(engine=engine, state=lambda: make_state(3), ready=lambda state: state)
    pressure = PressureController(DegradeSection())
    worker = Worker(cast(StartedEngine, started), BatchingSection(), cast(Link, link), pressure)
    with pytest.raises(type(error)):
        worker.run()
    reports = [each for each in sent if isinstance(each, StateReport)]
    assert [each.state.num_oom_events for each in reports] == [3]


def test_a_worker_that_has_no_server_says_why_it_ends(tmp_path: Path) -> None:
    run = "import argparse, sys; from ullage_engine.worker import loop; "
    run += "sys.exit(loop.run(argparse.ArgumentParser(), None, sys.argv[1:]))"
    options = ["--config", str(tmp_path / "none"), "--endpoint", str(tmp_path / "nobody")]
    command = [sys.executable, "-c", run, *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert "server is gone" in ended.stderr
    assert "No such file" in ended.stderr
