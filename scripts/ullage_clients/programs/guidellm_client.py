"""GuideLLM: synthetic prompts at a concurrency of two."""

import json
import os
from pathlib import Path

from checks import MODEL, URL, check, expect, run
from commands import call

REQUESTS = 8


@check("load")
def load():
    call(
        "guidellm",
        "run",
        f"--backend=kind=openai_http,target={URL},model={MODEL}",
        "--profile=kind=concurrent,streams=2",
        f"--constraint=kind=max_requests,count={REQUESTS}",
        "--data=kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        f"--tokenizer=kind=hf_auto,model={os.environ['SERVICE_TOKENIZER']}",
        "--output=kind=json,path=report.json",
        "--disable-console",
    )
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    expect(totals["successful"] == REQUESTS and not totals["errored"], totals)
    return f"{totals['successful']} requests"


run()
