"""Beam search equals transformers': in hypotheses, in their order and in their scores."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.requests import (
    BeamParams,
    EngineRequest,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.scheduler.beam_search import BeamRules, Candidate, Search, advance
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler, SchedulerLimits
from ullage_engine.worker.engine import EngineCore

SaveLlama = Callable[..., tuple[Any, Path]]
Found = list[tuple[list[int], float]]
"""Hypotheses, best first: tokens and score."""

PROMPTS = [[11, 42, 7, 91, 150], [3] * 40]
NUM_TOKENS = 14


def reference(
    model: Any, prompt: list[int], width: int, penalty: float, stops: Sequence[int]
) -> Found:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            early_stopping=False,
            length_penalty=penalty,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    rows = result.sequences[:, len(prompt) :].tolist()
    return [
        (_until_stop(row, stops), score)
        for row, score in zip(rows, result.sequences_scores.tolist(), strict=True)
    ]


def _until_stop(row: list[int], stops: Sequence[int]) -> list[int]:
    """Without the padding behind a stop token."""
    ends = [place for place, token in enumerate(row) if token in stops]
    return row[: ends[0] + 1] if ends else row


def candidates(logits: torch.Tensor, rules: BeamRules) -> list[Candidate]:
    values, ids = torch.log_softmax(logits, dim=-1).topk(rules.num_candidates)
    return [
        Candidate(token, TokenLogprobs(value, [], []))
        for token, value in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def by_logits(model: Any, prompt: list[int], rules: BeamRules) -> Found:
    """The pure search over transformers' own logits."""
    state = Search()
    while not state.is_over:
        texts = torch.tensor([prompt + beam.token_ids for beam in state.beams])
        with torch.inference_mode():
            logits = model(texts).logits[:, -1].float()
        state = advance(state, [candidates(row, rules) for row in logits], rules)
    return [(each.token_ids, each.score) for each in state.finished]


def by_engine(runner: ModelRunner, prompts: list[list[int]], rules: BeamRules) -> list[Found]:
    """Scheduler, runner and searches, all prompts at once."""
    engine = _engine(runner)
    for i, prompt in enumerate(prompts):
        assert engine.submit_group(_requests(str(i), prompt, rules)) == []
    outputs: dict[str, TokenOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.scheduler.check_integrity()
    return [
        [_found(outputs[f"{i}#{rank}"], rules) for rank in range(rules.width)]
        for i in range(len(prompts))
    ]


def _found(output: TokenOutput, rules: BeamRules) -> tuple[list[int], float]:
    assert output.logprobs is not None
    total = sum(entry.logprob for entry in output.logprobs)
    return output.token_ids, total / len(output.token_ids) ** rules.length_penalty


def _requests(name: str, prompt: list[int], rules: BeamRules) -> list[EngineRequest]:
    request = EngineRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_tokens=rules.max_tokens,
        sampling=SamplingParams(top_logprobs=0),
        stop_token_ids=sorted(rules.stop_token_ids),
        beam=BeamParams(width=rules.width, length_penalty=rules.length_penalty),
    )
    return [
        msgspec.structs.replace(request, request_id=f"{name}#{rank}") for rank in range(rules.width)
    ]


def _engine(runner: ModelRunner) -> EngineCore:
    profile = MemoryProfile(
        block_tokens=16,
        groups=(CacheGroup(bytes_per_token=runner.kv_block_bytes // 16),),
        state_bytes_per_sequence=0,
        activation_bytes_per_token=1,
        sampler_bytes_per_sequence=1,
        prefill_chunk_tokens=64,
        kv_pool_bytes=256 * runner.kv_block_bytes,
    )
    throughput = ThroughputEstimator()
    limits = SchedulerLimits(512, 16, 64, True, 1024)
    return EngineCore(
        Scheduler(profile, limits, throughput, OutputLengthEstimator(512, start=8)),
        runner,
        throughput,
    )


def check(got: Found, wanted: Found) -> None:
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
    assert [score for _, score in got] == pytest.approx([s for _, s in wanted], abs=2e-4)


def stop_sets(model: Any) -> list[list[int]]:
    """No stop token; one that is met; so many that 2 * width extensions may not be enough."""
    often = [
        token for tokens, _ in reference(model, PROMPTS[0], 4, 1.0, []) for token in tokens[2:]
    ]
    met = list(dict.fromkeys(often))
    return [[], met[:1], met[:4]]


def make_rules(width: int, penalty: float, stops: Sequence[int]) -> BeamRules:
    return BeamRules(width, penalty, frozenset(stops), NUM_TOKENS)


def test_the_search_over_the_same_logits(save_llama: SaveLlama) -> None:
    model, _ = save_llama(initializer_range=0.1)
    num_stopped = 0
    for stops in stop_sets(model):
        for width, penalty in ((2, 0.0), (3, 1.0), (5, -0.7), (8, 1.0), (8, 2.0)):
            for prompt in PROMPTS:
                wanted = reference(model, prompt, width, penalty, stops)
                got = by_logits(model, prompt, make_rules(width, penalty, stops))
                check(got, wanted)
                num_stopped += sum(tokens[-1] in stops for tokens, _ in wanted)
    assert num_stopped > 20, "the stop tokens are never met"


@pytest.mark.parametrize(("width", "penalty"), [(2, 0.0), (4, 1.0), (8, 2.0)])
def test_the_whole_engine(
    save_llama: SaveLlama,
    load: Callable[..., Any],
    new_runner: Callable[..., ModelRunner],
    width: int,
    penalty: float,
) -> None:
    model, folder = save_llama(initializer_range=0.1)
    runner = new_runner(load(f"file://{folder}"))
    for stops in stop_sets(model)[:2]:
        found = by_engine(runner, PROMPTS, make_rules(width, penalty, stops))
        for prompt, got in zip(PROMPTS, found, strict=True):
            check(got, reference(model, prompt, width, penalty, stops))


@pytest.mark.slow
def test_the_real_model(
    smollm2: Any, smollm2_reference: Any, new_runner: Callable[..., ModelRunner]
) -> None:
    prompt = [504, 1296, 3995, 4199, 282, 7158, 359]
    stops = [30, 28]  # the full stop and the comma
    wanted = reference(smollm2_reference, prompt, 4, 1.0, stops)
    assert len({len(tokens) for tokens, _ in wanted}) > 1
    (got,) = by_engine(new_runner(smollm2), [prompt], make_rules(4, 1.0, stops))
    check(got, wanted)
