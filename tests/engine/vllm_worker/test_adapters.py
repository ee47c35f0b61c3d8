"""How many adapters are loaded at a time, which, and who waits for one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from ullage_testing.fake_vllm import FakeVllm

from ullage_common.config.engine import AdapterSection, EngineConfig, ModelSection
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.vllm_worker import adapters
from ullage_engine.vllm_worker.adapters import (
    Adapters,
    Turns,
    fetch_adapters,
    num_slots,
    slot_bytes,
)

NAMES = ("a", "b", "c", "d")


def write(folder: Path, **tensors: tuple[torch.dtype, tuple[int, ...]]) -> Path:
    made = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in tensors.items()}
    save_file(made, folder / "model.safetensors")
    return folder


def test_a_slot_has_two_matrices_for_each_of_the_model(tmp_path: Path) -> None:
    half = torch.float16
    packed = torch.int32
    folder = write(
        tmp_path,
        **{
            "model.embed_tokens.weight": (half, (1000, 64)),
            "model.layers.0.norm.weight": (half, (64,)),
            "model.layers.0.q_proj.weight": (half, (128, 64)),
            "model.layers.0.q_proj.weight_scale": (half, (128, 1)),
            "model.layers.0.experts.gate_up_proj": (half, (8, 64, 96)),
            "model.layers.0.experts.gate_up_proj_bias": (half, (8, 96)),
            "model.layers.0.down_proj.qweight": (packed, (12, 64)),
            "model.layers.0.down_proj.qzeros": (packed, (1, 8)),
        },
    )
    tied_embedding = 2 * (1000 + 64)
    sides = tied_embedding + (128 + 64) + 8 * (64 + 96) + (96 + 64)
    assert slot_bytes(folder, 16, 2) == sides * 16 * 2
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    head = {"lm_head.weight": torch.empty(500, 64)}
    save_file(head, folder / "model-00002-of-00002.safetensors")
    assert slot_bytes(folder, 16, 2) == (sides - 1064 + 564) * 16 * 2
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}})
    )
    assert slot_bytes(folder, 8, 4) == 564 * 8 * 4


def test_a_checkpoint_without_safetensors_says_nothing_of_slots(tmp_path: Path) -> None:
    assert slot_bytes(tmp_path, 16, 2) == 0
    assert num_slots(5, 1, 0, copy_bytes=0, num_spare=1) == 5


@pytest.mark.parametrize(
    ("room", "copy_bytes", "num_spare", "expected"),
    [
        (1000, 0, 0, 3),  # all fit
        (299, 0, 0, 2),
        (300, 0, 1, 2),
        (500, 100, 1, 2),
        (0, 0, 1, 1),  # one is always loaded
    ],
)
def test_as_many_are_loaded_as_there_is_room_for(
    room: int, copy_bytes: int, num_spare: int, expected: int
) -> None:
    assert num_slots(3, room, 100, copy_bytes=copy_bytes, num_spare=num_spare) == expected


def turns(loaded: str, in_use: str, free: int = 0) -> Turns:
    return Turns(NAMES, list(loaded), set(in_use), free)


def test_what_needs_no_slot_never_waits() -> None:
    asked = turns(loaded="ab", in_use="ab")
    assert [asked.slot_for(each) for each in ("", "unknown", "a", "b")] == [""] * 4


def test_a_free_slot_comes_first_then_that_of_the_longest_unused() -> None:
    assert turns(loaded="a", in_use="", free=1).slot_for("b") == ""
    assert turns(loaded="abc", in_use="a").slot_for("d") == "b"


def test_one_that_is_in_use_gives_way_to_who_waits_and_starts_no_more() -> None:
    asked = turns(loaded="ab", in_use="ab")
    assert [asked.slot_for(each) for each in "ccab"] == [None, None, None, ""]


def test_each_that_waits_has_another_one_give_way() -> None:
    asked = turns(loaded="ab", in_use="ab")
    assert [asked.slot_for(each) for each in "cdab"] == [None] * 4


def test_who_is_asked_first_keeps_the_slot() -> None:
    # The first one waits for memory; it is not to lose its adapter meanwhile.
    asked = turns(loaded="ab", in_use="b")
    assert [asked.slot_for(each) for each in "acb"] == ["", None, None]
    asked = turns(loaded="ab", in_use="")
    assert [asked.slot_for(each) for each in "cdc"] == ["a", "b", "a"]


def make_adapters(num_slots: int) -> tuple[Adapters, FakeVllm]:
    core = FakeVllm(8, 16, adapter_slots=num_slots)
    return Adapters(core, num_slots), core


def test_one_that_comes_is_loaded_where_a_slot_is_free_and_else_only_read() -> None:
    adapters, core = make_adapters(1)
    assert adapters.add("a", "/a", is_checked=False) == ""
    assert adapters.add("b", "/b", is_checked=False) == ""
    assert core.loaded == ["a"]
    assert (adapters.num_loads, adapters.num_unloads) == (1, 0)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_one_that_cannot_be_read_is_forgotten_and_costs_no_slot(num_slots: int) -> None:
    adapters, core = make_adapters(num_slots)
    core.unreadable = {"broken"}
    assert adapters.add("a", "/a", is_checked=False) == ""
    assert adapters.add("broken", "/x", is_checked=False) == "there is no /x"
    assert core.adapters == {"a": "/a"}
    assert adapters.add("b", "/b", is_checked=False) == ""
    assert core.loaded == ["a", "b"][:num_slots]


def test_one_that_goes_gives_back_its_slot() -> None:
    adapters, core = make_adapters(1)
    adapters.add("a", "/a", is_checked=False)
    adapters.remove("a")
    adapters.remove("unknown")
    assert (core.loaded, core.adapters) == ([], {})
    adapters.add("a", "/a", is_checked=False)
    assert core.loaded == ["a"]


def test_one_that_a_former_worker_had_is_loaded_when_it_is_asked_for() -> None:
    adapters, core = make_adapters(1)
    adapters.add("a", "/a", is_checked=True)
    assert core.loaded == []
    adapters.use("a", "")
    assert core.loaded == ["a"]


def test_a_follower_fetches_adapters_after_any_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [f"file://{tmp_path}/{name}" for name in ("a", "b")]
    failures: list[Exception] = [
        PermissionError("Permission denied"),
        PermissionError("Permission denied"),
        ValueError("unforeseen"),
        WeightsError("not there"),
    ]
    fetched = []

    def resolve(source: str) -> Path:
        if source == sources[0] and failures:
            raise failures.pop(0)
        fetched.append(source)
        return tmp_path

    monkeypatch.setattr(adapters, "_LOOK_S", 0.001)
    monkeypatch.setattr(adapters, "resolve_adapter", resolve)
    sections = tuple(AdapterSection(name=each[-1], source=each, rank=8) for each in sources)
    fetch_adapters(EngineConfig(model=ModelSection(source="m", name="m"), adapters=sections))

    assert sorted(fetched) == sources
    assert [each.message for each in caplog.records] == [
        f"the adapter {sources[0]} cannot be fetched; retrying",
        f"the adapter {sources[0]} cannot be fetched; retrying",
        "not there",
    ]
