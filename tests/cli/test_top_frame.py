"""What `ullage top` works out of two samples, and how it is drawn."""

import copy
import io
from typing import Any

from rich.console import Console

from ullage_cli.top.drawing import bar, draw
from ullage_cli.top.frame import EngineRow, Sample, make_frame, read_metrics

ENGINE = {
    "id": "demo-single-0",
    "pool": "single",
    "route": "single",
    "state": "ready",
    "trouble": "",
    "reports": {"restarts": 1},
    "worker_restarts": 2,
    "pressure_level": 1,
    "headroom_bytes": 550,
    "kv_pool_bytes": 1000,
    "kv_free_bytes": 100,
    "kv_reclaimable_bytes": 600,
    "kv_committed_bytes": 150,
    "requests_running": 3,
    "requests_waiting": 4,
    "decode_tokens_per_second": 10.0,
}
RECORD = {
    "request_id": "r1",
    "arrived": 1.8e9,
    "action": "reject",
    "reason": "KV_HEADROOM",
    "error": "QUEUE_FULL",
    "route": "single",
    "engine": "",
    "status": 429,
    "retry_after_s": 7,
    "predicted_bytes": 3 << 20,
    "available_bytes": 550,
    "queued_s": 0.25,
    "ttft_s": None,
    "output_tokens": 0,
}
STATS: dict[str, Any] = {
    "model": "tiny",
    "ready": True,
    "engines": [ENGINE],
    "queue": {"max_requests": 16, "oldest_s": 1.5},
    "decisions": [
        {"action": "accept", "route": "single", "reason": "FITS", "count": 10},
        {"action": "accept", "route": "large", "reason": "FITS", "count": 5},
        {"action": "reject", "route": "single", "reason": "QUEUE_FULL", "count": 2},
    ],
    "latest": [RECORD, {**RECORD, "retry_after_s": 30, "request_id": "r0"}],
}
METRICS = """\
# HELP ullage_router_requests_total Requests
# TYPE ullage_router_requests_total counter
ullage_router_requests_total{code="200"} 30.0
ullage_router_requests_total{code="429"} 5.0
# TYPE ullage_router_output_tokens_total counter
ullage_router_output_tokens_total 400.0
# TYPE ullage_router_decisions_total counter
ullage_router_decisions_total{route="single",action="accept"} 10.0
ullage_router_decisions_total{route="large",action="accept"} 20.0
ullage_router_decisions_total{route="single",action="reject"} 5.0
# TYPE ullage_router_queue_requests gauge
ullage_router_queue_requests 7.0
# TYPE ullage_router_inflight_requests gauge
ullage_router_inflight_requests 9.0
# TYPE process_open_fds gauge
process_open_fds 9.0
"""


def test_totals_are_named_by_their_labels_in_order() -> None:
    totals = read_metrics(METRICS)
    assert totals["requests_total", "200"] == 30
    assert totals["decisions_total", "accept", "large"] == 20
    assert totals["queue_requests",] == 7
    assert not [key for key in totals if "fds" in key[0]]


def test_rates_are_growth_over_the_time_between_two_samples() -> None:
    before = Sample(10.0, STATS, read_metrics(METRICS))
    later = copy.deepcopy(STATS)
    later["decisions"][2]["count"] += 4
    later["decisions"][0]["count"] += 2
    text = METRICS.replace('code="429"} 5.0', 'code="429"} 9.0').replace("400.0", "500.0")
    frame = make_frame(before, Sample(12.0, later, read_metrics(text)))
    assert (frame.requests_per_s, frame.answered_tokens_per_s) == (2.0, 50.0)
    assert frame.tokens_per_s == 30.0
    assert frame.refused_per_s == 2.0
    rows = [(row.action, row.reason, row.per_s, row.total) for row in frame.decisions]
    assert rows == [("reject", "QUEUE_FULL", 2.0, 6), ("accept", "FITS", 1.0, 17)]
    assert (frame.queue_requests, frame.inflight, frame.queue_oldest_s) == (7, 9, 1.5)
    assert frame.retry_after_s == (7, 30)
    assert frame.latest[0].reason == "QUEUE_FULL"

    first = make_frame(None, before)
    assert (first.requests_per_s, first.refused_per_s, first.decisions[0].per_s) == (0, 0, 0)
    anew = make_frame(Sample(12.0, later, read_metrics(text)), Sample(13.0, STATS, {}))
    assert (anew.requests_per_s, anew.refused_per_s) == (0, 0), "the router began anew"


def test_parts_of_a_pool_add_up_and_one_that_is_small_is_seen() -> None:
    (engine,) = make_frame(None, Sample(1.0, STATS, {})).engines
    parts = (engine.used_bytes, engine.committed_bytes, engine.reclaimable_bytes)
    assert parts == (300, 150, 550)  # 50 of what is committed come from caches
    assert engine.headroom_bytes == 550
    assert engine.restarts == 3
    silent = {k: v for k, v in ENGINE.items() if not k.startswith(("kv", "head"))}
    (row,) = make_frame(None, Sample(1.0, {**STATS, "engines": [silent]}, {})).engines
    assert row.pool_bytes == 0
    tiny = EngineRow("e", "p", "p", "ready", "", pool_bytes=1000, used_bytes=1)
    assert bar(tiny, "#=+.").plain == "#" + 19 * "."
    full = EngineRow("e", "p", "p", "ready", "", pool_bytes=9, used_bytes=9, committed_bytes=9)
    assert bar(full, "#=+.").plain == 20 * "#"


def test_a_frame_is_drawn_in_letters_where_blocks_cannot_be_shown() -> None:
    frame = make_frame(None, Sample(1.0, STATS, read_metrics(METRICS)))
    out = io.StringIO()
    console = Console(file=out, width=140)
    console.print(draw(frame, "connection refused", with_blocks=False))
    text = out.getvalue()
    assert text.isascii()
    for words in (
        "demo-single-0",
        "######===+++",
        "7 of 16",
        "oldest 1.5 s",
        "429 retry 7 s",
        "retrying: connection refused",
    ):
        assert words in text, words
    empty = {**STATS, "engines": [], "latest": [], "decisions": []}
    console.print(draw(make_frame(None, Sample(1.0, empty, {})), "", with_blocks=True))
    assert "no engine has reported yet" in out.getvalue()
