"""Builds one pipeline stage as in the engine: its layers, its runner and its step plan."""

from collections.abc import Sequence

import torch

from benchmarks.gpu.lfm2.weights import SeededWeights
from ullage_engine.kernels.arena import StepLimits
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.parallel.layout import RankLayout, rank_model_config
from ullage_engine.parallel.pipeline import PipelineRank
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

BLOCK_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0)


def load_stage(
    whole: ModelConfig, weights: SeededWeights, layout: RankLayout, rank: int
) -> LoadedModel:
    """Load the layers that the engine assigns to this rank, with weights made layer by layer."""
    own = rank_model_config(whole, layout, rank)
    has_ends = layout.is_first(rank) or layout.is_last(rank)
    tensors = weights.ends() if has_ends else {}
    for index in range(own.num_layers):
        tensors |= weights.layer(own.first_layer + index)
    return LoadedModel(own, tensors, sum(each.nbytes for each in tensors.values()))


def make_runner(
    loaded: LoadedModel,
    samples: int,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    pipeline_rank: PipelineRank,
) -> ModelRunner:
    """Return a runner for one step of `samples` samples, with all its memory allocated."""
    limits = StepLimits(
        max_tokens=samples * tokens,
        max_rows=samples,
        max_model_len=tokens,
        gather_tokens=tokens,
        itemsize=dtype.itemsize,
        block_tokens=BLOCK_TOKENS,
    )
    runner = ModelRunner(loaded, device, dtype, limits, pipeline_rank)
    runner.allocate_arena()
    runner.allocate_kv(samples * blocks_of(tokens))
    return runner


def make_plan(prompts: Sequence[list[int]]) -> StepPlan:
    """Return a plan for all samples in one step, which the engine splits into micro-batches."""
    return StepPlan([_chunk(index, prompt) for index, prompt in enumerate(prompts)])


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _chunk(index: int, prompt: list[int]) -> Chunk:
    blocks = blocks_of(len(prompt))
    return Chunk(
        request_id=str(index),
        token_ids=prompt,
        start=0,
        block_ids=list(range(index * blocks, (index + 1) * blocks)),
        sampling=GREEDY,
        history=prompt,
        num_prompt_tokens=len(prompt),
        next_state_slot=index,
    )
