"""Models quantised offline load as what they say, and w8a8 is smoothed without changing results."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ullage_common.config.engine import ModelSection
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import Format, unpack
from ullage_engine.quantize.calibration import Int4Calibration
from ullage_engine.quantize.convert import (
    STATISTICS,
    Conversion,
    ModelDirectory,
    convert,
    ended_by_exit,
    main,
    unfinished_folder,
)
from ullage_engine.quantize.smoothquant import TextPass, calibrate, smoothing

HIDDEN = 64
WIDTH = 128
VOCAB = 96
CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": WIDTH,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
GPT_OSS = CONFIG | {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "sliding_window": 24,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "swiglu_limit": 7.0,
}
ROWS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}


@pytest.fixture
def source(tmp_path: Path, seed: int) -> Path:
    """A small Llama with a few large channels, as trained models have them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    folder = tmp_path / "source"
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for index in range(2):
        prefix = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights = torch.ones(HIDDEN)
            weights[:3] = 5.0
            tensors[f"{prefix}{norm}.weight"] = weights
        for name, shape in ROWS.items():
            tensors[f"{prefix}{name}.weight"] = torch.randn(shape, generator=generator) * 0.1
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(str(i * 7 % VOCAB) for i in range(600)))
    return path


def load(folder: Path, quantization: str = "none") -> LoadedModel:
    section = ModelSection(source=f"file://{folder}", name="t", quantization=quantization)  # type: ignore[arg-type]
    return load_weights(
        section,
        CPU,
        torch.float32,
        folder / "prepared",
        lambda done, total: None,
        calibration=Int4Calibration(),
    )


def converted(source: Path, format: Format, text: Path | None = None) -> Path:
    output = source.parent / format
    convert(Conversion(f"file://{source}", format, output, text), lambda stage, done, total: None)
    return output


def logits(loaded: LoadedModel) -> torch.Tensor:
    return TextPass(loaded, torch.float32, 48).logits([i * 5 % VOCAB for i in range(40)])


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_offline_is_as_at_load(source: Path, format: Format) -> None:
    """But for the type of the scales: offline they are bfloat16, so that every type has them."""
    offline = load(converted(source, format))
    at_load = load(source, format)
    assert offline.encodings == at_load.encodings
    layers = {name for name in offline.encodings if name.startswith("layers.")}
    assert {offline.encodings[name].format for name in layers} == {format}
    for name in offline.encodings:
        found = unpack(offline.packed(name)).dequantise()
        wanted = unpack(at_load.packed(name)).dequantise()
        assert relative(found, wanted) < (0.1 if format == "int4" else 0.03)
    error = relative(logits(offline), logits(load(source)))
    assert 0 < error < {"int8": 0.1, "fp8": 0.4, "int4": 0.8}[format]


def test_w8a8_is_calibrated_and_smoothed(source: Path, text: Path) -> None:
    output = converted(source, "w8a8", text)
    loaded = load(output, "w8a8")
    assert {each.format for each in loaded.encodings.values()} == {"w8a8"}
    plain = logits(load(source))
    assert relative(logits(loaded), plain) < 0.2
    maxima = load_file(output / STATISTICS)
    assert set(maxima) == {
        f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "output", "gate_up", "down")
    }
    # The large channels became smaller by what the matrix's columns grew.
    assert loaded.tensors["layers.0.mixer_norm"][:3].max() < 5.0


def test_smoothing_keeps_the_product(new_weights: Callable[..., torch.Tensor]) -> None:
    x = new_weights(5, HIDDEN)
    weights = new_weights(7, HIDDEN)
    for dtype in (torch.float32, torch.bfloat16):
        norm = torch.linspace(0.1, 30, HIDDEN).to(dtype)
        activations = (x * norm.float()).abs().amax(0)
        new, columns = smoothing(activations, weights, norm, 0.5)
        before = (x * norm.float()) @ weights.t()
        after = (x * new.float()) @ (weights * columns).t()
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
        spread = (x * new.float()).abs().amax(0)
        assert spread.max() / spread.min() < activations.max() / activations.min()


def test_calibration_finds_the_largest_activations(source: Path) -> None:
    loaded = load(source)
    tokens = [1, 2, 3, 4]
    maxima = calibrate(loaded, torch.float32, tokens, lambda done, total: None)
    rows = loaded.tensors["embedding"][torch.tensor(tokens)]
    normed = rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + 1e-5)
    wanted = (normed * loaded.tensors["layers.0.mixer_norm"]).abs().amax(0)
    torch.testing.assert_close(maxima["layers.0.qkv"], wanted, rtol=1e-4, atol=1e-5)


def test_mistakes_are_one_line(
    source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"file://{source}"
    new = str(tmp_path / "new")
    int8 = converted(source, "int8")
    before = set(tmp_path.iterdir())
    for arguments, words in (
        (["--model", uri, "--format", "w8a8", "--output", new], "add --calibrate FILE"),
        (["--model", uri, "--format", "int8", "--output", str(int8)], "not empty"),
        (["--model", uri, "--format", "int8", "--output", str(text)], f"{text}: is a file"),
        (["--model", uri, "--format", "int8", "--output", f"{text}/in"], f"{text}/in: "),
        (["--model", "file:///none", "--format", "int8", "--output", new], "'file:///none'"),
        (["--model", f"file://{int8}", "--format", "int4", "--output", new], "int8 already"),
        (
            ["--model", uri, "--format", "w8a8", "--output", new, "--calibrate", "/none"],
            "--calibrate /none",
        ),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: ")
        assert words in error.splitlines()[-1]
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("threads", ["-2", "0"])
def test_threads_are_counted_from_one(threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--model", "file:///none", "--format", "int8", "--output", "o", "--threads", threads]
    with pytest.raises(SystemExit, match="2"):
        main(wanted)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(f"argument --threads: {threads} is less than 1")


def test_what_a_killed_run_left_is_removed(source: Path) -> None:
    left = source.parent / "int8.unfinished"
    (left / "prepared").mkdir(parents=True)
    (left / "model-00007.safetensors").write_text("half")
    output = converted(source, "int8")
    assert not left.exists()
    assert not (output / "model-00007.safetensors").exists()


def test_two_runs_do_not_write_one_folder(source: Path) -> None:
    with (
        unfinished_folder(source.parent / "int8"),
        pytest.raises(WeightsError, match="another run writes it"),
    ):
        converted(source, "int8")
    assert load(converted(source, "int8")).encodings


def test_a_terminated_run_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match="143"),
        ended_by_exit(),
        unfinished_folder(tmp_path / "int8") as folder,
    ):
        (folder / "shard").write_text("half")
        signal.raise_signal(signal.SIGTERM)
    assert not list(tmp_path.iterdir())


def test_what_stays_plain_is_named(source: Path) -> None:
    """So that other engines do not look for scales of it."""
    config = json.loads((converted(source, "int8") / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    directory = ModelDirectory(source.parent)
    for name in ("model.embed_tokens", "model.norm", "model.layers.2.feed_forward.gate"):
        directory.add(f"{name}.weight", torch.zeros(*([4] if "norm" in name else [4, 4])))
    directory.add("model.layers.0.conv.conv.weight", torch.zeros(4, 1, 3))
    assert directory.plain_linears == ["lm_head", "model.layers.2.feed_forward.gate"]


def test_experts_that_no_checkpoint_format_holds_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "oss"
    folder.mkdir()
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GPT_OSS))
    with pytest.raises(WeightsError, match=r"experts of gpt_oss in .*quantization: int8"):
        converted(folder, "int8")


def test_a_plain_model_is_not_w8a8(source: Path) -> None:
    with pytest.raises(WeightsError, match="not calibrated"):
        load(source, "w8a8")


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "--calibrate FILE" in shown
    assert "ullage quantize --model" in shown
