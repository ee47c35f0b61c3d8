"""The proof of a start: what a verified start of the same model derived and computed.

A proof has a digest of every table, norm and scale in memory and of the weights, and the logits of
a probe. The first start makes it when it has computed everything twice with the same result, and
keeps it beside the prepared weights. Every later start compares itself with it before it serves.

One file has the proofs of all ranks that compute together. Its name has the key of the weights and
a digest of the facts that may change bits: another of these has another file.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ullage_engine.protocol.errors import ProofError

log = logging.getLogger("ullage.engine.weights")

VERSION = "1"
"""Version of proofs; raise it when their probe or their digests change."""

PAGE = 4096
"""Bytes of weights that are summed as one number."""

READ_BYTES = 512 << 20
"""Bytes of weights on a CPU that one start reads, about 50 ms; of more it reads evenly spread
pages. A GPU's are all read."""

SAMPLES = 256
"""Logits of a row that are stored, evenly spread over the vocabulary."""

_SPREAD_SHARE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""How much a logit may differ where products are not summed in one order at every start, as a share
of its row's spread."""

_SLICE_PAGES = 4096
_DIGEST_CHARACTERS = 32

_REMEDY = (
    "if every start ends like this, look for faulty memory or a faulty processor, or delete the "
    "file where the first start may have been the wrong one"
)

Facts = Mapping[str, str]
"""Everything that may change bits from one start to another, by name."""


class Proof(msgspec.Struct, frozen=True):
    """The arithmetic of one rank."""

    tensors: dict[str, str]
    """Digests of what is in memory, by name."""
    logits: str
    """Digest of the probe's logits; those of no row where another rank has them."""
    samples: list[list[float]]
    """Some logits of each row."""


class _Stored(msgspec.Struct, frozen=True):
    facts: dict[str, str]
    ranks: list[Proof]


_SEPARATOR = b"\n"


def _encode(stored: _Stored) -> bytes:
    """Return the bytes of a file: a digest, and the content that it is of.

    Without the digest every start would differ from a proof in which the disk has lost a bit.
    """
    content = msgspec.json.encode(stored)
    return hashlib.sha256(content).hexdigest().encode() + _SEPARATOR + content


def _decode(data: bytes) -> _Stored | None:
    """Return what a file has; None where it is damaged."""
    digest, _, content = data.partition(_SEPARATOR)
    if digest != hashlib.sha256(content).hexdigest().encode():
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(content, type=_Stored)
    return None


class ProofFile:
    """The place of the proofs of one model with certain facts."""

    def __init__(self, folder: Path, weights_key: str, facts: Facts) -> None:
        self._facts = dict(facts) | {"version": VERSION}
        digest = hashlib.sha256(msgspec.json.encode(self._facts, order="sorted")).hexdigest()
        self.path = folder / f"{weights_key}-{digest[:_DIGEST_CHARACTERS]}.proof"

    def read(self) -> list[Proof] | None:
        """Return the proof of each rank; None where there is no usable file."""
        with contextlib.suppress(OSError):
            stored = _decode(self.path.read_bytes())
            if stored is not None and stored.facts == self._facts:
                return stored.ranks
        return None

    def write(self, ranks: list[Proof]) -> list[Proof]:
        """Store the proof of each rank, unless another engine has stored one; return the stored."""
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write(_encode(_Stored(self._facts, ranks)))
                file.flush()
                os.fsync(file.fileno())
            if self.read() is None:
                partial.replace(self.path)
        except OSError as error:
            # Each start then proves no more than that it computes the same twice.
            log.warning("the proof of this start cannot be kept in %s: %s", self.path, error)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        return self.read() or ranks


def tolerance(dtype: torch.dtype, *, is_exact: bool) -> float:
    """Return how much logits may differ from one start to another: a share of their row's spread;
    0: not at all.
    """
    return 0.0 if is_exact else _SPREAD_SHARE[dtype]


def confirm(
    file: ProofFile, verified: list[Proof] | None, found: list[Proof], tolerance: float
) -> None:
    """Compare the proofs of all ranks with those of a verified start, or store them for the next
    starts where there is none.

    Raises:
        ProofError: a rank computes otherwise.
    """
    expected = verified or file.write(found)
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        source = f"the verified start of {file.path}"
        check(one, other, tolerance, source + (f" on rank {rank}" if len(found) > 1 else ""))
    log.info(
        "this start computes as a verified one does" if verified else "this start is verified",
        extra={"proof": file.path.name},
    )


def check(found: Proof, expected: Proof, tolerance: float, source: str) -> None:
    """Compare a start with a proof.

    `tolerance`: of a logit, as a share of its row's spread; 0: the bits are equal. `source`: where
    the proof is from, for the message.

    Raises:
        ProofError: the start computes otherwise.
    """
    if reason := difference(found, expected, tolerance):
        raise ProofError(f"this start computes otherwise than {source}: {reason}; {_REMEDY}")


def difference(found: Proof, expected: Proof, tolerance: float) -> str:
    """Return in which a start differs from a proof, in words; empty: in nothing."""
    names = sorted(found.tensors.keys() | expected.tensors.keys())
    changed = [name for name in names if found.tensors.get(name) != expected.tensors.get(name)]
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"{changed[0]}{others} has other bits in memory"
    if found.logits == expected.logits:
        return ""
    if [len(row) for row in found.samples] != [len(row) for row in expected.samples]:
        return "the probe has another number of logits"
    error = max(map(_row_error, found.samples, expected.samples), default=0.0)
    # Not a number is no error within any bound.
    if tolerance and error <= tolerance:
        return ""
    return f"logits of the probe differ by {error:.2g} of their spread, and may by {tolerance:g}"


def _row_error(found: list[float], expected: list[float]) -> float:
    distance = max(map(_distance, found, expected))
    spread = max(expected) - min(expected)
    if distance == 0:
        return 0.0
    return distance / spread if 0 < spread < float("inf") else float("inf")


def _distance(one: float, other: float) -> float:
    distance = abs(one - other)
    return distance if distance == distance else float("inf")


class LogitsDigest:
    """The digest of logits that are computed row by row, and samples of them."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.samples: list[list[float]] = []

    def add(self, logits: torch.Tensor) -> None:
        """Take rows of logits, float32 [rows, vocab]."""
        rows = logits.detach().to("cpu", torch.float32).contiguous()
        self._digest.update(rows.numpy().data)
        step = max(1, rows.shape[1] // SAMPLES)
        self.samples += rows[:, ::step].tolist()

    def hexdigest(self) -> str:
        """Return the digest of all rows."""
        return self._digest.hexdigest()


def digest_whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each tensor's bytes."""
    return {name: _short(hashlib.sha256(_bytes(tensor))) for name, tensor in tensors.items()}


def _bytes(tensor: torch.Tensor) -> memoryview:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return data.numpy().data


def digest_weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of each tensor's pages, which shows every change of a single number in those
    that are read.
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    is_on_host = all(tensor.device.type == "cpu" for tensor in tensors.values())
    stride = max(1, -(-total // READ_BYTES)) if is_on_host else 1
    return {name: _page_digest(tensor, stride) for name, tensor in tensors.items()}


def _page_digest(tensor: torch.Tensor, stride: int) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    num_pages = data.numel() // PAGE
    pages = data[: num_pages * PAGE].view(-1, PAGE)[::stride]

    for start in range(0, len(pages), _SLICE_PAGES):
        digest.update(_page_sums(pages[start : start + _SLICE_PAGES]))

    digest.update(_bytes(data[num_pages * PAGE :]))
    return _short(digest)


def _page_sums(pages: torch.Tensor) -> memoryview:
    """Return the sum of each page's words, modulo 2^64."""
    if pages.device.type == "cpu":
        # On one thread: others are slower to wake than pages are to read. A part that a rank has
        # cut out may begin within a word, which numpy reads, too.
        sums: npt.NDArray[np.uint64] = np.add.reduce(pages.numpy().view(np.uint64), axis=1)
        return sums.data
    return _bytes(pages.contiguous().clone().view(torch.int64).sum(dim=1))


def code_digest(rooms: Iterable[Path]) -> str:
    """Return the digest of the program's files in some folders, and of the library."""
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted([*room.rglob("*.py"), *room.glob("*.so")]):
            digest.update(f"{path.name}\n".encode())
            digest.update(path.read_bytes())
    return _short(digest)


def _short(digest: "hashlib._Hash") -> str:
    return digest.hexdigest()[:_DIGEST_CHARACTERS]
