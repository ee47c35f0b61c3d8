"""Verifies that vLLM computes the same results as at an earlier, verified startup.

This module does not import vLLM. At startup, the worker computes a probe, which consists of two
ordinary requests. Its steps cover three cases: a prompt alone, a prompt batched with a decode, and
two decodes batched together. Every output token is fixed beforehand, so that ties between equally
likely tokens cannot make two startups diverge. The log-probabilities of the output token and of the
most likely tokens are compared in sorted order. Two equally likely tokens may swap places, but
their probabilities may not change.

Each rank also computes digests of its rotary tables and its weights. Weights are compared only for
unquantised checkpoints, because only then does vLLM check that every weight was loaded. Tensors of
quantised formats may contain memory that is never written.
"""

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ullage_engine.model_loader.proof import (
    LogitsDigest,
    Proof,
    ProofFile,
    check,
    code_digest,
    digest_weights,
)
from ullage_engine.protocol.errors import ProofError
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.vllm_worker.interface import CoreOutput

_PROMPTS = (32, 16)
"""Lengths of the probe's prompts in tokens.

The second request starts while the first request is decoding.
"""
_OUTPUTS = (3, 2)
"""Number of output tokens for each of the probe's requests."""
_TOP = 20
"""Number of most likely tokens, per output token, whose log-probabilities are compared.

The tolerance is a fraction of the spread of the compared values, and too few values might have no
spread.
"""
_BIAS = 100.0
"""Logit bias that forces the output token. It is the largest bias that vLLM accepts."""
_STEP = 7919
"""Difference between consecutive prompt token ids, modulo the vocabulary size.

It is prime, so token ids repeat only if the vocabulary size is a multiple of it.
"""
_TABLE_WORDS = ("cos", "sin", "inv_freq")
"""Substrings that identify rotary tables by their tensor names."""

_NO_PART = {
    *("model", "served_model_name", "master_addr", "master_port"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes"),
}
"""vLLM arguments that do not affect results.

These are paths, node addresses, and the size of the KV pool, which depends on the memory held by
other processes.
"""

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Probe:
    """Builds the probe's requests, which must fit into small KV pools and short contexts."""

    vocab_size: int
    room_tokens: int
    """Maximum number of tokens per sequence."""
    is_embedding: bool = False
    may_draft: bool = False
    """Whether vLLM uses speculative decoding, in which case it accepts no logit biases."""

    def requests(self, run: int) -> list[EngineRequest]:
        """Return the probe's requests: one for embeddings or speculative decoding, otherwise two.

        The second request starts after the first token of the first request.

        Args:
            run: index of the probe's run in this process. Different runs share no KV.
        """
        return [self._request(number, run) for number in range(1 if self._is_single else 2)]

    @property
    def _is_single(self) -> bool:
        return self.is_embedding or self.may_draft

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities per output token, in addition to the token's own."""
        return 0 if self.is_embedding else min(_TOP, self.vocab_size)

    @property
    def sizes(self) -> str:
        """Text that lists the lengths of the probe's prompts and outputs."""
        return str([(len(each.token_ids), each.max_tokens) for each in self.requests(0)])

    def _request(self, number: int, run: int) -> EngineRequest:
        num_output = 0 if self.is_embedding else 1 if self._is_single else _OUTPUTS[number]
        num_output = max(min(num_output, self.room_tokens - 1), 0 if self.is_embedding else 1)
        num_prompt = max(1, min(_PROMPTS[number], self.room_tokens - num_output))
        first = 1 + sum(_PROMPTS[:number])
        tokens = [_STEP * place % self.vocab_size for place in range(first, first + num_prompt)]

        named = _STEP * (first + _PROMPTS[number]) % self.vocab_size
        sampling = SamplingParams(
            temperature=0.0,
            logit_bias={} if self._is_single else {named: _BIAS},
            top_logprobs=None if self.is_embedding else self.num_logprobs,
        )
        return EngineRequest(
            request_id=f"probe-{run}-{number}",
            token_ids=tokens,
            num_prompt_tokens=num_prompt,
            max_tokens=num_output,
            sampling=sampling,
            cache_salt=f"ullage probe {run}",
            embed=self.is_embedding,
        )


class ProvenCore(Protocol):
    """The methods of `bindings.VllmCore` with which this module verifies a startup's results.

    This is a protocol, because this module does not import vLLM.
    """

    def run_probe(self, probe: Probe) -> list[CoreOutput]:
        """Run the probe's requests without keeping any of their state.

        Returns:
            The outputs, ordered by request and token.
        """

    def digests(self) -> list[dict[str, str]]:
        """Return each rank's digests of the tensors in its memory, by tensor name."""

    def changed_table(self) -> str:
        """Recompute all ranks' rotary tables, and compare them with the tables in memory.

        Returns:
            The name of a table that differs, or "" if none differs.
        """


def proof_file(
    folder: Path,
    weights: str,
    facts: Mapping[str, str],
    probe: Probe,
    arguments: Mapping[str, Any],
) -> ProofFile:
    """Return the file in which all ranks' verified results (proofs) are stored.

    Startups share a file only if they have the same weights, facts, probe, arguments and code.
    Arguments in `_NO_PART` may differ, because they do not affect results.

    Args:
        folder: folder that contains all proofs.
        weights: digest of the weight files.
        facts: the facts that make up the engine's fingerprint.
        probe: size of the probe.
        arguments: arguments of `vllm.EngineArgs`. Even an argument that does not affect answers may
            affect which modules exist, and how their tensors are named and laid out in memory. It
            then is not in `_NO_PART`. For example, vLLM wraps the base model's modules if adapters
            are enabled, but the base model's answers do not change.
    """
    used = {name: value for name, value in arguments.items() if name not in _NO_PART}
    own = {
        "code": code_digest([_FOLDER]),
        "probe": probe.sizes,
        "arguments": json.dumps(used, sort_keys=True, separators=(",", ":")),
    }
    return ProofFile(folder, f"vllm-{weights[:32]}", {**facts, **own})


def take_proofs(
    core: ProvenCore,
    probe: Probe,
    outputs: Sequence[CoreOutput],
    tolerance: float,
    *,
    verifies: bool,
) -> list[Proof]:
    """Return one proof per rank: the digests of its tensors, and for rank 0 the probe's results.

    Args:
        core: the engine.
        probe: the probe.
        outputs: outputs of the probe's first run.
        tolerance: maximum accepted difference between two values.
        verifies: whether to compute everything twice and compare the results. This is needed if no
            startup has been verified yet.

    Raises:
        ProofError: the two computations differ.
    """
    proofs = _proofs(core.digests(), outputs)
    if verifies:
        again = _proofs(core.digests(), core.run_probe(probe))
        for one, other in zip(again, proofs, strict=True):
            check(one, other, tolerance, "it did a moment before")
        if name := core.changed_table():
            raise ProofError(f"{name} is computed otherwise a second time; the next start may not")
    return proofs


def _proofs(tensors: Sequence[dict[str, str]], outputs: Iterable[CoreOutput]) -> list[Proof]:
    logits = LogitsDigest()
    for row in map(torch.tensor, _rows(outputs)):
        logits.add(row[None])
    first, *others = tensors
    nothing = LogitsDigest()
    return [
        Proof(first, logits.hexdigest(), logits.samples),
        *(Proof(each, nothing.hexdigest(), []) for each in others),
    ]


def _rows(outputs: Iterable[CoreOutput]) -> list[list[float]]:
    """Convert a probe's outputs to rows of numbers that can be compared.

    A row holds the log-probabilities for one token, or the values of one embedding.
    """
    rows: list[list[float]] = []
    for output in outputs:
        if output.embedding:
            rows.append(np.frombuffer(output.embedding, "<f4").tolist())
        for each in output.logprobs or []:
            # A token as likely as the last of these may be among them as well.
            rows.append([each.logprob, *each.top_logprobs[:_TOP]])
    return rows


def digest_model(model: torch.nn.Module, *, with_weights: bool) -> dict[str, str]:
    """Return digests of a model's rotary tables, and of its weights if `with_weights`.

    Weights that are no longer parameters are not covered, because libraries may have repacked them
    into their own memory.
    """
    tensors = {name: each for name, each in model.named_buffers() if _is_table(name, each)}
    if with_weights:
        tensors |= {name: each.data for name, each in model.named_parameters() if each.numel()}
    return digest_weights(tensors)


def _is_table(name: str, buffer: torch.Tensor) -> bool:
    own = name.rpartition(".")[2]
    is_named = any(word in own for word in _TABLE_WORDS)
    return is_named and buffer.is_floating_point() and buffer.numel() > 0


def changed_table(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """Recompute a model's rotary tables as vLLM does, and compare them with those in memory.

    The tables must match bit for bit.

    Args:
        model: the loaded model.
        dtype: dtype of the activations.

    Returns:
        The name of a table that differs, or "" if none differs.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return next((name for name, module in model.named_modules() if _differs(module)), "")
    finally:
        torch.set_default_dtype(usual)


def _differs(module: torch.nn.Module) -> bool:
    compute = getattr(module, "_compute_cos_sin_cache", None)
    table = getattr(module, "cos_sin_cache", None)
    if compute is None or table is None or inspect.signature(compute).parameters:
        return False
    with table.device:
        again = compute().to(table.device, table.dtype)
    return again.shape == table.shape and not torch.equal(again, table)
