"""Converts requests to vLLM's arguments, and vLLM's outputs to Ullage's outputs."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from llguidance import LLMatcher
from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask
from vllm.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from ullage_engine.protocol.requests import EngineRequest, TokenLogprobs
from ullage_engine.vllm_worker.interface import CoreOutput
from ullage_engine.vllm_worker.ranks import RESUMED

GRAMMAR = "ullage_grammar"
"""Key in `extra_args` under which a request's grammar is passed, in llguidance's format."""
_SEEDS = 1 << 63
_ANY = r"start: /(.|\n)*/"
"""Placeholder grammar that passes vLLM's validation. The real one is in `extra_args`."""


class Grammar(StructuredOutputGrammar):  # type: ignore[misc]
    """Constrains one answer to its grammar, through the interface that vLLM expects."""

    def __init__(self, matcher: LLMatcher, on_error: Callable[[str], object]) -> None:
        self._matcher = matcher
        self._on_error = on_error

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return self._matcher.is_stopped() or bool(self._matcher.consume_tokens(tokens))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: self._matcher.validate_tokens(tokens)]

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        fill_next_token_bitmask(self._matcher, bitmask, idx)
        if self._matcher.is_error():
            # A failed matcher allows only the end, as if the answer were complete.
            self._on_error(self._matcher.get_error())

    def is_terminated(self) -> bool:
        return False  # the server names the tokens that end an answer

    def reset(self) -> None:
        self._matcher.reset()


class GrammarMasks:
    """Stands in for vLLM's grammar backend, which vLLM then needs only to allocate token masks.

    The answers are matched by `Grammar` instead.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return allocate_token_bitmask(max_num_seqs, self._vocab_size)

    def destroy(self) -> None: ...


def sampling_arguments(request: EngineRequest, max_tokens: int) -> dict[str, Any]:
    """Return the arguments for vLLM's `SamplingParams`.

    Args:
        request: the request.
        max_tokens: maximum number of output tokens, including those that a resumed request
            already has.
    """
    sampling = request.sampling
    extra = dict[str, Any]()
    if sent := request.token_ids[request.num_prompt_tokens :]:
        extra[RESUMED] = sent
    if request.grammar:
        extra[GRAMMAR] = request.grammar
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": None if sampling.temperature == 0.0 else sampling.seed % _SEEDS,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "max_tokens": max_tokens,
        "min_tokens": min(request.min_tokens, max_tokens),
        # The server names every token that ends an answer.
        "ignore_eos": True,
        "stop_token_ids": request.stop_token_ids,
        "logprobs": sampling.top_logprobs,
        "structured_outputs": StructuredOutputsParams(grammar=_ANY) if request.grammar else None,
        "extra_args": extra or None,
        "detokenize": False,
        "output_kind": RequestOutputKind.DELTA,
    }


def converted_output(
    output: RequestOutput, params: SamplingParams | None, num_loaded: int
) -> CoreOutput:
    """Convert vLLM's output for one request in one step.

    Args:
        output: vLLM's output.
        params: the request's sampling parameters in vLLM.
        num_loaded: number of tokens whose KV was loaded from tiers when the request started.
    """
    [sample] = output.outputs
    finish: Literal["", "stop", "length", "error"] = ""
    match sample.finish_reason:
        case None:
            finish = ""
        case "stop" | "length":
            finish = sample.finish_reason
        case _:
            finish = "error"
    num_cached = output.num_cached_tokens or 0
    if not (params and params.extra_args and RESUMED in params.extra_args):
        num_cached -= num_loaded  # vLLM counts these too, except for preempted requests
    return CoreOutput(
        request_id=output.request_id,
        token_ids=list(sample.token_ids),
        finish=finish,
        logprobs=_logprobs(sample, params.logprobs if params else None),
        num_cached_tokens=num_cached,
        num_loaded_tokens=num_loaded,
    )


def converted_embedding(output: PoolingRequestOutput) -> CoreOutput:
    """Convert vLLM's embedding for a request."""
    vector = output.outputs.data.to(device="cpu", dtype=torch.float32).contiguous()
    return CoreOutput(
        request_id=output.request_id,
        token_ids=[],
        num_cached_tokens=output.num_cached_tokens or 0,
        embedding=vector.numpy().astype("<f4").tobytes(),
    )


def _logprobs(sample: CompletionOutput, num_top: int | None) -> list[TokenLogprobs] | None:
    if sample.logprobs is None or num_top is None:
        return None
    converted = []
    for token_id, entries in zip(sample.token_ids, sample.logprobs, strict=True):
        # The entries include the chosen token even if it is not among the most likely.
        ranked = sorted((each.rank or 0, other) for other, each in entries.items())
        top = [other for rank, other in ranked if rank <= num_top]
        converted.append(
            TokenLogprobs(entries[token_id].logprob, top, [entries[other].logprob for other in top])
        )
    return converted


def unmatched(reason: str) -> str:
    """Return the error message that tells a client why its grammar cannot be followed."""
    line = " ".join(reason.split())[:300]
    return f"the grammar cannot be followed: {line}; simplify it"
