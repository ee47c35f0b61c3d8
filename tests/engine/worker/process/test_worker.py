"""The real worker process with the real model."""

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ullage_testing.child_process import start_child

from ullage_common.config.engine import EngineConfig
from ullage_common.process.config_file import ConfigError, read_file
from ullage_engine.protocol.errors import WeightsError, WorkerStartError
from ullage_engine.protocol.messages import Cancel, Fault, StartFailed
from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.worker.startup import start

StartWorker = Callable[..., Any]
MakeRequest = Callable[..., EngineRequest]

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
QUESTION = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
END_OF_TURN = 2


def test_it_answers_a_question_with_a_sentence_that_ends(
    worker: Any, make_request: MakeRequest
) -> None:
    answer = worker.submit(make_request("q", QUESTION, max_tokens=40, stop_token_ids=[END_OF_TURN]))
    worker.finish_all()
    # "The capital of France is Paris."
    assert answer.token_ids[:7] == [504, 3575, 282, 4649, 314, 7042, 30]
    assert answer.finish == "stop"
    assert answer.token_ids[-1] == END_OF_TURN


def test_an_out_of_memory_fault_changes_no_token(worker: Any, make_request: MakeRequest) -> None:
    alone = worker.submit(make_request("alone", QUESTION, max_tokens=12))
    worker.finish_all()
    figures = worker.fresh_state().figures
    assert sum(figures.step_seconds.counts) >= 12
    assert figures.step_seconds.total > 0
    before = worker.fresh_state().num_oom_events
    worker.send(Fault(after_steps=3))
    again = worker.submit(make_request("again", QUESTION, max_tokens=12))
    worker.submit(make_request("beside", QUESTION[:5], max_tokens=12))
    worker.finish_all()
    assert again.token_ids == alone.token_ids
    assert worker.fresh_state().num_oom_events == before + 1


def test_a_resumed_request_continues_the_same_text(worker: Any, make_request: MakeRequest) -> None:
    whole = worker.submit(make_request("whole", QUESTION, max_tokens=12))
    worker.finish_all()
    rest = worker.submit(
        make_request(
            "rest",
            QUESTION + whole.token_ids[:5],
            num_prompt_tokens=len(QUESTION),
            max_tokens=12,
        ),
        resumed=True,
    )
    worker.finish_all()
    assert whole.token_ids[:5] + rest.token_ids == whole.token_ids


def test_a_cancelled_request_frees_its_memory(worker: Any, make_request: MakeRequest) -> None:
    answer = worker.submit(make_request("gone", QUESTION, max_tokens=2000))
    worker.wait_for(lambda: bool(answer.token_ids))
    worker.send(Cancel(request_id="gone"))
    state = worker.fresh_state()
    answer.finish = "cancelled"
    assert len(answer.token_ids) < 2000
    kept = state.kv_free_bytes + state.kv_reclaimable_bytes
    assert (state.num_running, kept) == (0, state.kv_pool_bytes)
    assert state.kv_committed_bytes == 0


def test_what_can_never_fit_is_rejected_with_figures(
    worker: Any, make_request: MakeRequest
) -> None:
    answer = worker.submit(make_request("long", [5] * 2048))
    worker.finish_all()
    assert answer.rejected.never
    assert answer.rejected.needed_bytes >= 2048 * 23_040
    assert "2048" in answer.rejected.message


def test_the_ledger_names_every_reservation_and_fits(worker: Any) -> None:
    state = worker.fresh_state()
    assert [entry.name for entry in state.ledger] == [
        "context",
        "weights",
        "step_arena",
        "sampler_arena",
        "workspace",
        "staging",
        "safety_reserve",
        "kv_pool",
    ]
    assert sum(entry.reserved_bytes for entry in state.ledger) <= state.total_bytes


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model": {"max_model_len": 99_999}}, "spec.model.maxModelLen: 99999"),
    ({"gpus": 2}, "pools.single.gpus: 2 is not parallelism.tensor 1 * parallelism.pipeline 1"),
    (
        {"gpus": 4, "parallelism": {"tensor": 4}},
        "pools.single.parallelism.tensor: 4 ranks cannot share",
    ),
    ({"memory": {"host_kv": 999}}, "memory.hostKV: 999 bytes hold no KV block of "),
    ({"model": {"source": "file:///nowhere.gguf"}}, "/nowhere.gguf"),
    ({"device": "tpu"}, "device"),
]


@pytest.mark.parametrize(("sections", "words"), REFUSALS, ids=[words for _, words in REFUSALS])
def test_a_start_that_cannot_succeed_says_why_in_one_line(
    write_config: Callable[..., Path], sections: dict[str, Any], words: str, tmp_path: Path
) -> None:
    memory = {"device_bytes": 4 << 30} | sections.get("memory", {})
    with pytest.raises((ConfigError, WorkerStartError, WeightsError)) as caught:
        config = read_file(write_config(tmp_path, **sections | {"memory": memory}), EngineConfig)
        start(config, lambda _: None, tmp_path / "group", lambda *_: start_child(["sleep", "60"]))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_worker_that_cannot_start_sends_its_reason_and_ends(
    launch_worker: StartWorker, capfd: Any
) -> None:
    worker = launch_worker(
        model={"dtype": "float32", "quantization": "none"}, memory={"device_bytes": 500_000_000}
    )
    message = worker.receive()
    while not isinstance(message, StartFailed):
        message = worker.receive()
    assert message.error.startswith("memory.deviceBytes: weights needs 513 MiB")
    assert "\n" not in message.error
    assert worker.process.wait(20) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_start_that_failed_unforeseen_is_a_crash_of_which_a_line_is_known(
    launch_worker: StartWorker, capfd: Any
) -> None:
    script = """
import sys
from ullage_engine.worker import main as worker
def fail(*arguments):
    raise RuntimeError("no kernel image\\nfor this device")
worker._start = fail
sys.exit(worker.main(sys.argv[4:]))
"""
    worker = launch_worker(prefix=[sys.executable, "-c", script])
    message = worker.receive()
    assert message == StartFailed(error="RuntimeError: no kernel image", may_retry=True)
    assert worker.process.wait(20) == 1
    assert "for this device" in capfd.readouterr().err


def test_it_dies_with_the_server_and_leaves_ctrl_c_to_it(launch_worker: StartWorker) -> None:
    starter = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid); input()"
    worker = launch_worker(prefix=[sys.executable, "-u", "-c", starter])
    worker.receive()
    (child,) = psutil.Process(worker.process.pid).children()
    [ignored] = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text())
    assert int(ignored, 16) >> (signal.SIGINT - 1) & 1
    worker.process.kill()
    assert psutil.wait_procs([child], timeout=20)[1] == []
