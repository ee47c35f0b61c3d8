"""Measure tokens per second with and without speculative decoding by prompt lookup.

The benchmark runs the scheduler and the model runner without a server, on a text that repeats
itself and on a plain text. Runs with and without speculation take turns. Each figure is the best of
its rounds, because other programs on the same cores can only slow a run down. The benchmark takes
some minutes.

The answers of all runs are compared. If torch computes without --deterministic, sampled answers may
differ, as they may between any two batches, because rows are rounded differently in another batch.

examples:
  python -m benchmarks speculation
  python -m benchmarks speculation --tokens 8 --rounds 5 --sequences 1

exit status: 0 measured, 1 an answer differs with --deterministic, or if the C++ library computes
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.step import BLOCK, POOL_BLOCKS, load_runner
from benchmarks.support.options import SMOLLM2, new_parser
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.model_config.dtypes import resolve_dtype
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler, SchedulerLimits
from ullage_engine.tokenizer.tokenizer import load_tokenizer
from ullage_engine.worker.engine import EngineCore

PROMPT_TOKENS = 180
TABLE = "".join(
    f'{{"id": {number}, "name": "unit-{number}", "state": "ready", "zone": "north"}},\n'
    for number in range(100, 130)
)
PLAIN = (Path(__file__).parent / "quality.txt").read_text(encoding="utf-8")
TEXTS = {
    "repetitive, greedy": (TABLE, SamplingParams(temperature=0.0)),
    "plain, greedy": (PLAIN, SamplingParams(temperature=0.0)),
    "plain, temperature 0.8": (PLAIN, SamplingParams(temperature=0.8, seed=1)),
}
LONGEST = 1024


@dataclass(frozen=True)
class ServedRun:
    """The time and the answers of one run."""

    seconds: float
    num_tokens: int
    """Number of tokens that were generated in these seconds."""
    answers: dict[str, list[int]]
    num_steps: int
    num_draft_tokens: int
    num_accepted: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def main() -> int:
    parser = new_parser("speculation", __doc__)
    parser.add_argument("--source", default=SMOLLM2, help="model source URI (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument(
        "--deterministic", action="store_true", help="like spec.model.deterministic"
    )
    parser.add_argument("--texts", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--tokens", type=int, default=4, help="numSpeculativeTokens (%(default)s)")
    parser.add_argument("--output", type=int, default=128, help="tokens an answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4], metavar="N")
    arguments = parser.parse_args()

    device = torch.device("cpu")
    dtype = resolve_dtype(arguments.dtype, device)
    runner = load_runner(arguments.source, device, dtype, arguments.deterministic, warms_up=False)
    tokenizer = load_tokenizer(resolve_source(arguments.source).path).tokenizer

    differs = False

    print("text                    sequences  tokens/s off      on  ratio  accepted  steps off  on")

    for name in arguments.texts:
        text, sampling = TEXTS[name]
        prompt = tokenizer.encode(text).ids
        for count in arguments.sequences:
            prompts = [prompt[number : PROMPT_TOKENS + number] for number in range(count)]
            runs: dict[int, list[ServedRun]] = {0: [], arguments.tokens: []}
            for _ in range(arguments.rounds):
                for tokens, some in runs.items():
                    some.append(serve(runner, prompts, sampling, tokens, arguments.output))

            off, on = (min(some, key=lambda run: run.seconds) for some in runs.values())
            answers = [run.answers for some in runs.values() for run in some]
            is_other = any(each != answers[0] for each in answers)
            differs |= is_other
            share = on.num_accepted / on.num_draft_tokens if on.num_draft_tokens else 0.0
            ratio = on.tokens_per_second / off.tokens_per_second
            print(
                f"{name:22}  {count:9}  {off.tokens_per_second:12.1f}  "
                f"{on.tokens_per_second:6.1f}  {ratio:5.2f}  {share:8.0%}  {off.num_steps:9}  "
                f"{on.num_steps}{'  DIFFERS' if is_other else ''}",
                flush=True,
            )

    is_exact = arguments.deterministic or runner._native is not None
    return int(differs and is_exact)


def serve(
    runner: ModelRunner,
    prompts: list[list[int]],
    sampling: SamplingParams,
    num_speculative_tokens: int,
    num_output: int,
) -> ServedRun:
    """Serve all prompts at once, and measure the time of the decode steps."""
    engine = new_engine(runner, num_speculative_tokens)

    for number, prompt in enumerate(prompts):
        request = EngineRequest(
            request_id=str(number),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            max_tokens=num_output,
            sampling=sampling,
        )
        assert engine.submit(request) is None, "refused"

    answers: dict[str, list[int]] = {}
    while engine.scheduler.stats().prefill_backlog_tokens:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)

    before = engine.scheduler.stats()
    num_before = sum(map(len, answers.values()))
    started = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    seconds = time.perf_counter() - started

    after = engine.scheduler.stats()
    return ServedRun(
        seconds,
        sum(map(len, answers.values())) - num_before,
        answers,
        after.num_steps - before.num_steps,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def new_engine(runner: ModelRunner, num_speculative_tokens: int) -> EngineCore:
    group = CacheGroup(runner.kv_block_bytes // BLOCK)
    profile = MemoryProfile(BLOCK, (group,), kv_pool_bytes=POOL_BLOCKS * runner.kv_block_bytes)
    limits = SchedulerLimits(
        max_model_len=LONGEST,
        max_sequences=64,
        prompt_tokens=512,
        is_chunked=True,
        decode_tokens=1 << 20,
        num_speculative_tokens=num_speculative_tokens,
    )
    throughput = ThroughputEstimator()
    lengths = OutputLengthEstimator(LONGEST, start=256)
    return EngineCore(Scheduler(profile, limits, throughput, lengths), runner, throughput)
