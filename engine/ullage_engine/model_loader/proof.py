"""Proofs record the results of a verified start, so that later starts can be checked against them.

A proof contains digests of the weights and of every table, norm and scale in memory, as well as
logits from a short test computation (the probe). The first start computes everything twice, and
writes the proof next to the prepared weights if both results are equal. Every later start compares
its own results with the proof before it serves requests.

One file contains the proofs of all ranks that compute together. The file name contains the key of
the weights and a digest of everything else that may change result bits, such as the hardware. If
either changes, a different file is therefore used.
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
"""Version of proofs. Increment it when the probe or the digests change."""

PAGE = 4096
"""Number of weight bytes per page. A tensor's digest is computed from one sum per page."""

READ_BYTES = 512 << 20
"""Maximum number of weight bytes to digest per start on a CPU, which takes about 50 ms.

If the weights are larger, only evenly spaced pages are read. On a GPU, all weights are read.
"""

SAMPLES = 256
"""Number of logits that are stored per row, evenly spaced over the vocabulary."""

_SPREAD_SHARE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""How far a logit may deviate, by dtype, as a fraction of the range of logits in its row.

These tolerances apply if the order of summation may differ between starts.
"""

_SLICE_PAGES = 4096
_DIGEST_CHARACTERS = 32

_REMEDY = (
    "if every start ends like this, look for faulty memory or a faulty processor, or delete the "
    "file where the first start may have been the wrong one"
)

Facts = Mapping[str, str]
"""Everything that may change the bits of results between starts, by name."""


class Proof(msgspec.Struct, frozen=True):
    """Digests and samples of what one rank computed when the engine started."""

    tensors: dict[str, str]
    """Digests of the tensors in memory, by name."""
    logits: str
    """Digest of the probe's logits, or of zero rows if another rank computes the logits."""
    samples: list[list[float]]
    """A sample of the logits in each of the probe's rows."""


class _Stored(msgspec.Struct, frozen=True):
    facts: dict[str, str]
    ranks: list[Proof]


_SEPARATOR = b"\n"


def _encode(stored: _Stored) -> bytes:
    """Encode a proof file as a digest of its content, followed by the content itself.

    The digest detects disk corruption, so that starts are never compared with a damaged proof.
    """
    content = msgspec.json.encode(stored)
    return hashlib.sha256(content).hexdigest().encode() + _SEPARATOR + content


def _decode(data: bytes) -> _Stored | None:
    """Return the content of an encoded proof file, or None if the file is damaged."""
    digest, _, content = data.partition(_SEPARATOR)
    if digest != hashlib.sha256(content).hexdigest().encode():
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(content, type=_Stored)
    return None


class ProofFile:
    """The file that stores the proofs of all ranks from one verified start.

    Proofs can only be compared between starts with the same weights and the same `Facts`, which
    record everything else that may change results. Both determine the name of the file, so a start
    with other weights or facts uses a different file.
    """

    def __init__(self, folder: Path, weights_key: str, facts: Facts) -> None:
        self._facts = dict(facts) | {"version": VERSION}
        digest = hashlib.sha256(msgspec.json.encode(self._facts, order="sorted")).hexdigest()
        self.path = folder / f"{weights_key}-{digest[:_DIGEST_CHARACTERS]}.proof"

    def read(self) -> list[Proof] | None:
        """Return the proofs of all ranks, or None if the file is missing or cannot be used.

        A file cannot be used if it is unreadable or damaged, or if it was written for other facts.
        """
        with contextlib.suppress(OSError):
            stored = _decode(self.path.read_bytes())
            if stored is not None and stored.facts == self._facts:
                return stored.ranks
        return None

    def write(self, ranks: list[Proof]) -> list[Proof]:
        """Store all ranks' proofs, unless another engine already did. Return the stored proofs.

        If no proofs can be stored, a warning is logged and `ranks` is returned.
        """
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write(_encode(_Stored(self._facts, ranks)))
                file.flush()
                os.fsync(file.fileno())
            if self.read() is None:
                partial.replace(self.path)
        except OSError as error:
            # Without the file a start only proves that it computes the same twice.
            log.warning("the proof of this start cannot be kept in %s: %s", self.path, error)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        return self.read() or ranks


def tolerance(dtype: torch.dtype, *, is_exact: bool) -> float:
    """Return how far a logit may deviate between starts, as a fraction of its row's range.

    If `is_exact`, logits must not deviate, so the tolerance is 0.
    """
    return 0.0 if is_exact else _SPREAD_SHARE[dtype]


def confirm(
    file: ProofFile, verified: list[Proof] | None, found: list[Proof], tolerance: float
) -> None:
    """Check that every rank's results in this start match those of a verified start.

    If no start has been verified before, the proofs of this start are stored for later starts.

    Raises:
        ProofError: a rank's results differ.
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
    """Check that the results of a start match a proof.

    Args:
        found: the results of the start.
        expected: the proof.
        tolerance: tolerance for a logit, as a fraction of the range of logits in its row. With 0,
            results must be bit-identical.
        source: origin of the proof, for the error message.

    Raises:
        ProofError: the results differ.
    """
    if reason := difference(found, expected, tolerance):
        raise ProofError(f"this start computes otherwise than {source}: {reason}; {_REMEDY}")


def difference(found: Proof, expected: Proof, tolerance: float) -> str:
    """Describe how the results of a start differ from a proof. Return "" if they match."""
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
    # A NaN is within no tolerance, see `_distance`.
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
    """Computes a digest and samples of logits that arrive in several batches of rows."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.samples: list[list[float]] = []

    def add(self, logits: torch.Tensor) -> None:
        """Add rows of logits, float32 [rows, vocab]."""
        rows = logits.detach().to("cpu", torch.float32).contiguous()
        self._digest.update(rows.numpy().data)
        step = max(1, rows.shape[1] // SAMPLES)
        self.samples += rows[:, ::step].tolist()

    def hexdigest(self) -> str:
        """Return the digest of all rows in hexadecimal digits."""
        return self._digest.hexdigest()


def digest_whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a SHA-256 digest of all bytes of each tensor, by tensor name."""
    return {name: _short(hashlib.sha256(_bytes(tensor))) for name, tensor in tensors.items()}


def _bytes(tensor: torch.Tensor) -> memoryview:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return data.numpy().data


def digest_weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of each tensor's page sums, by tensor name.

    For large weights on a CPU, only some of the pages are read. Changing a single value in these
    pages changes the digest.
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
    """Return the sum of each page's 64-bit words, modulo 2^64."""
    if pages.device.type == "cpu":
        # This runs on one thread, since waking others takes longer than reading the pages. A
        # rank's part may begin within a word, which numpy can read.
        sums: npt.NDArray[np.uint64] = np.add.reduce(pages.numpy().view(np.uint64), axis=1)
        return sums.data
    return _bytes(pages.contiguous().clone().view(torch.int64).sum(dim=1))


def code_digest(rooms: Iterable[Path]) -> str:
    """Return a digest of the code in these folders: Python files and C++ libraries.

    Changed code may change results, so a proof is only compared with starts of the same code.
    """
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted([*room.rglob("*.py"), *room.glob("*.so")]):
            digest.update(f"{path.name}\n".encode())
            digest.update(path.read_bytes())
    return _short(digest)


def _short(digest: "hashlib._Hash") -> str:
    return digest.hexdigest()[:_DIGEST_CHARACTERS]
