"""lm-evaluation-harness: a local task of choices, and one of continuations."""

import json
from pathlib import Path

from checks import MODEL, URL, check, expect, run
from commands import call

EXAMPLES = (
    {"question": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0},
    {"question": "The capital of Italy is", "choices": [" Paris", " Rome"], "answer": 1},
    {"question": "Two plus two is", "choices": [" four", " nine", " seven"], "answer": 0},
)
SCORED = """task: scored
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
CONTINUED = """task: continued
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def samples(task: str, text: str) -> list[dict]:
    """Run a task, and return the samples that the harness has logged."""
    folder = Path(task)
    folder.mkdir()
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, EXAMPLES)), encoding="utf-8")
    (folder / f"{task}.yaml").write_text(text.format(data=data.resolve()), encoding="utf-8")

    server = f"model={MODEL},base_url={URL}/v1/completions,num_concurrent=2,max_retries=1"
    call(
        "lm-eval",
        "run",
        "--model=local-completions",
        f"--model_args={server}",
        f"--tasks={task}",
        f"--include_path={folder.resolve()}",
        f"--output_path={folder.resolve()}",
        "--log_samples",
    )
    [log] = folder.rglob("samples_*.jsonl")
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


@check("loglikelihood")
def loglikelihood():
    logged = samples("scored", SCORED)
    scores = [float(score) for sample in logged for [[score, _]] in sample["resps"]]
    expect(len(scores) == sum(len(example["choices"]) for example in EXAMPLES), logged)
    expect(all(score < 0 for score in scores), scores)
    return f"{len(scores)} choices, {min(scores):.2f} to {max(scores):.2f}"


@check("generation")
def generation():
    logged = samples("continued", CONTINUED)
    texts = [sample["resps"][0][0] for sample in logged]
    expect(len(texts) == len(EXAMPLES) and all(texts), logged)
    return f"{len(texts)} examples"


run()
