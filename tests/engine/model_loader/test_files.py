"""Which files of a folder are the model, and what is said of those that are broken."""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

from ullage_common.config.engine import ModelSection
from ullage_engine.model_loader import loader
from ullage_engine.model_loader.files import (
    INDEX,
    SINGLE,
    check_files,
    check_for_vllm,
    read_safetensors_header,
    weight_files,
)
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.model_loader.source import ModelFiles, resolve_source
from ullage_engine.protocol.errors import WeightsError

Save = Callable[..., tuple[Any, Path]]
Load = Callable[..., LoadedModel]

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
STRAY = "consolidated.safetensors"
NOBODY = 65534
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 4976698672\n"
)


SHRINK_LESS = (Phase.explicit, Phase.reuse, Phase.generate)
"""Phases of a test whose examples take long, and say as much before they are shrunk."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a whole model, which every user may enter."""
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        made.chmod(0o755)
        (made / "config.json").write_text("{}")
        (made / "tokenizer.json").write_text("{}")
        put(made, SINGLE, "a", "b")
        yield made


def put(folder: Path, file: str, *names: str) -> None:
    save_file({name: torch.ones(2, 3) for name in names}, folder / file)


def put_index(folder: Path, **files: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def counted(folder: Path) -> list[str]:
    return [path.name for path in weight_files(folder)]


def refusal(folder: Path) -> str:
    """What is said of a folder that is no whole model: one line with a remedy."""
    with pytest.raises(WeightsError) as caught:
        check_files(resolve_source(f"file://{folder}"))
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message
    return message


def replace(folder: Path, name: str, contents: bytes) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(contents)


def cut(folder: Path, name: str, size: int) -> None:
    replace(folder, name, (folder / name).read_bytes()[:size])


def link(folder: Path, name: str, target: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(target)


def make_pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def make_folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def header_of(length: int, text: bytes) -> bytes:
    return struct.pack("<Q", length) + text


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "weights are a pointer": (
        lambda at: replace(at, SINGLE, POINTER),
        [SINGLE, "Git LFS pointer to a file of 4,976,698,672 bytes", "git lfs pull"],
    ),
    "config is a pointer": (
        lambda at: replace(at, "config.json", POINTER),
        ["config.json", "Git LFS pointer"],
    ),
    "tokenizer is a pointer": (
        lambda at: replace(at, "tokenizer.json", POINTER),
        ["tokenizer.json", "Git LFS pointer"],
    ),
    "weights are a page": (
        lambda at: replace(at, SINGLE, b"<!DOCTYPE html><html>Sign in</html>"),
        [SINGLE, "an HTML page", "download it again"],
    ),
    "weights are a dangling link": (
        lambda at: link(at, SINGLE, "../../blobs/4d7a"),
        [SINGLE, "a link to ../../blobs/4d7a, which is not there", "mount or copy"],
    ),
    "weights are a link to itself": (
        lambda at: link(at, SINGLE, SINGLE),
        [SINGLE, "symbolic links"],
    ),
    "config is a dangling link": (
        lambda at: link(at, "config.json", "gone"),
        ["config.json", "a link to gone"],
    ),
    "weights are a folder": (lambda at: make_folder(at, SINGLE), [SINGLE, "a folder where a file"]),
    "weights are a pipe": (lambda at: make_pipe(at, SINGLE), [SINGLE, "a pipe or device"]),
    "weights are empty": (lambda at: cut(at, SINGLE, 0), [SINGLE, "cut short: it has 0 bytes"]),
    "header is cut": (lambda at: cut(at, SINGLE, 40), [SINGLE, "cut short: its header takes"]),
    "data are cut": (lambda at: cut(at, SINGLE, -5), [SINGLE, "cut short", "bytes are there"]),
    "weights are too long": (
        lambda at: replace(at, SINGLE, (at / SINGLE).read_bytes() + b"xx"),
        [SINGLE, "2 bytes follow the last tensor"],
    ),
    "weights are zeros": (
        lambda at: replace(at, SINGLE, bytes(5000)),
        [SINGLE, "begins with zeros", "unfinished download"],
    ),
    "header is absurd": (
        lambda at: replace(at, SINGLE, header_of(1 << 60, bytes(100))),
        [SINGLE, "claims a header of 1,152,921,504,606,846,976 bytes"],
    ),
    "header is no JSON": (
        lambda at: replace(at, SINGLE, header_of(9, b"{{{{{{{{{")),
        [SINGLE, "its header is no JSON"],
    ),
    "header nests": (
        lambda at: replace(at, SINGLE, header_of(200_000, b"[" * 200_000)),
        [SINGLE, "not a whole safetensors file"],
    ),
    "header is a list": (
        lambda at: replace(at, SINGLE, header_of(2, b"[]")),
        [SINGLE, "no JSON object"],
    ),
    "a name is there twice": (
        lambda at: replace(at, SINGLE, header_of(15, b'{"a":{},"a":{}}')),
        [SINGLE, "twice"],
    ),
    "weights are of PyTorch by their contents": (
        lambda at: replace(at, SINGLE, b"PK\x03\x04" + bytes(100)),
        [SINGLE, "zip archive, as PyTorch writes"],
    ),
    "weights are a GGUF file by their contents": (
        lambda at: replace(at, SINGLE, b"GGUF" + bytes(100)),
        [SINGLE, "a GGUF file, and no safetensors"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_file_says_its_name_the_cause_and_the_remedy(folder: Path, damage: str) -> None:
    check_files(resolve_source(f"file://{folder}"))
    do, words = DAMAGE[damage]
    do(folder)
    message = refusal(folder)
    assert [word for word in [str(folder), *words] if word not in message] == [], message


@pytest.mark.parametrize("length", [0x0280, 0x10280, 0x8B1F])
def test_a_header_of_any_length_is_no_file_of_another_kind(folder: Path, length: int) -> None:
    """Its length is written as a pickle or a gzip file begins."""
    whole = (folder / SINGLE).read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    replace(folder, SINGLE, header_of(length, whole[8:data].ljust(length)) + whole[data:])
    check_files(resolve_source(f"file://{folder}"))
    assert read_safetensors_header(folder / SINGLE) == ["a", "b"]
    with safe_open(folder / SINGLE, framework="pt") as file:
        assert list(file.keys()) == ["a", "b"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SINGLE])
def test_a_file_that_may_not_be_read_names_the_user(folder: Path, name: str) -> None:
    (folder / name).chmod(0)
    is_root = os.geteuid() == 0
    if is_root:  # who may read everything
        os.seteuid(NOBODY)
    try:
        message = refusal(folder)
    finally:
        if is_root:
            os.seteuid(0)
    assert f"{folder / name}: Permission denied for user" in message
    assert "make the file and its folders readable" in message


def shards(folder: Path) -> None:
    (folder / SINGLE).unlink()
    put(folder, FIRST, "a")
    put(folder, SECOND, "b")


def indexed(folder: Path) -> None:
    shards(folder)
    put_index(folder, a=FIRST, b=SECOND)


def test_the_index_or_the_standard_name_says_which_files_count(folder: Path) -> None:
    put(folder, "later.safetensors", "a", "b")
    assert counted(folder) == [SINGLE]
    (folder / "later.safetensors").unlink()
    shards(folder)
    assert counted(folder) == [FIRST, SECOND]
    put(folder, SINGLE, "a")
    indexed(folder)
    put(folder, STRAY, "a", "b")
    assert counted(folder) == [FIRST, SECOND]
    (folder / FIRST).unlink()
    (folder / SECOND).unlink()
    (folder / INDEX).unlink()
    assert counted(folder) == [STRAY]


def stale_single(folder: Path) -> None:
    indexed(folder)
    put(folder, SINGLE, "a", "b")


def missing_shard(folder: Path) -> None:
    indexed(folder)
    (folder / SECOND).unlink()


def missing_unindexed_shard(folder: Path) -> None:
    shards(folder)
    (folder / FIRST).unlink()


def two_files(folder: Path) -> None:
    shards(folder)
    put(folder, "other.safetensors", "c")


def bad_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def pointer_index(folder: Path) -> None:
    (folder / INDEX).write_bytes(POINTER)


def empty_index(folder: Path) -> None:
    put_index(folder)


def only(name: str) -> Callable[[Path], None]:
    def leave(folder: Path) -> None:
        (folder / SINGLE).rename(folder / name)

    return leave


CHOICES: list[tuple[Callable[[Path], None], list[str]]] = [
    (stale_single, [SINGLE, INDEX, "two checkpoints", "remove the one"]),
    (missing_shard, [f"{SECOND} is missing, of the 2 files that {INDEX} names"]),
    (missing_unindexed_shard, ["1 of 2 files are there", SECOND, "missing are the numbers 1"]),
    (two_files, ["other.safetensors", FIRST, f"no {INDEX} says which"]),
    (bad_index, [INDEX, "not JSON"]),
    (pointer_index, [INDEX, "Git LFS pointer"]),
    (empty_index, [INDEX, "no 'weight_map'"]),
    (only("pytorch_model.bin"), ["pytorch_model.bin", "of PyTorch", "save_pretrained"]),
    (only("consolidated.00.pth"), ["consolidated.00.pth", "of PyTorch"]),
    (only("model.onnx"), ["model.onnx", "of ONNX", "safetensors"]),
    (only("tf_model.h5"), ["tf_model.h5", "of Keras"]),
    (only("flax_model.msgpack"), ["flax_model.msgpack", "of Flax"]),
    (only("model.Q4_0.gguf"), ["model.Q4_0.gguf", "name that file"]),
    (only("model.safetensors.incomplete"), ["a download that has not ended"]),
    (only("adapter_model.safetensors"), ["an adapter without its model", "spec.adapters"]),
    (only("weights.dat"), ["no .safetensors file", "download the model again"]),
]


@pytest.mark.parametrize(
    ("change", "words"), CHOICES, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_choice_or_a_contradiction_is_refused_by_name(
    folder: Path, change: Callable[[Path], None], words: list[str]
) -> None:
    change(folder)
    message = refusal(folder)
    assert [word for word in [str(folder), *words] if word not in message] == [], message


def test_vllm_takes_no_tensor_that_is_in_doubt(folder: Path) -> None:
    """Nobody knows which tensors it reads."""
    files = ModelFiles(folder, "directory")
    indexed(folder)
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": FIRST}
    put_index(folder, a=FIRST, b=SECOND, **tables)
    check_for_vllm(files, {})

    put_index(folder, a=FIRST, b=SECOND, c=SECOND)
    with pytest.raises(WeightsError, match=f"tensor 'c' is said to be in {SECOND}, which lacks"):
        check_for_vllm(files, {})

    put_index(folder, a=FIRST, b=SECOND)
    put(folder, SECOND, "a", "b")
    check_for_vllm(files, {})
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(2, 3)}, folder / SECOND)
    with pytest.raises(WeightsError, match=f"'a' is in both {FIRST} and {SECOND}, with different"):
        check_for_vllm(files, {})
    put_index(folder, a=SECOND, b=SECOND, c=FIRST)
    put(folder, FIRST, "a", "c")
    check_for_vllm(files, {})


UNTIED: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "lfm2", "tie_embedding": False, "tie_word_embeddings": True},
    {"model_type": "gemma2", "tie_word_embeddings": False},
    {"model_type": "gemma3", "text_config": {"tie_word_embeddings": False}},
    {"model_type": "llava", "text_config": {"model_type": "llama"}},
    {"tie_word_embeddings": False},
]
TIED: list[dict[str, Any]] = [
    {"model_type": "llama", "tie_word_embeddings": True},
    {"model_type": "lfm2"},
    {"model_type": "gemma"},
    {"model_type": "cohere", "tie_word_embeddings": None},
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
    {"text_config": {"tie_word_embeddings": True}},
    {"model_type": "llava", "text_config": {"model_type": "llama", "tie_word_embeddings": True}},
]


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
@pytest.mark.parametrize(
    ("config", "is_tied"),
    [*((config, False) for config in UNTIED), *((config, True) for config in TIED)],
    ids=str,
)
def test_vllm_needs_no_head_that_may_be_the_embedding(
    folder: Path, config: dict[str, Any], head: str, is_tied: bool
) -> None:
    indexed(folder)
    put_index(folder, a=FIRST, b=SECOND, **{head: SECOND})
    (folder / "config.json").write_text(json.dumps(config))
    files = ModelFiles(folder, "directory")
    if is_tied:
        check_for_vllm(files, {})
        return

    words = (
        rf"^model\.source: .*'{head}' is said to be in {SECOND}.* set tie_word_embeddings to true"
    )
    with pytest.raises(WeightsError, match=words):
        check_for_vllm(files, {})


def test_vllm_may_find_no_safetensors_that_the_native_engine_leaves_out(folder: Path) -> None:
    files = ModelFiles(folder, "directory")
    check_for_vllm(files, {})
    put(folder, "stale.safetensors", "a")
    check_files(files)
    with pytest.raises(WeightsError, match=r"would read stale\.safetensors beside model\.safeten"):
        check_for_vllm(files, {})
    check_for_vllm(files, {"load_format": "dummy"})
    put_index(folder, a=SINGLE, b=SINGLE)
    check_for_vllm(files, {})
    (folder / SINGLE).unlink()
    with pytest.raises(WeightsError, match=f"{SINGLE} is missing, of the 1 files"):
        check_for_vllm(files, {})
    check_for_vllm(files, {"load_format": "dummy"})


@pytest.mark.parametrize("name", ["old.safetensors", "tokenizer.model"])
def test_what_does_not_count_may_be_broken(save_llama: Save, load: Load, name: str) -> None:
    _, folder = save_llama()
    whole = load(f"file://{folder}")
    (folder / name).symlink_to("gone")
    again = load(f"file://{folder}")
    assert all(torch.equal(again.tensors[each], whole.tensors[each]) for each in whole.tensors)


def test_files_that_change_while_they_are_read_are_no_model(
    save_llama: Save, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = save_llama()
    plan = loader.plan_tensors

    def plan_and_touch(*arguments: Any) -> Any:
        os.utime(folder / SINGLE, ns=(1, 1))
        return plan(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(loader, "plan_tensors", plan_and_touch)
        with pytest.raises(WeightsError, match=r"its files changed while they were read; start"):
            load(f"file://{folder}")
    load(f"file://{folder}")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.1.mlp.down_proj.weight", float("nan"), "NaN or infinite"),
        ("lm_head.weight", float("inf"), "NaN or infinite"),
        ("model.embed_tokens.weight", 0.0, "only zeros"),
        ("model.layers.0.input_layernorm.weight", 0.0, "only zeros"),
    ],
)
def test_numbers_that_no_training_leaves_are_refused(
    save_llama: Save, load: Load, name: str, value: float, words: str
) -> None:
    _, folder = save_llama()
    tensors = load_file(folder / SINGLE)
    tensors[name].fill_(value) if value == 0.0 else tensors[name].view(-1)[7:8].fill_(value)
    save_file(tensors, folder / SINGLE)
    with pytest.raises(WeightsError, match=f"tensor '{name}' has .*{words}.*; download the model"):
        load(f"file://{folder}")


def headers() -> st.SearchStrategy[bytes]:
    names = st.text(st.sampled_from('ab."\\{}é'), min_size=1, max_size=4)
    kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
    shapes = st.lists(st.integers(0, 3), max_size=3)
    tensors = st.builds(lambda shape, kind: torch.zeros(shape, dtype=kind), shapes, kinds)
    metadata = st.one_of(st.none(), st.dictionaries(names, names, min_size=1, max_size=2))
    return st.builds(save, st.dictionaries(names, tensors, min_size=1, max_size=4), metadata)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), whole=headers())
def test_a_safetensors_file_is_whole_when_the_library_says_so(
    data: st.DataObject, whole: bytes
) -> None:
    """Whatever is overwritten, cut off or added."""
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    changed = data.draw(
        st.one_of(
            st.just(whole),
            st.just(whole[:begin]),
            st.binary(max_size=12).map(lambda middle: whole[:begin] + middle + whole[end:]),
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, SINGLE)
        path.write_bytes(changed)
        try:
            names = read_safetensors_header(path)
        except WeightsError as error:
            assert "\n" not in str(error)
            assert changed != whole
        else:
            # The library may refuse more, such as types that it does not know.
            try:
                with safe_open(path, framework="pt") as file:
                    assert sorted(file.keys()) == sorted(names)
            except SafetensorError:
                assert changed != whole


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_damaged_checkpoint_is_refused_or_its_other_tensors_are_the_same(
    small_llama: Path, data: st.DataObject
) -> None:
    """No digest of a safetensors file is known, so a byte of a tensor may have another value."""

    def loaded(folder: Path) -> LoadedModel:
        section = ModelSection(source=f"file://{folder}", name="t", quantization="none")
        cpu = torch.device("cpu")
        return load_weights(section, cpu, torch.float32, folder / "w", lambda done, total: None)

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "m")
        shutil.copytree(small_llama, folder)
        whole = loaded(folder)
        shutil.rmtree(folder / "w")
        path = folder / data.draw(st.sampled_from([SINGLE, "config.json"]))
        contents = path.read_bytes()
        first_data = 8 + int.from_bytes(contents[:8], "little")
        limit = first_data + 64 if path.name == SINGLE else len(contents)
        begin = data.draw(st.integers(0, limit))
        if data.draw(st.booleans()):
            path.write_bytes(contents[:begin])
        else:
            size = data.draw(st.integers(1, 8))
            noise = data.draw(st.binary(min_size=size, max_size=size))
            path.write_bytes(contents[:begin] + noise + contents[begin + size :])
        try:
            damaged = loaded(folder)
        except WeightsError as error:
            assert "\n" not in str(error)
            return
        if damaged.model_config != whole.model_config:
            # Another value of the configuration, as somebody may have written it.
            assert path.name == "config.json"
            return
        differing = [
            name
            for name, tensor in whole.tensors.items()
            if not torch.equal(damaged.tensors[name], tensor)
        ]
        is_data = path.name == SINGLE and begin + 8 >= first_data
        assert len(differing) <= (1 if is_data else 0), differing


def same_tensors(one: LoadedModel, other: LoadedModel) -> bool:
    names = one.tensors.keys() | other.tensors.keys()
    return all(
        name in one.tensors
        and name in other.tensors
        and torch.equal(one.tensors[name], other.tensors[name])
        for name in names
    )


@pytest.mark.timeout(300)
@settings(max_examples=25, deadline=None, phases=SHRINK_LESS)
@given(data=st.data())
def test_files_with_an_index_are_read_as_transformers_reads_them_or_refused(
    small_llama: Path, tied_llama: Path, data: st.DataObject
) -> None:
    """Whichever shards have tensors that nobody reads, other copies of a tensor, or lack one."""
    from transformers import AutoModelForCausalLM

    def loaded(folder: Path) -> LoadedModel:
        section = ModelSection(source=f"file://{folder}", name="t", quantization="none")
        cpu = torch.device("cpu")
        return load_weights(section, cpu, torch.float32, made / "w", lambda done, total: None)

    is_tied = data.draw(st.booleans(), "tied")
    model = tied_llama if is_tied else small_llama
    tensors = load_file(model / SINGLE)
    names = sorted(tensors)
    files = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    shards: dict[str, dict[str, torch.Tensor]] = {file: {} for file in files}
    index = {name: data.draw(st.sampled_from(files), name) for name in names}
    for name, file in index.items():
        shards[file][name] = tensors[name]

    # Which tensors the two may read otherwise.
    doubtful = set()
    read = {"model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"}
    unread = {"visual.proj.weight", "model.layers.7.mlp.up_proj.weight"}
    if is_tied:
        unread.add("lm_head.weight")
    for name in data.draw(st.sets(st.sampled_from(sorted(read | unread)), max_size=3), "copied"):
        if name not in index:
            index[name] = data.draw(st.sampled_from(files), name)
            if name == "lm_head.weight":
                shards[index[name]][name] = tensors["model.embed_tokens.weight"].clone()
            else:
                shards[index[name]][name] = torch.ones(2, 3)
        other = data.draw(st.sampled_from(files), f"other file of {name}")
        if other == index[name]:
            continue
        is_stale = name != "lm_head.weight" and data.draw(st.booleans(), f"{name} is stale")
        shards[other][name] = shards[index[name]][name] + is_stale
        if is_stale and other > index[name] and name in read:
            doubtful.add(name)
    for name in data.draw(st.sets(st.sampled_from(sorted(read | unread)), max_size=1), "lacking"):
        file = index.setdefault(name, files[0])
        shards[file].pop(name, None)
        if name in read:
            doubtful.add(name)

    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        folder = made / "m"
        shutil.copytree(model, folder)
        (folder / SINGLE).unlink()
        for file, part in shards.items():
            save_file(part, folder / file, {"format": "pt"})
        index |= {f"extra.{file}": file for file in files}
        contents = {"metadata": {"total_size": 0}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(contents))

        if doubtful:
            with pytest.raises(WeightsError) as caught:
                loaded(folder)
            assert any(f"tensor {name!r} is" in str(caught.value) for name in doubtful)
            return
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(made / "theirs")
        assert same_tensors(loaded(folder), loaded(made / "theirs"))


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ullage_testing.small_models import make_llama

    return make_llama(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)[1]


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ullage_testing.small_models import make_llama

    return make_llama(tmp_path_factory.mktemp("llama"))[1]
