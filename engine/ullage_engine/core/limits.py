"""Limits and counters of scheduling."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step and the worker may hold at most."""

    max_model_len: int
    """Longest sequence, tokens."""
    max_sequences: int
    prompt_tokens: int
    """Prompt tokens computed in one step."""
    is_chunked: bool
    """Prompts may be split over steps; otherwise `prompt_tokens` must hold a whole one."""
    decode_tokens: int
    """Tokens of context that the decodes of one step read together."""
    replay_tokens: int = 0
    """Tokens that rebuild a convolution state from zero, over all layers of the whole model whoever
    computes them; 0: the model has no convolutions."""


@dataclass(slots=True)
class Counters:
    """What happened since the scheduler began."""

    num_steps: int = 0
    """Steps committed."""
    num_preemptions: int = 0
    prefix_lookup_tokens: int = 0
    """Tokens of requests when they first started."""
    prefix_hit_tokens: int = 0
    """Of them, those whose KV was in the prefix cache."""
    prefix_merged_tokens: int = 0
    """Tokens whose KV was computed although the cache had it by then, and is stored once."""
