"""Sequences that a model runner computes step by step, without a service."""

import random
from dataclasses import dataclass, field

import torch

from ullage_engine.kernels.arena import BLOCK_TOKENS, GATHER_TOKENS, StepLimits
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.runner.step_graphs import NewCapture

GREEDY = SamplingParams(temperature=0.0)
TURNS = 4
"""Number of sequences per step."""
BLOCKS_EACH = 32
"""Number of KV blocks per sequence."""


def make_runner(
    loaded: LoadedModel,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    num_blocks: int,
    max_model_len: int = 512,
    new_capture: NewCapture | None = None,
) -> ModelRunner:
    """Return a runner with buffers and a KV pool, for steps of up to `rows` sequences.

    Args:
        new_capture: captures decode steps as graphs, or None to launch every step.
    """
    limits = StepLimits(
        max_tokens=max(256, rows),
        max_rows=rows,
        max_model_len=max_model_len,
        gather_tokens=GATHER_TOKENS,
        itemsize=dtype.itemsize,
    )
    runner = ModelRunner(loaded, device, dtype, limits, new_capture=new_capture)
    runner.allocate_arena()
    runner.allocate_kv(num_blocks)
    return runner


@dataclass
class Sequence:
    """A prompt that is being continued, with separate blocks and states."""

    index: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams = GREEDY
    gaps: list[float] = field(default_factory=list)
    """Log-probability of each output token minus that of the next likeliest token, if requested."""
    computed: int = 0
    """Number of tokens whose KV is computed."""
    num_chunks: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def next_chunk(self, limit: int) -> Chunk:
        """Return the next chunk of up to `limit` tokens, and count these tokens as computed."""
        start = self.computed
        end = min(len(self.tokens), self.computed + limit)
        # Slots that a step reads differ from those that it writes.
        slot = 2 * self.index + self.num_chunks % 2
        self.computed = end
        self.num_chunks += 1
        return Chunk(
            request_id=str(self.index),
            token_ids=self.tokens[start:end],
            start=start,
            # Interleaved, so that no sequence has contiguous blocks.
            block_ids=[self.index + TURNS * block for block in range(-(-end // BLOCK_TOKENS))],
            sampling=self.sampling if end == len(self.tokens) else None,
            history=self.tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            state_slot=slot ^ 1 if start else None,
            next_state_slot=slot,
        )


def run_step(runner: ModelRunner, sequences: list[Sequence], limit: int) -> None:
    """Compute the next chunk of each sequence, with up to `limit` tokens per sequence."""
    chunks = [sequence.next_chunk(limit) for sequence in sequences]
    # Decodes come first.
    chunks.sort(key=lambda chunk: len(chunk.token_ids) > 1)
    by_name = {str(sequence.index): sequence for sequence in sequences}
    for token in runner.execute(StepPlan(chunks)):
        sequence = by_name[token.request_id]
        sequence.tokens.append(token.token_id)
        if len(token.top_logprobs) > 1:
            sequence.gaps.append(token.top_logprobs[0] - token.top_logprobs[1])


def random_sequence(generator: random.Random, index: int, vocab: int) -> Sequence:
    """Return a prompt of 1 to 250 tokens with one of several kinds of sampling."""
    prompt = [generator.randrange(vocab) for _ in range(generator.randint(1, 250))]
    kinds = [GREEDY, SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.9, top_k=50)]
    return Sequence(index, prompt, len(prompt), generator.choice(kinds))
