"""Proves that a runner's results match those of an earlier, verified start of the same model."""

from collections.abc import Mapping

import torch

from ullage_engine.model_loader.proof import (
    LogitsDigest,
    Proof,
    check,
    digest_weights,
    digest_whole,
)
from ullage_engine.protocol.errors import ProofError
from ullage_engine.runner.model_runner import ModelRunner


def take_proof(
    runner: ModelRunner,
    weights: Mapping[str, torch.Tensor],
    tolerance: float,
    *,
    verifies: bool,
) -> Proof:
    """Compute the proof with which later starts of the same model compare their results.

    The proof is computed from the tensors in memory and the logits of the probe. The probe
    overwrites the KV pool. All ranks of a group must take their proofs together.

    Args:
        runner: runner with an allocated KV pool.
        weights: weights in memory, by name.
        tolerance: maximum difference of logits. See `ullage_engine.model_loader.proof.tolerance`.
        verifies: whether to compute everything twice and compare the results, because no earlier
            start was verified.

    Raises:
        ProofError: two computations differ.
    """
    proof = _computed(runner, weights)

    if verifies:
        again = _computed(runner, weights)
        # Checked after the steps that ranks compute together: no rank may wait for a failed one.
        check(again, proof, tolerance, "it did a moment before")
        if name := runner.check_derived():
            raise ProofError(f"{name} is computed otherwise a second time; the next start may not")
    return proof


def _computed(runner: ModelRunner, weights: Mapping[str, torch.Tensor]) -> Proof:
    logits = LogitsDigest()
    for rows in runner.probe():
        logits.add(rows)
    tensors = digest_whole(runner.derived()) | digest_weights(weights)
    return Proof(tensors, logits.hexdigest(), logits.samples)
