"""Find the settings of vLLM with which a resumed greedy answer equals the uninterrupted answer.

A worker that replaces a lost worker computes a request's prompt and its output so far as one
prompt, and then continues. For each setting, a separate process compares the greedy answers of such
a worker with uninterrupted answers. There are three prompts of 12, 70 and 300 tokens, with answers
of 32 tokens:

batch    computed from the beginning, all at once instead of one after another
resumed  resumed one after another after the first worker sent 5 or 17 tokens, without any KV
company  the same as resumed, but all at once
warm     the same as company, but with the first worker's full KV blocks, as from tiers

The benchmark prints the number of equal texts, and the largest difference in a token's
log-probability before the texts diverge. A difference of 0 means that all values have the same
bits. If vLLM refuses a setting, the reason is printed. The benchmark takes some ten minutes on two
quiet cores. Run it with the Python that has vLLM.

examples:
  .venv-vllm/bin/python -m benchmarks vllm resume
  .venv-vllm/bin/python -m benchmarks vllm resume --settings "float32;float32, two threads"

exit status: 0 every setting was measured or refused, 1 a setting failed
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.support.options import SMOLLM2
from ullage_common.config.engine import EngineConfig
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.errors import WeightsError, WorkerStartError
from ullage_engine.protocol.requests import EngineRequest, SamplingParams, TokenOutput
from ullage_engine.server.worker_env import vllm_env
from ullage_engine.tokenizer.tokenizer import load_tokenizer

TEXT = Path(__file__).parents[1] / "quality.txt"
PROMPTS = (12, 70, 300)
"""Length of each prompt in tokens."""
LENGTH = 32
CUTS = (5, 17)
SEQUENCES = 16
THREADS = 1
"""Default number of threads, because several threads wait for one another on busy cores."""


@dataclass(frozen=True)
class Setting:
    """Fields of the engine's configuration by section, and environment variables."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


SETTINGS: dict[str, Setting] = {
    "float32": Setting(),
    "float32, no prefixCache": Setting({"memory": {"prefix_cache": False}}),
    "float32, chunks of 64": Setting({"batching": {"prefill_chunk_tokens": 64}}),
    "float32, whole prompts": Setting({"batching": {"prefill_chunk_tokens": 0}}),
    "float32, blocks of 32": Setting({"vllm": {"args": {"block_size": 32}}}),
    "float32, two threads": Setting({"server": {"threads": 2}}, {"OMP_NUM_THREADS": "2"}),
    "float32, compiled": Setting({"vllm": {"args": {"enforce_eager": False}}}),
    "float32, KV in fp8": Setting({"model": {"kv_dtype": "fp8"}}),
    "float32, VLLM_BATCH_INVARIANT=1": Setting(environment={"VLLM_BATCH_INVARIANT": "1"}),
    "bfloat16": Setting({"model": {"dtype": "bfloat16"}}),
    "bfloat16, chunks of 64": Setting(
        {"model": {"dtype": "bfloat16"}, "batching": {"prefill_chunk_tokens": 64}}
    ),
    "bfloat16, compiled": Setting(
        {"model": {"dtype": "bfloat16"}, "vllm": {"args": {"enforce_eager": False}}}
    ),
    "bfloat16, VLLM_BATCH_INVARIANT=1": Setting(
        {"model": {"dtype": "bfloat16"}}, {"VLLM_BATCH_INVARIANT": "1"}
    ),
}


@dataclass
class ScoredText:
    """Tokens and their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def after(self, num_tokens: int) -> "ScoredText":
        return ScoredText(self.token_ids[num_tokens:], self.logprobs[num_tokens:])


class InProcessEngine:
    """An engine with vLLM in this process."""

    def __init__(self, setting: Setting, source: str, folder: Path, weights: Path) -> None:
        from ullage_engine.vllm_worker.startup import start

        config: dict[str, Any] = {
            "engine": "vllm",
            "model": {"source": source, "name": "m", "dtype": "float32", "max_model_len": 1024},
            "device": "cpu",
            "memory": {
                "threshold_percent": 100,
                "safety_reserve": 0,
                "device_bytes": 4 << 30,
                "max_kv": 512 << 20,
            },
            "batching": {"max_sequences": SEQUENCES},
            "server": {"threads": THREADS, "run_dir": str(folder), "weights_dir": str(weights)},
        }
        for name, fields in setting.sections.items():
            config[name] = config.get(name, {}) | fields
        self._started = start(msgspec.convert(config, EngineConfig), lambda _: None)
        self._engine = self._started.engine
        self._num_asked = 0

    def answers(
        self, prompts: Sequence[tuple[list[int], int]], *, salt: str = "", together: bool
    ) -> list[ScoredText]:
        """Answer prompts, together or one after another.

        Args:
            prompts: pairs of token ids, and the number of output tokens at the end of these ids.
            salt: requests share KV with earlier requests of the same salt (empty for no sharing).
            together: whether to submit all prompts at once.
        """
        if not together:
            return [self.answers([each], salt=salt, together=True)[0] for each in prompts]

        answers_by_id: dict[str, ScoredText] = {}
        for token_ids, num_sent in prompts:
            self._num_asked += 1
            name = str(self._num_asked)
            num_prompt = len(token_ids) - num_sent
            request = EngineRequest(
                request_id=name,
                token_ids=token_ids,
                num_prompt_tokens=num_prompt,
                max_tokens=LENGTH,
                sampling=SamplingParams(temperature=0.0, top_logprobs=0),
                cache_salt=salt or name,
            )
            answers_by_id[name] = ScoredText()
            refusal = self._engine.submit_group([request], resumed=num_sent > 0)
            assert refusal == [], refusal
        while self._engine.has_work:
            for output in self._engine.step():
                assert isinstance(output, TokenOutput)
                answer = answers_by_id[output.request_id]
                answer.token_ids += output.token_ids
                answer.logprobs += [each.logprob for each in output.logprobs or []]
        return list(answers_by_id.values())

    def stop(self) -> None:
        self._started.stop()


def compare(found: Sequence[ScoredText], wanted: Sequence[ScoredText]) -> dict[str, Any]:
    """Return the number of equal texts, and the largest difference of log-probabilities."""
    differences = []
    for one, other in zip(found, wanted, strict=True):
        for place, (token, wanted_token) in enumerate(
            zip(one.token_ids, other.token_ids, strict=True)
        ):
            if token != wanted_token:
                break
            differences.append(abs(one.logprobs[place] - other.logprobs[place]))
    num_equal = sum(
        one.token_ids == other.token_ids for one, other in zip(found, wanted, strict=True)
    )
    return {"equal": num_equal, "of": len(wanted), "difference": max(differences)}


def measure(setting: Setting, source: str, weights: Path) -> dict[str, Any]:
    """Measure one setting in this process."""
    tokens = load_tokenizer(resolve_source(source).path).encode_text(TEXT.read_text())
    prompts = [(tokens[1000 * n : 1000 * n + length], 0) for n, length in enumerate(PROMPTS)]

    with tempfile.TemporaryDirectory() as folder:
        try:
            engine = InProcessEngine(setting, source, Path(folder), weights)
        except (WorkerStartError, WeightsError) as error:
            return {"refused": str(error)}
        first = engine.answers(prompts, salt="kept", together=False)
        assert all(len(each.token_ids) == LENGTH for each in first)

        cut = [
            (prompt + answer.token_ids[:num_sent], num_sent)
            for (prompt, _), answer in zip(prompts, first, strict=True)
            for num_sent in CUTS
        ]
        rest = [answer.after(num_sent) for answer in first for num_sent in CUTS]

        results = {
            "batch": compare(engine.answers(prompts, together=True), first),
            "resumed": compare(engine.answers(cut, together=False), rest),
            "company": compare(engine.answers(cut, together=True), rest),
            "warm": compare(engine.answers(cut, salt="kept", together=True), rest),
        }
        engine.stop()
    return results


def measure_apart(name: str, source: str, weights: Path) -> dict[str, Any]:
    """Measure one setting in a separate process, because vLLM reads its environment only once."""
    command = [sys.executable, "-m", "benchmarks", "vllm", "resume", "--one", name]
    command += ["--source", source]
    command += ["--weights", str(weights)]
    environment = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", **vllm_env(THREADS)}

    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.run(
            [*command, "--output", output.name],
            env={**os.environ, **environment, **SETTINGS[name].environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )

        if process.returncode:
            return {"broken": process.stderr.decode(errors="replace").splitlines()[-1:]}
        result: dict[str, Any] = json.loads(Path(output.name).read_text())
        return result


def line(name: str, result: dict[str, Any]) -> str:
    """Return a setting's row of the table."""
    if reason := result.get("refused") or result.get("broken"):
        return f"| {name} | {reason} |"
    cells = [
        f"{each['equal']} of {each['of']}, {each['difference']:.2g}" for each in result.values()
    ]
    return f"| {name} | {' | '.join(cells)} |"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", default=SMOLLM2, help="model source URI (default: %(default)s)")
    parser.add_argument("--settings", help="names of settings, separated by semicolons")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Measure all settings, or a single one in a child process, and return the exit status."""
    if options.one:
        result = measure(SETTINGS[options.one], options.source, options.weights)
        options.output.write_text(json.dumps(result))
        return 0

    print("| setting | batch | resumed | company | warm |\n|---|---|---|---|---|")
    is_broken = False
    with tempfile.TemporaryDirectory() as weights:
        for name in options.settings.split(";") if options.settings else SETTINGS:
            result = measure_apart(name, options.source, Path(weights))
            is_broken = is_broken or "broken" in result
            print(line(name, result), flush=True)
    return int(is_broken)
