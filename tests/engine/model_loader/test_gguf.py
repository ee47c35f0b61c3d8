"""GGUF files of every supported quantisation, and broken ones."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantisation
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.config.engine import ModelSection
from ullage_engine.kernels.arena import StepLimits
from ullage_engine.layers.native_decoder import library_refusal
from ullage_engine.model_loader.gguf import GgufMetadata, GgufReader, _open, gguf_name
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.native.library import instruction_set
from ullage_engine.parallel.layout import RankLayout
from ullage_engine.parallel.slices import Slicer
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import unpack

HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
HIDDEN = 256
WIDTH = 512
VOCAB = 96
LAYERS = 2
TOLERANCE = {"F32": 0.0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 2e-2, "Q4_0": 0.3, "Q4_1": 0.3}
Tensors = dict[str, np.ndarray]


def random_tensors() -> Tensors:
    """A Llama's tensors by Hugging Face's names, in its order."""
    generator = np.random.default_rng(1)
    query = HEADS * HEAD_DIM
    key = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, HIDDEN)}
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        shapes |= {
            f"{prefix}input_layernorm": (HIDDEN,),
            f"{prefix}post_attention_layernorm": (HIDDEN,),
            f"{prefix}self_attn.q_proj": (query, HIDDEN),
            f"{prefix}self_attn.k_proj": (key, HIDDEN),
            f"{prefix}self_attn.v_proj": (key, HIDDEN),
            f"{prefix}self_attn.o_proj": (HIDDEN, query),
            f"{prefix}mlp.gate_proj": (WIDTH, HIDDEN),
            f"{prefix}mlp.up_proj": (WIDTH, HIDDEN),
            f"{prefix}mlp.down_proj": (HIDDEN, WIDTH),
        }
    shapes["model.norm"] = (HIDDEN,)
    return {
        f"{name}.weight": generator.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def permuted(name: str, values: np.ndarray) -> np.ndarray:
    """What llama.cpp's converter does to Q and K: pairs of rotary halves become neighbours."""
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return values
    halves = values.reshape(heads, 2, HEAD_DIM // 2, HIDDEN)
    return halves.swapaxes(1, 2).reshape(values.shape)


def write(
    path: Path,
    tensors: Tensors,
    quantisation: str = "F32",
    value_kind: str = "",
    embedding_kind: str = "",
    part_tensors: int = 0,
    **metadata: Callable[[Any], None],
) -> None:
    """`value_kind`: of the matrices of values, if it is another; so is `embedding_kind`.
    `part_tensors`: tensors of each part; 0: the file is whole."""
    architecture = str(metadata.pop("architecture", "llama"))
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    for change in metadata.values():
        change(writer)
    for name, values in tensors.items():
        own = value_kind if value_kind and ".v_proj." in name else quantisation
        own = embedding_kind if embedding_kind and ".embed_tokens." in name else own
        kind = Quantisation["F32" if values.ndim == 1 else own]
        raw = encoded(permuted(name, values), kind)
        writer.add_tensor(gguf_name("llama", name)[0], raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encoded(values: np.ndarray, kind: Quantisation) -> np.ndarray:
    if kind.name in ("F32", "F16"):
        return values.astype(np.float32 if kind.name == "F32" else np.float16)
    if kind.name in ("Q4_K", "Q6_K"):
        return random_blocks(values.shape, kind)
    return quantize(values, kind)


def random_blocks(shape: tuple[int, ...], kind: Quantisation) -> np.ndarray:
    """Blocks of any bits with scales of one: gguf has no encoder for these."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(2)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    one = np.frombuffer(np.float16(1.0).tobytes(), dtype=np.uint8)
    blocks[..., 0:2] = blocks[..., 0:2] if kind.name == "Q6_K" else one
    blocks[..., 2:4] = blocks[..., 2:4] if kind.name == "Q6_K" else one
    blocks[..., -2:] = one if kind.name == "Q6_K" else blocks[..., -2:]
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("quantisation", TOLERANCE)
def test_tensors_come_back_in_hugging_faces_order(tmp_path: Path, quantisation: str) -> None:
    path = tmp_path / "model.gguf"
    tensors = random_tensors()
    write(path, tensors, quantisation)
    reader = GgufReader(path)
    for name, expected in tensors.items():
        got = reader.read(name).float().numpy()
        assert got.shape == expected.shape
        limit = TOLERANCE[quantisation] * np.abs(expected).max()
        assert np.abs(got - expected).max() <= limit, name


@pytest.mark.parametrize("quantisation", ["Q4_K", "Q6_K"])
def test_k_quantised_tensors_are_dequantised(tmp_path: Path, quantisation: str) -> None:
    path = tmp_path / "model.gguf"
    tensors = random_tensors()
    write(path, tensors, quantisation)
    name = "model.layers.1.mlp.down_proj.weight"
    kind = Quantisation[quantisation]
    expected = dequantize(random_blocks(tensors[name].shape, kind), kind)
    got = GgufReader(path).read(name)
    assert torch.equal(got, torch.from_numpy(expected.reshape(tensors[name].shape)))


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_1"])
def test_ranks_hold_the_files_own_blocks(tmp_path: Path, quantisation: str) -> None:
    path = tmp_path / "model.gguf"
    write(path, random_tensors(), quantisation)
    section = ModelSection(source=f"file://{path}", name="t", quantization="int4")
    cpu = torch.device("cpu")
    layout = RankLayout(tensor=2, pipeline=2)

    def loaded(rank: int | None = None) -> LoadedModel:
        shard = None if rank is None else lambda model, stored: Slicer(model, layout, rank, stored)
        return load_weights(section, cpu, torch.float32, tmp_path, lambda done, total: None, shard)

    whole = loaded()
    blocks = {name: unpack(whole.packed(name)).dequantise() for name in whole.encodings}
    assert len(blocks) == 4 * LAYERS + (instruction_set() is not None)
    for rank in range(layout.world):
        part = loaded(rank)
        plain = Slicer(whole.model_config, layout, rank)
        held = {name for name in blocks if plain.holds(name)}
        assert part.encodings.keys() == held
        for name in held:
            expected = plain.part(name, blocks[name])
            assert expected is not None
            assert torch.equal(unpack(part.packed(name)).dequantise(), expected)


def prepared(path: Path, quantization: str) -> LoadedModel:
    section = ModelSection(source=f"file://{path}", name="t", quantization=quantization)  # type: ignore[arg-type]
    cpu = torch.device("cpu")
    return load_weights(section, cpu, torch.float32, path.parent, lambda done, total: None)


@pytest.mark.parametrize(
    ("kinds", "format"),
    [
        (("Q4_K", "Q4_K"), "int4"),
        (("Q5_0", "Q5_0"), "int8"),
        (("Q8_0", "Q8_0"), "int8"),
        (("Q4_K", "Q6_K"), "int8"),
        (("Q4_0", "Q5_1"), "int8"),
    ],
)
def test_int4_keeps_blocks_of_four_to_eight_bits(
    kinds: tuple[str, str], format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the three matrices of one product the last may be wider than the others."""
    path = tmp_path / "model.gguf"
    write(path, random_tensors(), kinds[0], kinds[1])
    plain = prepared(path, "none")
    kept = prepared(path, "int4")
    for name, encoding in kept.encodings.items():
        assert encoding.format == (format if name.endswith("qkv") else kept_format(kinds[0]))
        numbers = unpack(kept.packed(name)).dequantise()
        # Tiles have scales and offsets in float16.
        largest = plain.tensors[name].abs().max()
        assert (numbers - plain.tensors[name]).abs().max() <= largest * 2**-10, name
    assert not caplog.records


def test_a_plain_embedding_is_int8_where_layers_keep_their_blocks(tmp_path: Path) -> None:
    """Or the library would compute none of the model's steps."""
    limits = StepLimits(8, 1, 64, 64, itemsize=4)
    cpu = torch.device("cpu")
    for kind, quantization in (("Q4_1", "auto"), ("Q4_1", "none"), ("F16", "auto")):
        path = tmp_path / f"{kind}.gguf"
        write(path, random_tensors(), kind, embedding_kind="F16")
        loaded = prepared(path, quantization)
        is_kept = (kind, quantization) == ("Q4_1", "auto") and instruction_set() is not None
        assert ("embedding" in loaded.encodings) == is_kept
        assert (library_refusal(loaded, limits, cpu, torch.float32) == "") == is_kept
        if is_kept:
            assert loaded.encodings["embedding"].format == "int8"


def kept_format(kind: str) -> str:
    return "int4" if kind.startswith("Q4") else "int8"


def test_rounding_a_files_blocks_a_second_time_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    write(path, random_tensors(), "Q4_0")
    prepared(path, "fp8")
    (record,) = caplog.records
    assert "fp8 rounds 8 matrices a second time" in record.getMessage()
    assert "Q4_0" in record.getMessage()


def test_geometry_comes_from_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensors = random_tensors()
    write(path, tensors, rope=lambda writer: writer.add_rope_freq_base(5e5))
    model_config = GgufReader(path).model_config
    assert (model_config.head_dim, model_config.vocab, model_config.max_position) == (
        HEAD_DIM,
        VOCAB,
        512,
    )
    assert model_config.rope_theta == 5e5
    assert model_config.tied
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write(path, tensors)
    assert not GgufReader(path).model_config.tied


def write_metadata(path: Path, tokens: list[str]) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_array("flags", [True, False])
        writer.add_array("weights", [0.5, -2.0])
        writer.add_uint8("after", 7)

    write(path, random_tensors(), metadata=add)


def test_metadata_are_what_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_metadata(path, ["a", "", "β", "a word"])
    fields = gguf.GGUFReader(path).fields
    assert len(fields) > 15
    metadata = GgufMetadata(path, _open(path))
    for name, field in fields.items():
        assert metadata.value(name) == field.contents(), name
    assert metadata.value("tokenizer.ggml.tokens") == ["a", "", "β", "a word"]
    assert metadata.value("flags") == [True, False]
    assert metadata.value("after") == 7


def test_a_file_that_ends_in_its_vocabulary_is_told(
    tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    path = tmp_path / "model.gguf"
    write_metadata(path, ["a word"] * 3)
    data = path.read_bytes()
    vocabulary = data.index(b"a word") - 8
    for end in (0, 3, 8, 11, 14, 17, 22, 30, 42):
        path.write_bytes(data[: vocabulary + end])
        fails_with(path, load, "not a whole GGUF file")
    # More strings than the file can hold.
    path.write_bytes(data[: vocabulary - 8] + b"\xff" * 7 + b"\x7f" + data[vocabulary:])
    fails_with(path, load, "not a whole GGUF file")


def fails_with(path: Path, load: Callable[..., LoadedModel], *words: str) -> None:
    with pytest.raises(WeightsError) as caught:
        load(f"file://{path}")
    message = str(caught.value)
    assert "\n" not in message
    for word in (path.name, *words):
        assert word in message


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_told(
    tmp_path: Path, load: Callable[..., LoadedModel], share: float
) -> None:
    path = tmp_path / "model.gguf"
    write(path, random_tensors())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    fails_with(path, load, "not a whole GGUF file", "download it again")


def test_parts_of_a_split_file_are_one_model(
    tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    tensors = random_tensors()
    write(tmp_path / "whole.gguf", tensors, "Q4_1")
    write(tmp_path / "split.gguf", tensors, "Q4_1", part_tensors=4)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) == 5
    whole = load(f"file://{tmp_path}/whole.gguf")
    split = load(f"file://{parts[3]}")
    assert split.model_config == whole.model_config
    assert split.content == whole.content
    assert split.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert torch.equal(split.tensors[name], tensor), name

    os.utime(parts[4], ns=(1, 1))
    assert load(f"file://{parts[0]}").key != split.key
    parts[4].unlink()
    fails_with(parts[0], load, f"missing beside it are {parts[4].name}")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_its_other_tensors_are_the_same(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write(path, random_tensors())
        whole = prepared(path, "none")
        contents = path.read_bytes()
        # The metadata and the descriptions of tensors, and a few numbers of the first of them.
        limit = contents.index(b"blk.1.ffn_down") + data.draw(st.integers(0, 2000))
        begin = data.draw(st.integers(0, limit))
        if data.draw(st.booleans()):
            path.write_bytes(contents[:begin])
        else:
            noise = data.draw(st.binary(min_size=1, max_size=8))
            path.write_bytes(contents[:begin] + noise + contents[begin + len(noise) :])
        try:
            damaged = prepared(path, "none")
        except WeightsError as error:
            assert "\n" not in str(error)
            return
        if damaged.model_config != whole.model_config:
            return  # Another value of the metadata, as somebody may have written it.
        pairs = zip(damaged.tensors.values(), whole.tensors.values(), strict=True)
        assert sum(not torch.equal(*pair) for pair in pairs) <= 1


def test_another_format_is_told(tmp_path: Path, load: Callable[..., LoadedModel]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    fails_with(path, load, "not a whole GGUF file")


def test_another_architecture_is_told(tmp_path: Path, load: Callable[..., LoadedModel]) -> None:
    path = tmp_path / "model.gguf"
    write(path, random_tensors(), architecture="mamba")  # type: ignore[arg-type]
    fails_with(path, load, "'mamba' is not supported", "llama")


def test_another_quantisation_is_told(tmp_path: Path, load: Callable[..., LoadedModel]) -> None:
    path = tmp_path / "model.gguf"
    write(path, random_tensors(), "TQ2_0")
    fails_with(path, load, "TQ2_0", "token_embd.weight", "Q4_1")


def test_metadata_that_are_no_text_are_told(
    tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    path = tmp_path / "model.gguf"
    kind = gguf.RopeScalingType.YARN
    write(path, random_tensors(), scaling=lambda writer: writer.add_rope_scaling_type(kind))
    path.write_bytes(path.read_bytes().replace(b"yarn", b"\xffarn"))
    fails_with(path, load, "'llama.rope.scaling.type' is no UTF-8", "download it again")


def test_what_nobody_foresaw_of_a_header_is_no_reason_for_another_start(
    tmp_path: Path, load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write(path, random_tensors())

    def read(*arguments: object) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr("ullage_engine.model_loader.gguf.read_model_config", read)
    fails_with(path, load, "cannot be read: KeyError: 'unforeseen'; download the model again")


def test_missing_metadata_is_told(tmp_path: Path, load: Callable[..., LoadedModel]) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(HIDDEN)
    writer.add_tensor("token_embd.weight", np.zeros((4, HIDDEN), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fails_with(path, load, "llama.attention.head_count", "missing")


def test_a_missing_tensor_is_told(tmp_path: Path, load: Callable[..., LoadedModel]) -> None:
    path = tmp_path / "model.gguf"
    tensors = random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write(path, tensors)
    fails_with(path, load, "blk.1.ffn_up.weight", "missing")


def test_a_tensor_that_no_layer_reads_is_told(
    tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    def add_bias(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(HEADS * HEAD_DIM, np.float32))

    path = tmp_path / "model.gguf"
    write(path, random_tensors(), bias=add_bias)
    fails_with(path, load, "blk.0.attn_q.bias", "not part of the models supported")


def test_a_wrong_shape_is_told(tmp_path: Path, load: Callable[..., LoadedModel]) -> None:
    path = tmp_path / "model.gguf"
    tensors = random_tensors()
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((WIDTH - 32, HIDDEN), np.float32)
    write(path, tensors)
    fails_with(path, load, "model.layers.0.mlp.up_proj.weight", "[480, 256]", "[512, 256]")
