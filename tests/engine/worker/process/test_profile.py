"""What a real worker's steps look like in torch's profiler and as a timeline."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ullage_engine.protocol.messages import StartProfile
from ullage_engine.protocol.requests import EngineRequest

MakeRequest = Callable[..., EngineRequest]


def profiled(worker: Any, path: Path, kind: str, requests: list[EngineRequest]) -> list[Any]:
    """Profiles while the requests are computed; returns the trace's events."""
    worker.send(StartProfile(kind=kind, steps=6, seconds=60.0, path=str(path)))
    for request in requests:
        worker.submit(request)
    done = worker.wait_profile()
    worker.finish_all()
    assert (done.num_steps, done.error) == (6, "")
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return list(trace["traceEvents"])


def test_operations_are_in_the_ranges_of_a_step(
    worker: Any, make_request: MakeRequest, tmp_path: Path
) -> None:
    requests = [make_request("p", list(range(40, 60)), max_tokens=12)]
    events = profiled(worker, tmp_path / "p.json.gz", "operations", requests)
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert ranges.count("prefill") == 1
    assert ranges.count("decode") == 5
    assert ranges.count("sample") == 6
    assert any(event["name"].startswith("aten::") for event in events)
    # Afterwards nobody looks, and another look is possible.
    again = profiled(worker, tmp_path / "q.json.gz", "timeline", requests)
    assert sum(event["name"] == "step" for event in again) == 6


def test_a_timeline_has_steps_and_a_lane_for_each_request(
    worker: Any, make_request: MakeRequest, tmp_path: Path
) -> None:
    requests = [
        make_request("a", list(range(100, 120)), max_tokens=9, client_id="alice"),
        make_request("b", list(range(200, 230)), max_tokens=9, client_id="bob"),
    ]
    events = profiled(worker, tmp_path / "t.json.gz", "timeline", requests)
    lanes = {
        event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"
    }
    assert lanes.keys() >= {"steps", "request alice", "request bob"}
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == 6
    assert sum(step["args"]["prompt_tokens"] for step in steps) == 50
    assert steps[-1]["args"]["decodes"] >= 1
    phases = [event["name"] for event in events if event.get("tid") == lanes["request alice"]]
    assert phases[1:] == ["queue", "prefill", "decode"]
