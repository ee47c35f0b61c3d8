"""Proof that vLLM computes like a verified start of the same model. Imports no vLLM.

The probe is two requests that vLLM serves like any others. Its steps compute a prompt, a prompt
together with a decode, and two decodes. Every output is a token that is fixed beforehand, so that
equally likely tokens make no difference between starts. The log-probabilities of that token and of
the likeliest ones are compared, sorted: two equally likely tokens may change places, but their
probabilities may not change.

Each rank also digests its rotary tables and its weights. Weights are compared only for checkpoints
that are not quantised, of which vLLM checks that it has loaded every weight. Quantised formats may
have memory that is never written.
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
"""Tokens of the probe's prompts. The second one begins during the first one's decodes."""
_OUTPUTS = (3, 2)
"""Tokens of their outputs."""
_TOP = 20
"""Number of likeliest tokens that are compared. The bound is a share of a row's spread, and too few
numbers may have none."""
_BIAS = 100.0
"""Bias of the fixed token, the largest that vLLM takes."""
_STEP = 7919
"""Distance between the tokens of prompts, modulo the vocabulary; a prime, so that no two tokens are
the same unless the vocabulary's size is a multiple of it."""
_TABLE_WORDS = ("cos", "sin", "inv_freq")
"""Parts of the names of rotary tables."""

_NO_PART = {
    *("model", "served_model_name", "master_addr", "master_port"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes"),
}
"""Arguments of vLLM that do not change its results: the places of files and nodes, and the size of
the KV pool, which differs between starts with the memory of other processes."""

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Probe:
    """The size of the probe, which must fit into small KV pools and short contexts."""

    vocab_size: int
    room_tokens: int
    """Tokens of the longest sequence that can be served."""
    is_embedding: bool = False
    may_draft: bool = False
    """Whether steps have draft tokens, with which vLLM takes no biases."""

    def requests(self, run: int) -> list[EngineRequest]:
        """Return the requests of the probe. The second begins when the first has its first token.

        `run`: number of the probe in this process. Probes share no KV.
        """
        return [self._request(number, run) for number in range(1 if self._is_single else 2)]

    @property
    def _is_single(self) -> bool:
        return self.is_embedding or self.may_draft

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities of each step in addition to that of its token."""
        return 0 if self.is_embedding else min(_TOP, self.vocab_size)

    @property
    def sizes(self) -> str:
        """The lengths of prompts and outputs, as text."""
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
    """The engine whose proof is taken."""

    def run_probe(self, probe: Probe) -> list[CoreOutput]:
        """Compute the requests of a probe and keep nothing of them.

        Returns:
            The outputs, in the order of requests and tokens.
        """

    def digests(self) -> list[dict[str, str]]:
        """Return digests of each rank's tensors in memory, by name."""

    def changed_table(self) -> str:
        """Compute the tables of all ranks again; return the name of one that differs, or an empty
        string.
        """


def proof_file(
    folder: Path,
    weights: str,
    facts: Mapping[str, str],
    probe: Probe,
    arguments: Mapping[str, Any],
) -> ProofFile:
    """Return the place of the proofs of all ranks.

    Args:
        weights: digest of the files of the weights.
        facts: those of the engine's fingerprint.
        arguments: those of `vllm.EngineArgs`. Any may decide which modules there are, what their
            tensors are called and how they lie in memory: with adapters vLLM wraps the modules of
            the base model, which computes the same answers then.
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
    """Return the proof of each rank.

    Args:
        outputs: those of the probe, which has been computed once.
        verifies: everything is computed once more and compared, since no other start did before.

    Raises:
        ProofError: two computations differ.
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
    """Return the log-probabilities of each token, or the numbers of an embedding."""
    rows: list[list[float]] = []
    for output in outputs:
        if output.embedding:
            rows.append(np.frombuffer(output.embedding, "<f4").tolist())
        for each in output.logprobs or []:
            # One that is as likely as the last of these counts among them, too.
            rows.append([each.logprob, *each.top_logprobs[:_TOP]])
    return rows


def digest_model(model: torch.nn.Module, *, with_weights: bool) -> dict[str, str]:
    """Return digests of a model's rotary tables, and of the weights that are parameters.

    Libraries may have packed other weights into memory of their own.
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
    """Compute a model's rotary tables again, as vLLM does at its start; return the name of one with
    other bits, or an empty string.

    `dtype`: type of the activations.
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
