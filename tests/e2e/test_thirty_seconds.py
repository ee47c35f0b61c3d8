"""Whatever happens to a worker, its streams go on within thirty seconds as if nothing had been, and
its memory is back: a step out of memory, SIGKILL, SIGSTOP, a hang that computes, and memory that is
really exhausted, by a limit of the process or by another process of its container.
"""

import os
import re
import resource
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
from ullage_testing.cgroup import Container, make_container

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
FREE_BYTES = 16 << 20
"""What a limit leaves to a process: small objects of Python, and no large allocation."""
HANDLERS = """
import ctypes, resource, signal, sys

SIZE = 512 << 20
LEFT = 16 << 20

def keep_limit():
    # What the step under way has given back since the limit was set is not to be had again.
    with open("/proc/self/statm") as file:
        total, _, _, _, _, data, _ = (4096 * int(each) for each in file.read().split())
    for limit, size in ((resource.RLIMIT_AS, total), (resource.RLIMIT_DATA, data)):
        before, _ = resource.getrlimit(limit)
        if before != resource.RLIM_INFINITY:
            least = min(before, size + LEFT)
            resource.setrlimit(limit, (least, least))

def spin(number, frame):
    while True:
        pass

def take_in_python(number, frame):
    keep_limit()
    bytearray(SIZE)

def take_in_torch(number, frame):
    import torch
    keep_limit()
    torch.empty(SIZE, dtype=torch.uint8)

def take_in_cpp(number, frame):
    library = ctypes.CDLL("libstdc++.so.6")
    keep_limit()
    library._Znwm(ctypes.c_size_t(SIZE))  # operator new

# Workers and their ranks are forked from it.
if "ullage_engine.worker.fork_server" in sys.orig_argv:
    signal.signal(signal.SIGUSR2, spin)
    signal.signal(signal.SIGALRM, take_in_python)
    signal.signal(signal.SIGVTALRM, take_in_torch)
    signal.signal(signal.SIGPROF, take_in_cpp)
"""
TAKING = {"Python": signal.SIGALRM, "torch": signal.SIGVTALRM, "C++": signal.SIGPROF}
"""Signals at which a worker asks for memory, by the language that asks."""


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
def start_handling(
    start_engine: "StartEngine", tmp_path_factory: pytest.TempPathFactory
) -> Iterator["StartEngine"]:
    """Starts engines whose workers compute for ever when they get SIGUSR2, and ask for memory when
    they get a signal of `TAKING`."""
    folder = tmp_path_factory.mktemp("handlers")
    (folder / "sitecustomize.py").write_text(HANDLERS)
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        patch.setenv("PYTHONPATH", path)
        yield start_engine


@pytest.fixture(scope="module")
def spinning(start_handling: "StartEngine") -> "Engine":
    return start_handling(memory={"max_kv": 48 << 20})


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


def replace_worker(engine: "Engine") -> None:
    """Kill the worker of an idle engine, and return when the next one serves."""
    engine.kill_worker()
    until(lambda: not headroom(engine).ready)
    until(lambda: is_idle(headroom(engine)))


def limit_memory(pid: int, limit: int) -> None:
    """Refuse a process all large allocations from now on."""
    memory = psutil.Process(pid).memory_info()
    size = {resource.RLIMIT_AS: memory.vms, resource.RLIMIT_DATA: memory.data}[limit]
    resource.prlimit(pid, limit, (size + FREE_BYTES, size + FREE_BYTES))


@pytest.mark.parametrize(
    ("limit", "language"),
    [
        (resource.RLIMIT_AS, "Python"),
        (resource.RLIMIT_DATA, "torch"),
        (resource.RLIMIT_AS, "C++"),
    ],
    ids=["address space, Python", "data, torch", "address space, C++"],
)
def test_streams_go_on_soon_where_a_process_gets_no_more_memory(
    spinning: "Engine", limit: int, language: str
) -> None:
    """Within a step or between two; C++ code that must not throw ends the process."""
    before = num_ooms(spinning)

    def fault(pid: int) -> None:
        limit_memory(pid, limit)
        os.kill(pid, TAKING[language])

    pause_s = survive(spinning, fault)
    assert num_ooms(spinning) == before + 1
    assert pause_s < promised_s()
    print(f"no memory for {language}: {pause_s:.1f} s")

    replace_worker(spinning)  # one that survived is limited still


def test_a_grammar_for_which_there_is_no_memory_is_the_next_workers(spinning: "Engine") -> None:
    """Nothing but a large file of the model is to be read, and the client is not told to simplify
    the grammar."""
    until(lambda: is_idle(headroom(spinning)))
    # This is the engine's first grammar, so that neither a worker nor the fork server has the
    # vocabulary.
    before = num_ooms(spinning)
    answers: list[list[int]] = []

    def fault(pid: int) -> None:
        limit_memory(pid, resource.RLIMIT_AS)
        answers.append(matched(spinning))
        assert spinning.worker_pid != pid

    pause_s = survive(spinning, fault)
    assert answers == [matched(spinning)]
    assert num_ooms(spinning) == before + 1
    assert pause_s < promised_s()
    print(f"no memory for a grammar: {pause_s:.1f} s")


def matched(engine: "Engine") -> list[int]:
    """Return the tokens of a greedy answer that matches a grammar."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPTS[0]),
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopConditions(max_tokens=20),
        output=pb.OutputOptions(return_token_ids=True),
        grammar=pb.Grammar(regex="[a-z ]{40,60}"),
    )
    with grpc.insecure_channel(engine.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        responses = stub.Generate(request, timeout=PATIENCE_S)
        return [token for each in responses for token in each.delta.token_ids]


FOUR_RANKS = {
    "gpus": 4,
    "parallelism": {"tensor": 2, "pipeline": 2},
    "memory": {"device_bytes": 1 << 30, "max_kv": 32 << 20, "tiers": {"host": {"size": 0}}},
    "batching": {"max_sequences": 4, "prefill_chunk_tokens": 64},
    "model": {"max_model_len": 256, "deterministic": True},
}


@pytest.fixture(scope="module")
def four_ranks(start_handling: "StartEngine") -> "Engine":
    return start_handling(**FOUR_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("language", ["Python", "torch", "C++"])
def test_streams_go_on_soon_where_one_rank_of_four_gets_no_more_memory(
    four_ranks: "Engine", language: str
) -> None:
    before = num_ooms(four_ranks)

    def fault(pid: int) -> None:
        ranks = psutil.Process(pid).children()
        assert len(ranks) == 3
        limit_memory(ranks[-1].pid, resource.RLIMIT_AS)
        ranks[-1].send_signal(TAKING[language])

    pause_s = survive(four_ranks, fault)
    assert num_ooms(four_ranks) == before + 1
    assert pause_s < promised_s()
    print(f"no memory for {language} in one rank of four: {pause_s:.1f} s")


@pytest.fixture
def container() -> Iterator[Container]:
    with make_container() as made:
        yield made


@pytest.mark.parametrize(
    "sections",
    [{"memory": {"max_kv": 48 << 20}}, pytest.param(FOUR_RANKS, marks=pytest.mark.slow)],
    ids=["one", "four ranks"],
)
def test_streams_go_on_soon_where_another_process_takes_the_containers_memory(
    start_engine: "StartEngine", container: Container, sections: dict[str, Any]
) -> None:
    """The kernel kills the worker or one of its ranks."""
    engine = start_engine(**sections)
    server = psutil.Process(engine.process.pid)
    for process in (server, *server.children()):
        container.take(process.pid)
    # Memory is the container's from the next worker on.
    replace_worker(engine)
    assert num_ooms(engine) == 0

    def fault(pid: int) -> None:
        container.leave_free(96 << 20)
        ranks = [pid, *(each.pid for each in psutil.Process(pid).children())]
        with container.hog(ranks):
            until(lambda: container.num_kills and not psutil.pid_exists(pid))

    pause_s = survive(engine, fault)
    assert num_ooms(engine) == 1
    assert pause_s < promised_s()
    print(f"no memory in the container: {pause_s:.1f} s")
