"""Compares greedy tokens of eight small random models in float32 with tokens from a CPU.

`python -m benchmarks.gpu oracle` computes the CPU's tokens (the oracle) in advance, and the bundle
contains them. If the first different token is a near-tie, rounding has decided it.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.figures import Fact, Figure, Job, Report, none_of
from benchmarks.gpu.sequences import (
    BLOCKS_EACH,
    TURNS,
    Sequence,
    make_runner,
    run_step,
)
from benchmarks.gpu.ties import Pair, compare
from benchmarks.support.small_models import MODELS, write_model
from ullage_common.config.engine import ModelSection
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.protocol.requests import SamplingParams

ORACLE = "oracle.json"
GREEDY = SamplingParams(temperature=0.0, top_logprobs=2)
OUTPUT_TOKENS = 16
CHUNK_TOKENS = 64

_NARROW = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama, grouped heads, tied": _NARROW,
    "lfm2_moe": {**_NARROW, "moe_intermediate_size": 32},
}
"""Models for a rehearsal, with the changes to their configurations."""

Outputs = list[dict[str, list[Any]]]
"""Each sequence's tokens, and their log-probability gaps to the next likeliest tokens."""


def run(job: Job, report: Report) -> None:
    oracle = read_oracle(job)
    if oracle is None:
        # Slow, but possible where only the tracked files are present.
        report(Fact("oracle", f"computed here, which takes minutes: --bundle has no {ORACLE}"))
        oracle = {name: outputs(job.scratch, name, job.tiny, "cpu") for name in families(job.tiny)}
    near_ties = 0
    for name, wanted in oracle.items():
        given = outputs(job.scratch, name, job.tiny, job.device)
        parted = compare(pairs(wanted, given))
        near_ties += parted.at_near_ties
        report(none_of(f"{name}: sequences with other tokens", parted.elsewhere))
    report(Figure("sequences that parted at a near-tie", near_ties, ""))


def families(tiny: bool) -> dict[str, dict[str, Any]]:
    return TINY_MODELS if tiny else {name: {} for name in MODELS}


def read_oracle(job: Job) -> dict[str, Outputs] | None:
    """Return the tokens in the bundle, or None if the bundle has no tokens for this size."""
    path = job.bundle / ORACLE if job.bundle else None
    if path is None or not path.is_file():
        return None
    oracle = json.loads(path.read_text(encoding="utf-8"))
    own: dict[str, Outputs] | None = oracle.get(_size(job.tiny))
    return own


def write_oracle(path: Path, *, tiny: bool) -> None:
    """Compute all models' tokens on this CPU, and write them to a file for other machines."""
    import tempfile

    oracle = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in families(tiny):
            print(f"{name} ...", flush=True)
            oracle[name] = outputs(Path(folder), name, tiny, "cpu")
    path.write_text(json.dumps({_size(tiny): oracle}), encoding="utf-8")
    print(f"wrote {path}")


def _size(tiny: bool) -> str:
    return "tiny" if tiny else "full"


def pairs(wanted: Outputs, given: Outputs) -> Iterator[Pair]:
    """Yield the sequences of two runs as pairs to compare."""
    for one, other in zip(wanted, given, strict=True):
        yield Pair(one["tokens"], one["gaps"], other["tokens"])


def outputs(scratch: Path, name: str, tiny: bool, kind: str) -> Outputs:
    """Generate from several prompts at once in float32, each prefilled in several chunks."""
    device = torch.device(kind)
    loaded = load_family(scratch, name, families(tiny)[name], device)
    generator = random.Random(3)
    vocab = loaded.model_config.vocab
    runner = make_runner(loaded, device, torch.float32, TURNS, TURNS * BLOCKS_EACH)
    sequences = []
    for index in range(TURNS):
        prompt = [generator.randrange(vocab) for _ in range(40 + 50 * index)]
        sequences.append(Sequence(index, prompt, len(prompt), GREEDY))

    wanted = OUTPUT_TOKENS if not tiny else 4
    while running := [each for each in sequences if len(each.output) < wanted]:
        run_step(runner, running, CHUNK_TOKENS)
    return [{"tokens": each.output, "gaps": each.gaps} for each in sequences]


def load_family(
    scratch: Path,
    name: str,
    changes: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> LoadedModel:
    """Write a random model of a family unless it exists, and load it as an engine does."""
    folder = scratch / "families" / name.replace(" ", "-").replace(",", "")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_model(name, folder, changes)
    model = ModelSection(source=f"file://{folder}", name="random")
    prepared = folder / device.type
    return load_weights(model, device, dtype, prepared, lambda done, total: None)
