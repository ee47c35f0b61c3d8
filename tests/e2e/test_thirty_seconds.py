"""Whatever happens to a worker, its streams go on within thirty seconds as if nothing had been, and
its memory is back: a step out of memory, SIGKILL, SIGSTOP, and a hang that computes.
"""

import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    Engine = Any
    StartEngine = Callable[..., Engine]

PROMISED_S = 30.0
PATIENCE_S = 170.0
LENGTH = 160
PROMPTS = ([504, 1296, 3995, 4199, 282, 7158, 359], [1, 4093, 198, 1780, 314, 260, 3575, 282])
SPINS = """
import signal, sys

def spin(number, frame):
    while True:
        pass

if "ullage_engine.worker.main" in sys.orig_argv:
    signal.signal(signal.SIGUSR2, spin)
"""


class Streams:
    """Greedy answers at once, each read by a thread of its own."""

    def __init__(self, target: str) -> None:
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        self.errors: list[str] = []
        self._times: list[list[float]] = [[] for _ in PROMPTS]
        self._channel = grpc.insecure_channel(target)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._threads = [
            threading.Thread(target=self._follow, args=(number,)) for number in range(len(PROMPTS))
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, number: int) -> None:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=PROMPTS[number]),
            sampling=pb.SamplingParams(temperature=0.0),
            stop=pb.StopConditions(max_tokens=LENGTH, ignore_eos=True),
            output=pb.OutputOptions(return_token_ids=True),
        )
        try:
            for response in self._stub.Generate(request, timeout=PATIENCE_S):
                if response.delta.token_ids:
                    self.tokens[number] += response.delta.token_ids
                    self._times[number].append(time.monotonic())
        except grpc.RpcError as error:
            self.errors.append(str(error))

    def wait_begun(self) -> None:
        until(lambda: self.errors or all(len(each) >= 4 for each in self.tokens))

    def finish(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._channel.close()

    def longest_pause_s(self, after: float) -> float:
        """Seconds between two tokens of one stream, or until the first one, after a moment."""
        return max(
            later - max(earlier, after)
            for times in self._times
            for earlier, later in pairwise(times)
            if later > after
        )


def promised_s() -> float:
    """Returns the promise, longer on a machine on which more wants to run than has cores."""
    one_minute, *_ = os.getloadavg()
    return PROMISED_S * max(1.0, one_minute / (os.cpu_count() or 1))


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return result


def headroom(engine: "Engine") -> headroom_pb2.Headroom:
    with grpc.insecure_channel(engine.target) as channel:
        stub = headroom_pb2_grpc.HeadroomServiceStub(channel)
        return stub.GetHeadroom(headroom_pb2.GetHeadroomRequest()).headroom


def num_ooms(engine: "Engine") -> float:
    with urllib.request.urlopen(engine.metrics_url) as response:
        text = response.read().decode()
    return float(re.search(r"^ullage_oom_events_total\{.*\} (\S+)$", text, re.M)[1])


def survive(engine: "Engine", fault: Callable[[int], None]) -> float:
    """Has streams meet a fault of their worker, whose process id the fault is given; returns the
    longest pause. Texts and headroom are those of before."""
    undisturbed = Streams(engine.target)
    undisturbed.finish()
    assert not undisturbed.errors
    free = until(lambda: is_idle(headroom(engine)))

    streams = Streams(engine.target)
    streams.wait_begun()
    at = time.monotonic()
    fault(engine.worker_pid)
    streams.finish()
    assert not streams.errors
    assert streams.tokens == undisturbed.tokens

    until(lambda: is_idle(headroom(engine)) == free)
    return streams.longest_pause_s(at)


def is_idle(report: headroom_pb2.Headroom) -> int:
    """Returns the headroom of an engine that serves and computes nothing; else 0."""
    is_busy = report.requests_running or report.requests_waiting or not report.ready
    return 0 if is_busy else report.headroom_bytes


@pytest.fixture(scope="module")
def spinning(
    start_engine: "StartEngine", tmp_path_factory: pytest.TempPathFactory
) -> Iterator["Engine"]:
    """An engine whose worker computes for ever when it gets SIGUSR2."""
    folder = tmp_path_factory.mktemp("spins")
    (folder / "sitecustomize.py").write_text(SPINS)
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        patch.setenv("PYTHONPATH", path)
        yield start_engine(memory={"max_kv": 48 << 20})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR2])
def test_streams_go_on_soon_whatever_a_worker_does(
    spinning: "Engine", number: signal.Signals
) -> None:
    pids: list[int] = []

    def fault(pid: int) -> None:
        pids.append(pid)
        os.kill(pid, number)

    pause_s = survive(spinning, fault)
    assert spinning.worker_pid != pids[0]
    assert pause_s < promised_s()
    print(f"{number.name}: {pause_s:.1f} s")


def test_streams_go_on_soon_after_a_step_out_of_memory(spinning: "Engine") -> None:
    before = num_ooms(spinning)

    def fault(pid: int) -> None:
        with grpc.insecure_channel(spinning.target) as channel:
            request = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_OOM)
            answer = admin_pb2_grpc.AdminServiceStub(channel).InjectFault(request)
            assert answer.worker_pid == pid

    pause_s = survive(spinning, fault)
    assert num_ooms(spinning) == before + 1
    assert pause_s < promised_s()
    print(f"a step out of memory: {pause_s:.1f} s")
