"""Arrays are packed, and reach the device by one copy that may be late."""

import numpy as np
import pytest
import torch

from ullage_engine.kernels import staging
from ullage_engine.kernels.staging import Staging, upload

CPU = torch.device("cpu")
FIRST = np.arange(5, dtype=np.int32)
SECOND = np.arange(6, dtype=np.int64).reshape(2, 3)


def test_arrays_arrive_when_they_are_uploaded() -> None:
    place = torch.full((256,), 255, dtype=torch.uint8)
    packed = Staging(place)
    packed.begin()
    first = packed.put(FIRST)
    second = packed.put(SECOND)
    assert first.eq(-1).all()
    assert second.eq(-1).all()
    packed.upload()
    assert torch.equal(first, torch.from_numpy(FIRST))
    assert torch.equal(second, torch.from_numpy(SECOND))


def test_an_array_has_one_place_and_every_place_is_aligned() -> None:
    packed = Staging(torch.empty(256, dtype=torch.uint8))
    packed.begin()
    first = packed.put(FIRST)
    second = packed.put(SECOND)
    assert packed.put(FIRST).data_ptr() == first.data_ptr()
    assert second.data_ptr() - first.data_ptr() == 64


def test_the_next_step_has_the_same_places() -> None:
    packed = Staging(torch.empty(256, dtype=torch.uint8))
    places = []
    for number in range(3):
        packed.begin()
        places.append([packed.put(each + number).data_ptr() for each in (FIRST, SECOND)])
        packed.upload()
    assert places[0] == places[1] == places[2]


def test_preparing_a_step_does_not_touch_what_the_one_before_reads() -> None:
    packed = Staging(torch.empty(64, dtype=torch.uint8))
    packed.begin()
    first = packed.put(FIRST)
    packed.upload()
    packed.begin()
    packed.put(FIRST + 7)
    assert torch.equal(first, torch.from_numpy(FIRST))


def test_host_memory_is_written_again_only_after_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may copy long after `upload` has returned."""
    log: list[tuple[int, str]] = []

    class Late:
        """The event of one piece of memory, whose copies are done when they are waited for."""

        def __init__(self) -> None:
            self.number = len(events)
            events.append(self)

        def record(self) -> None:
            log.append((self.number, "record"))

        def synchronize(self) -> None:
            log.append((self.number, "wait"))

    events: list[Late] = []
    monkeypatch.setattr(staging, "copy_event", lambda device: Late())
    packed = Staging(torch.empty(64, dtype=torch.uint8))
    for number in range(4):
        packed.begin()
        packed.put(FIRST + number)
        packed.upload()
    # Two take turns, and each waits for its own last copy before it is filled.
    kinds = [kind for _, kind in log]
    numbers = [number for number, _ in log]
    assert kinds == ["wait", "record"] * 4
    assert numbers == [1, 1, 0, 0] * 2


def test_more_than_fits_is_a_bug() -> None:
    packed = Staging(torch.empty(64, dtype=torch.uint8))
    packed.begin()
    packed.put(FIRST)
    with pytest.raises(AssertionError, match="112 bytes of indices, room for 64"):
        packed.put(SECOND)


def test_arrays_of_every_type_are_uploaded_unchanged() -> None:
    arrays = {
        "places": np.arange(3, dtype=np.int32),
        "bools": np.array([[True], [False], [True]]),
        "bytes": np.arange(5, dtype=np.uint8),
        "ids": np.arange(6, dtype=np.int64).reshape(2, 3) - 3,
        "floats": np.array([[0.1, -1e30]], np.float32),
        "doubles": np.array([0.1]),
        "nothing": np.empty((2, 0), np.int64),
    }
    there = upload(arrays, CPU)
    assert {name: each.tolist() for name, each in there.items()} == {
        name: each.tolist() for name, each in arrays.items()
    }
    assert all(there[name].numpy().dtype == each.dtype for name, each in arrays.items())
    assert upload({}, CPU) == {}
