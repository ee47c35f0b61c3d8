"""Proofs as files and as comparisons, and the digests they are made of."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.model_loader import proof as proofs
from ullage_engine.model_loader.proof import (
    LogitsDigest,
    Proof,
    ProofFile,
    check,
    difference,
    digest_weights,
    digest_whole,
)
from ullage_engine.protocol.errors import ProofError

PROOF = Proof(tensors={"cos": "a", "sin": "b"}, logits="c", samples=[[0.0, 1.0, 3.0]])


def with_logits(digest: str, samples: list[list[float]]) -> Proof:
    return Proof(tensors=PROOF.tensors, logits=digest, samples=samples)


def test_a_proof_is_read_by_starts_with_the_same_facts_alone(tmp_path: Path) -> None:
    file = ProofFile(tmp_path, "key", {"torch": "2.11", "threads": "any"})
    assert file.read() is None
    assert file.write([PROOF, PROOF]) == [PROOF, PROOF]
    assert ProofFile(tmp_path, "key", {"threads": "any", "torch": "2.11"}).read() == [PROOF, PROOF]
    for key, facts in (("other", {"torch": "2.11", "threads": "any"}), ("key", {"torch": "2.13"})):
        assert ProofFile(tmp_path, key, facts).read() is None
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


def test_the_first_proof_stays(tmp_path: Path) -> None:
    file = ProofFile(tmp_path, "key", {})
    other = with_logits("other", [])
    file.write([PROOF])
    assert file.write([other]) == [PROOF]
    assert file.read() == [PROOF]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 100, b'{"facts": {}, "ranks": []}'])
def test_a_file_that_is_no_proof_of_these_facts_is_replaced(tmp_path: Path, content: bytes) -> None:
    file = ProofFile(tmp_path, "key", {"torch": "2.11"})
    file.path.write_bytes(content)
    assert file.read() is None
    assert file.write([PROOF]) == [PROOF] == file.read()


def test_a_damaged_file_is_replaced_and_no_start_differs_from_it(tmp_path: Path) -> None:
    file = ProofFile(tmp_path, "key", {"torch": "2.11"})
    file.write([PROOF])
    whole = file.path.read_bytes()

    damaged = [whole[:length] for length in range(len(whole))]
    for place in range(len(whole)):
        for bit in (0x01, 0x80):
            flipped = bytes([whole[place] ^ bit])
            damaged.append(whole[:place] + flipped + whole[place + 1 :])

    for content in damaged:
        file.path.write_bytes(content)
        assert file.read() is None, content
    assert file.write([PROOF]) == [PROOF] == file.read()


def test_a_folder_that_cannot_be_written_costs_the_file_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = ProofFile(tmp_path / "missing", "key", {})
    assert file.write([PROOF]) == [PROOF]
    assert "cannot be kept" in caplog.text


def test_what_differs_is_named() -> None:
    assert difference(PROOF, PROOF, 0.0) == ""
    other = Proof(tensors={"cos": "a", "sin": "x"}, logits="c", samples=PROOF.samples)
    assert difference(other, PROOF, 1.0) == "sin has other bits in memory"
    fewer = Proof(tensors={}, logits="c", samples=PROOF.samples)
    assert difference(fewer, PROOF, 1.0) == "cos and 1 more has other bits in memory"
    with pytest.raises(ProofError, match=r"^this start computes otherwise than it did: sin has"):
        check(other, PROOF, 0.0, "it did")


def test_logits_may_differ_within_the_bound_alone() -> None:
    near = with_logits("d", [[0.0, 1.0, 3.03]])
    assert difference(near, PROOF, 0.02) == ""
    words = "logits of the probe differ by 0.01 of their spread, and may by "
    assert difference(near, PROOF, 0.005) == words + "0.005"
    assert difference(near, PROOF, 0.0) == words + "0"
    for wrong in (math.nan, math.inf):
        assert "differ by inf" in difference(with_logits("d", [[0.0, wrong, 3.0]]), PROOF, 0.02)
        assert "differ by inf" in difference(PROOF, with_logits("d", [[0.0, wrong, 3.0]]), 0.02)
    assert "another number" in difference(with_logits("d", [[0.0]]), PROOF, 1.0)
    same = with_logits("e", [[1.0, 1.0]])
    assert difference(same, with_logits("f", [[1.0, 1.0]]), 0.02) == ""


TYPES = [torch.float32, torch.bfloat16, torch.int8, torch.uint8]


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from(TYPES),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    offset=st.integers(0, 9),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_one_flipped_bit_changes_both_digests(
    dtype: torch.dtype, shape: list[int], offset: int, place: float, bit: int, seed: int
) -> None:
    numbers = math.prod(shape)
    memory = torch.randint(
        0,
        256,
        ((offset + numbers) * dtype.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    tensor = memory.view(dtype)[offset:].view(shape)  # A part that was cut out of another.
    before = digest_weights({"w": tensor}), digest_whole({"w": tensor})
    assert (digest_weights({"w": tensor.clone()}), digest_whole({"w": tensor.clone()})) == before
    flipped = offset * dtype.itemsize + int(place * numbers * dtype.itemsize)
    memory[flipped] ^= 1 << bit
    assert digest_weights({"w": tensor}) != before[0]
    assert digest_whole({"w": tensor}) != before[1]


def test_of_large_weights_evenly_spread_pages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "READ_BYTES", 8 * proofs.PAGE)
    weights = {"w": torch.zeros(32 * proofs.PAGE, dtype=torch.uint8)}
    before = digest_weights(weights)
    seen = []
    for page in range(32):
        weights["w"][page * proofs.PAGE + 5] = 1
        if digest_weights(weights) != before:
            seen.append(page)
        weights["w"][page * proofs.PAGE + 5] = 0
    assert seen == list(range(0, 32, 4))


def test_all_logits_are_in_the_digest_and_some_in_the_samples() -> None:
    logits = torch.randn(3, 1000)
    whole = LogitsDigest()
    parts = LogitsDigest()
    other = LogitsDigest()
    whole.add(logits)
    for row in logits:
        parts.add(row[None])
    assert whole.hexdigest() == parts.hexdigest()
    assert whole.samples == parts.samples
    logits[2, 1] += 1e-6
    other.add(logits)
    assert other.hexdigest() != whole.hexdigest()
    assert all(proofs.SAMPLES <= len(row) < 2 * proofs.SAMPLES for row in whole.samples)
