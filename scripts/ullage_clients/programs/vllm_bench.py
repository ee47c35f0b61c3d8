"""vLLM's load generator: random prompts to /v1/completions."""

import json
import os
from pathlib import Path

from checks import MODEL, URL, check, expect, run
from commands import call

REQUESTS = 8


@check("load")
def load():
    call(
        "vllm",
        "bench",
        "serve",
        "--backend=openai",
        f"--base-url={URL}",
        f"--model={MODEL}",
        f"--tokenizer={os.environ['SERVICE_TOKENIZER']}",
        "--dataset-name=random",
        "--random-input-len=32",
        "--random-output-len=8",
        f"--num-prompts={REQUESTS}",
        "--max-concurrency=2",
        "--disable-tqdm",
        "--save-result",
        "--result-filename=result.json",
    )
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    expect(result["completed"] == REQUESTS and not result["failed"], result)
    expect(result["total_output_tokens"] >= REQUESTS, result)
    return f"{result['completed']} requests, {result['total_output_tokens']} tokens"


run()
