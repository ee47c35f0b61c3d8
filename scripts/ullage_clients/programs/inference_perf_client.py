"""Inference-perf: random prompts at a constant rate."""

import json
import os
from pathlib import Path

from checks import MODEL, URL, check, expect, run
from commands import call

RATE = 1
DURATION_S = 8
SIZES = {
    "input_distribution": {"min": 16, "max": 32, "mean": 24, "std_dev": 4, "total_count": 16},
    "output_distribution": {"min": 4, "max": 8, "mean": 6, "std_dev": 1, "total_count": 16},
}


@check("load")
def load():
    configuration = {
        "load": {
            "type": "constant",
            "interval": 1,
            "num_workers": 1,
            "stages": [{"rate": RATE, "duration": DURATION_S}],
        },
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": URL, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": os.environ["SERVICE_TOKENIZER"]},
        "data": {"type": "random", **SIZES},
        "report": {"request_lifecycle": {"summary": True}},
        "storage": {"local_storage": {"path": "reports"}},
    }
    # JSON is YAML, too.
    Path("config.yml").write_text(json.dumps(configuration), encoding="utf-8")
    call("inference-perf", "--config_file", "config.yml")

    [report] = Path("reports").rglob("summary_lifecycle_metrics.json")
    summary = json.loads(report.read_text(encoding="utf-8"))
    succeeded = summary["successes"]["count"]
    failed = summary["failures"]["count"]
    expect(succeeded == RATE * DURATION_S and not failed, f"{succeeded} succeeded, {failed} failed")
    return f"{succeeded} requests"


run()
