"""Uploads are exact whatever the sizes are, and no staging buffer is written while it is read."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.model_loader import upload
from ullage_engine.model_loader.upload import Uploader, placing

if TYPE_CHECKING:
    from ullage_testing.fake_cudart import FakeCudart

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8]


class LateCopies:
    """A stream whose copies are done as late as it may: when somebody waits for them."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_done = 0
        self.most_pending_bytes = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copies.append((target, source))
        pending = sum(each.nbytes for _, each in self._copies[self._num_done :])
        self.most_pending_bytes = max(self.most_pending_bytes, pending)

    def record(self) -> Callable[[], None]:
        count = len(self._copies)
        return lambda: self._run(count)

    def finish(self) -> None:
        self._run(len(self._copies))

    def _run(self, count: int) -> None:
        for target, source in self._copies[self._num_done : count]:
            target.copy_(source)
        self._num_done = max(self._num_done, count)


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3)
tensors = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=12)


@given(tensors=tensors, staging=st.integers(1, 40), num_buffers=st.integers(2, 3))
def test_uploaded_tensors_have_every_byte(
    tensors: list[tuple[torch.dtype, list[int]]], staging: int, num_buffers: int
) -> None:
    stream = LateCopies()
    buffers = torch.empty(num_buffers * staging, dtype=torch.uint8).split(staging)
    uploader = Uploader(CPU, buffers, stream)
    pairs = []
    for seed, (dtype, shape) in enumerate(tensors):
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        tensor = random_bytes(num_bytes, seed).view(dtype).view(shape)
        pairs.append((tensor, uploader.upload(tensor)))
    stream.finish()
    for tensor, placed in pairs:
        assert (placed.dtype, placed.shape) == (tensor.dtype, tensor.shape)
        assert placed.is_contiguous()
        assert torch.equal(as_bytes(placed), as_bytes(tensor))
    assert stream.most_pending_bytes <= num_buffers * staging


@pytest.mark.parametrize("excess", [-1, 0, 1])
@pytest.mark.parametrize("num_buffers_full", [1, 2, 3])
def test_sizes_around_the_end_of_a_buffer(num_buffers_full: int, excess: int) -> None:
    stream = LateCopies()
    staging = 64
    uploader = Uploader(CPU, torch.empty(2 * staging, dtype=torch.uint8).chunk(2), stream)
    tensor = random_bytes(num_buffers_full * staging + excess, 1)
    before, placed, after = (uploader.upload(each) for each in (tensor[:3], tensor, tensor[-3:]))
    stream.finish()
    assert torch.equal(placed, tensor)
    assert torch.equal(before, tensor[:3])
    assert torch.equal(after, tensor[-3:])


def test_parts_of_tensors_are_uploaded_and_may_go_at_once() -> None:
    stream = LateCopies()
    uploader = Uploader(CPU, torch.empty(48, dtype=torch.uint8).chunk(2), stream)
    matrix = random_bytes(120, 7).view(torch.bfloat16).view(6, 10)
    parts = [matrix[2:5], matrix[:, 3:7], matrix.t(), matrix[1, 2]]
    expected = [part.clone() for part in parts]
    placed = []
    for part in parts:
        passing = part.clone(memory_format=torch.preserve_format)
        placed.append(uploader.upload(passing))
        passing.zero_()
    stream.finish()
    for copy, original in zip(placed, expected, strict=True):
        assert torch.equal(as_bytes(copy), as_bytes(original))


def test_a_device_that_shares_the_hosts_memory_gets_no_copy() -> None:
    tensor = torch.ones(3)
    with placing(CPU) as place:
        assert place(tensor) is tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_uploads_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "STAGING_BYTES", 1 << 16)
    tensors = [random_bytes(size, size).view(torch.int8) for size in (1, 100, 1 << 16, 1_000_000)]
    with placing(torch.device("cuda")) as place:
        placed = [place(each) for each in tensors]
    for copy, original in zip(placed, tensors, strict=True):
        assert torch.equal(copy.cpu(), original)


def test_staging_is_unpinned_after_loading_even_where_that_fails(
    fake_cudart: "FakeCudart", monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(context: AbstractContextManager[Any]) -> None:
        with context:
            assert list(fake_cudart.registered.values()) == [2 * upload.STAGING_BYTES]
            raise OSError("broken")

    monkeypatch.setattr(upload, "STAGING_BYTES", 1 << 16)
    with pytest.raises(OSError, match="broken"):
        leave(placing(torch.device("cuda")))
    assert fake_cudart.calls == ["register", "synchronize", "unregister"]
    assert not fake_cudart.registered


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
