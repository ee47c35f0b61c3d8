"""AIPerf: synthetic chats at a concurrency of two."""

import json
import os
from pathlib import Path

from checks import MODEL, URL, check, expect, run
from commands import call

REQUESTS = 8

# Offline, AIPerf takes a tokenizer's folder for the name of a repository.
del os.environ["HF_HUB_OFFLINE"]


@check("load")
def load():
    call(
        "aiperf",
        "profile",
        f"--model={MODEL}",
        f"--url={URL}",
        "--endpoint-type=chat",
        "--streaming",
        f"--request-count={REQUESTS}",
        "--concurrency=2",
        f"--tokenizer={os.environ['SERVICE_TOKENIZER']}",
        "--synthetic-input-tokens-mean=32",
        "--output-tokens-mean=8",
        "--artifact-dir=report",
        "--ui=none",
    )
    [report] = Path("report").rglob("profile_export_aiperf.json")
    summary = json.loads(report.read_text(encoding="utf-8"))
    succeeded = summary["request_count"]["avg"]
    failed = (summary.get("error_request_count") or {}).get("avg", 0)
    expect(succeeded == REQUESTS and not failed, f"{succeeded} succeeded, {failed} failed")
    return f"{succeeded:.0f} requests"


run()
